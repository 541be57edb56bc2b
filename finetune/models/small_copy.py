"""A small copy of a model to test its behavior: does it keep documents apart, does its head alone compute its loss?"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


def small_copy(model: Any, vocab_size: int, changes: Mapping[str, Any] | None = None) -> Any:
    """A copy of `model` with one layer of each type in its config, `vocab_size` tokens, `changes` to its config and
    new random weights, on the CPU, in evaluation mode. The run's random state is preserved. Raises whatever the
    shortened config or model raises."""
    config = copy.deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ["attention"]))
    config.num_hidden_layers = len(types)
    if getattr(config, "layer_types", None):
        config.layer_types = types
    config.vocab_size = vocab_size
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    config.use_cache = False
    for name, value in (changes or {}).items():
        setattr(config, name, value)
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation = "eager"  # the others do not run on CPU
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return type(model)(config).eval()
