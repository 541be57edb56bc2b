"""Everything in one run: process start-up, arguments, the Trainer and its callbacks, metrics, the run folder."""
