"""A second, frozen model next to the one being trained: a preference reference or a teacher."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from finetune.training.start import Session


def placed(session: Session, second: Any) -> Any:
    """Put it where it can run: under ZeRO-3 sharded by its own engine, otherwise whole on the device. With DeepSpeed,
    in the precision to which the engine casts the trained model."""
    training = session.training
    # The Trainer does this for its own model; otherwise all layers' keys and values stay until the forward pass ends.
    second.config.use_cache = False
    half = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
    if is_deepspeed_zero3_enabled() and any(hasattr(weight, "ds_id") for weight in second.parameters()):
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config |= {"bf16": {"enabled": training.bf16}, "fp16": {"enabled": training.fp16}}
        engine = deepspeed.initialize(model=second, config=config)[0]
        engine.eval()  # returns None, unlike torch's
        return engine
    second.to(training.device)
    return (second.to(half) if session.ds_config else second).eval()
