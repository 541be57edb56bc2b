"""The library behind the recipes: only what two recipes share. Import the sub-packages by name."""

__version__ = "0.1.0"

import logging
import os

# Where it is installed, every import of transformers' Trainer brings it in, and on a CPU it warns on every rank of a
# kernel that only 4-bit inference has (bitsandbytes 0.50, backends/cpu/ops.py).
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# torch asks for huge pages for CPU tensors of 2 MiB and more where this is set when the first tensor is made (c10,
# impl/alloc_cpu.cpp), which importing transformers' Trainer does. Large tensors that live for a step, such as ZeRO's
# buckets and a language model's logits, are else faulted in by 4 KiB each time (docs/results/zero_speed.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
