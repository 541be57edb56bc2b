"""One of several ranks, for test_touched_rows.py: `torchrun --nproc_per_node 3 touched_rows_ranks.py FOLDER`. Each
writes the gradients of DDP, and those of which only some rows of an embedding are sent, to FOLDER/RANK.result."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.training import touched_rows
from finetune.training.touched_rows import TouchedRows

ROWS, WIDTH = 600, 16
# Megabytes of a bucket: each weight has its own, all share one, or the table shares one with some.
BUCKETS = {"alone": 0.0001, "shared": 25.0, "some": 0.002}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places = nn.Embedding(8, WIDTH)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.others, self.unused = (nn.Embedding(ROWS, WIDTH) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words) + self.places(words % 8)
        if distributed.get_rank() != 1:
            found = found + self.others(words)
        return self.head(found).square().sum()


def wrapped(megabytes: float, touched_alone: bool) -> DistributedDataParallel:
    layout = {"bucket_cap_mb": megabytes, "gradient_as_bucket_view": True, "find_unused_parameters": True}
    model = DistributedDataParallel(Model(), **layout)
    if touched_alone:
        accelerator = SimpleNamespace(ddp_handler=SimpleNamespace(comm_hook=DDPCommunicationHookType.NO))
        trainer = SimpleNamespace(model_wrapped=model, accelerator=accelerator, comm_hook=None)
        hook = TouchedRows(trainer)
        for _ in range(2):  # a Trainer may train twice
            hook.on_train_begin(None, None, None)
    return model


def gradients(model: DistributedDataParallel, rank: int, texts: int, spoils: bool) -> list[torch.Tensor]:
    """After two steps, as DDP lays out its buckets anew after the first, of two micro-batches each."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(torch.randint(ROWS, (texts, 7), generator=generator)).backward()
        loss = model(torch.randint(ROWS, (texts, 7), generator=generator))
        if spoils and rank == 1:
            loss = loss * float("nan")
        loss.backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    touched_rows.WORTH_ELEMENTS = ROWS * WIDTH
    store = distributed.FileStore(str(folder / "store"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    sent, real, found = [0], distributed.all_reduce, {}

    def counted(tensor: torch.Tensor, *more: Any, **others: Any) -> Any:
        sent[0] += tensor.nbytes
        return real(tensor, *more, **others)

    distributed.all_reduce = counted
    for bucket, megabytes in BUCKETS.items():
        for name, texts, spoils in (("few", 2, False), ("many", 200, False), ("spoilt", 2, True)):
            plain = gradients(wrapped(megabytes, False), rank, texts, spoils)
            sent[0] = 0
            found[f"{name}, {bucket}"] = (plain, gradients(wrapped(megabytes, True), rank, texts, spoils), sent[0])
    torch.save(found, folder / f"{rank}.result")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
