"""The library behind the recipes: only what two recipes share. Import the sub-packages by name."""

__version__ = "0.1.0"

import logging

# Where it is installed, every import of transformers' Trainer brings it in, and on a CPU it warns on every rank of a
# kernel that only 4-bit inference has (bitsandbytes 0.50, backends/cpu/ops.py).
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
