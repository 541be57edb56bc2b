"""Running statistics of batch norm that are the same on every rank.

Each rank gathers those of its own pictures. torch's DDP then overwrites them by rank 0's before each forward pass, and
DeepSpeed does nothing (0.19.8, runtime/engine.py, _broadcast_model: parameters alone): every rank would evaluate
another model, of which rank 0's is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback

from finetune.models.batch_norm import batch_norms


class SharedStatistics(TrainerCallback):
    """After each step they become the mean over ranks: what one rank would gather whose batches had the mean and the
    variance that those of all ranks have on average. A micro-batch fades once, with the momentum of one, as each rank
    has seen one; the variance is that inside a rank's, without what their means are apart. Use it with
    `ddp_broadcast_buffers=False`."""

    def __init__(self, model: Any) -> None:
        self.norms = [norm for norm in batch_norms(model) if norm.running_mean is not None]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.norms or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        # Asked for anew: to move or cast a module replaces its buffers (torch 2.13, nn/modules/module.py, _apply).
        buffers: list[Any] = [buffer for norm in self.norms for buffer in (norm.running_mean, norm.running_var)]
        flat = torch.cat([buffer.float() for buffer in buffers])
        distributed.all_reduce(flat)
        means = (flat / distributed.get_world_size()).split([buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean)
