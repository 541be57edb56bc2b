"""Flags of short runs of recipes/causal_lm.py whose losses and weights are compared to rounding."""

from __future__ import annotations

from typing import Any

RECIPE = "recipes/causal_lm.py"
GLOBAL_BATCH = 4
SHORT: dict[str, Any] = {
    "max_steps": 3,
    "logging_steps": 1,
    "do_eval": False,
    "save_strategy": "no",
    "bf16": False,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "block_size": 64,
    "sample_tokens": 0,
    "max_grad_norm": "inf",  # measured, and not clipped
}
ONE_A_BLOCK, PACKED = {"packing": "none"}, {"packing": "bfd", "document_mask": True}
