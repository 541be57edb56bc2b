"""A second, frozen model beside the one that is trained: a reference of preferences, a teacher."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from finetune.training.start import Session


def placed(session: Session, second: Any) -> Any:
    """Where it can be asked: under ZeRO-3 sharded by an engine of its own, else whole on the device. In the precision
    of DeepSpeed's engine, which casts the model that is trained."""
    training = session.training
    # As the Trainer has it of its own model: else each layer's keys and values stay until the forward pass ends.
    second.config.use_cache = False
    half = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
    if is_deepspeed_zero3_enabled() and any(hasattr(weight, "ds_id") for weight in second.parameters()):
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config |= {"bf16": {"enabled": training.bf16}, "fp16": {"enabled": training.fp16}}
        engine = deepspeed.initialize(model=second, config=config)[0]
        engine.eval()  # gives nothing, unlike torch's
        return engine
    second.to(training.device)
    return (second.to(half) if session.ds_config else second).eval()
