"""The library behind the recipes: only what two recipes share. Import the sub-packages by name."""

__version__ = "0.1.0"
