"""What ends a run in words, or keeps it going, where something fails in its midst: a hang, a NaN, memory, data."""
