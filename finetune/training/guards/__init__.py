"""Handling of failures during training (a hang, NaN, out of memory, bad data): explain them, and end or continue."""
