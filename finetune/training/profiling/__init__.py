"""What a step's time goes into: a few steps traced by torch's profiler and split into parts, and DeepSpeed's own
profilers by flag. docs/profiling.md reads one."""
