"""Resuming with a different number of ranks, ZeRO stage or engine than the one that wrote the checkpoint."""
