"""Where a step's time goes: a few steps traced by torch's profiler and split into parts, and DeepSpeed's own profilers,
enabled by flags. docs/profiling.md explains an example."""
