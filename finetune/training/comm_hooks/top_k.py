"""The largest elements of each gradient, and error feedback: what is not sent is added to the next gradient.

After arXiv 1712.01887 (Deep Gradient Compression, algorithm 1), without its momentum correction: AdamW is left as is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from finetune.training.comm_hooks.wire import Wire

INDEX_BYTES = VALUE_BYTES = 4  # int32 and float32


class TopK:
    """Of every parameter `ratio` of the elements, one at least. Chosen by parameter, not by bucket: DDP makes other
    buckets in its first step than later, and a resumed run must choose as the uncut one did."""

    def __init__(self, wire: Wire, names: dict[int, str], ratio: float) -> None:
        self.wire, self.names, self.ratio = wire, names, ratio
        self.errors: dict[str, torch.Tensor] = {}

    def exchange(self, bucket: distributed.GradBucket) -> Any:
        """A future of the bucket's buffer, with the mean over ranks of what each has chosen."""
        buffer = bucket.buffer()
        indices, values, start = [], [], 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            chosen, sent = self._choose(self.names[id(parameter)], gradient)
            indices.append(chosen + start)
            values.append(sent)
            start += gradient.numel()  # gradients lie in the buffer one after the other
        message = torch.cat([torch.cat(indices).int().view(torch.uint8), torch.cat(values).view(torch.uint8)])
        every, future = self.wire.gather(message)

        def add_up(_: Any) -> torch.Tensor:
            buffer.zero_()
            for one in every:
                where, what = one.view(2, -1)
                buffer.index_add_(0, where.view(torch.int32), what.view(torch.float32).to(buffer.dtype))
            return buffer.div_(self.wire.world_size)

        return future.then(add_up)

    def _choose(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and values (k) of the largest of gradient plus error; the rest is the new error."""
        whole = gradient.reshape(-1).float()
        if name in self.errors:
            whole = whole + self.errors[name]
        count = max(1, round(self.ratio * whole.numel()))
        chosen = whole.abs().topk(count, sorted=False).indices
        sent = whole[chosen]
        self.errors[name] = whole.index_fill(0, chosen, 0.0)
        return chosen, sent

    def state(self) -> dict[str, Any]:
        return {"errors": self.errors}

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        self.errors = {name: error.to(device) for name, error in state["errors"].items()}
