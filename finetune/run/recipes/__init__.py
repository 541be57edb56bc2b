"""Each recipe's description: its groups of flags and its defaults. `NAME.py` here describes `recipes/NAME.py`."""
