"""A short real run of a planned layout on the machine at hand, measured: its memory, its peak, its step time."""
