"""All that the hooks send goes through here, and is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

FP32_BYTES = 4


class Wire:
    """The collectives of the hooks, over all ranks.

    Counted are the bytes that one rank sends, as a ring does it: an all-reduce of B bytes sends 2 (N-1)/N B, an
    all-gather N-1 times what the rank gives, an all-to-all (N-1)/N of it. What TCP adds, and the few bytes with which
    DDP agrees on its buckets and on unused parameters, is not counted.
    """

    def __init__(self) -> None:
        self.world_size: int = distributed.get_world_size()
        self.rank = distributed.get_rank()
        self.sent_bytes = 0.0
        self.whole_bytes = 0.0  # what an all-reduce of the same gradients in fp32 would have sent

    def all_reduce_bytes(self, of: float) -> float:
        return 2 * (self.world_size - 1) / self.world_size * of

    def count(self, elements: int) -> None:
        """So many elements of gradients are exchanged, in whatever form."""
        self.whole_bytes += self.all_reduce_bytes(elements * FP32_BYTES)

    def count_all_reduce(self, of: float) -> None:
        """An all-reduce of so many bytes that a hook of torch makes by itself."""
        self.sent_bytes += self.all_reduce_bytes(of)

    def mean(self, tensor: torch.Tensor) -> Any:
        """A future of the mean over ranks, in place."""
        self.count_all_reduce(tensor.nbytes)
        work = distributed.all_reduce(tensor.div_(self.world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A tensor (world_size, n) that holds every rank's (n) once the future is done."""
        self.sent_bytes += (self.world_size - 1) * tensor.nbytes
        every = tensor.new_empty((self.world_size, tensor.numel()))
        # Not all_gather_into_tensor, which torch 2.13 warns of, nor its new name, which torch 2.6 lacks.
        return every, distributed.all_gather(list(every), tensor, async_op=True).get_future()

    def swap(self, chunks: torch.Tensor) -> torch.Tensor:
        """Of (world_size, n), chunk r goes to rank r; what comes is what all have for this rank, (world_size, n)."""
        self.sent_bytes += (self.world_size - 1) / self.world_size * chunks.nbytes
        received = torch.empty_like(chunks)
        distributed.all_to_all_single(received, chunks)
        return received


def done(tensor: torch.Tensor) -> Any:
    """A future that has come already."""
    future: Any = torch.futures.Future()
    future.set_result(tensor)
    return future
