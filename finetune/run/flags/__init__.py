"""The recipes' flags, grouped in dataclasses, with the checks that need only flags and the launch."""
