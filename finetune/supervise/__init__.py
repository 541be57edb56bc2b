"""Runs that start again by themselves after a failure, on the ranks and hosts that are left. Never imports torch."""
