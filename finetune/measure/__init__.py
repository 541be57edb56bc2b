"""Measure a short real run of a planned layout on this machine: memory between steps, peak memory, step time."""
