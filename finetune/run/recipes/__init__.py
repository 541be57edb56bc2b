"""What each recipe is: its groups of flags and its defaults. `recipes/NAME.py` trains by `NAME.py` here."""
