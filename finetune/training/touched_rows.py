"""DDP on CPUs sends only the rows of an embedding's gradient that some rank's texts have touched; all others are 0."""
# No `from __future__ import annotations`: DDP compares hooks' annotations with classes (torch 2.13, _check_comm_hook).

from collections import Counter
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

WORTH_ELEMENTS = 2**20  # of a table
MOST_ROWS = 0.5  # share of a table's rows; with more, it is sent whole


class TouchedRows(TrainerCallback):
    """DDP's communication hook, unless the run has another one, the model no such embedding, or `--torch_compile` wraps
    it once more."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.attached: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """By now the model is wrapped."""
        model, handler = self.trainer.model_wrapped, self.trainer.accelerator.ddp_handler
        is_taken = self.trainer.comm_hook or handler.comm_hook != DDPCommunicationHookType.NO
        if isinstance(model, DistributedDataParallel) and model is not self.attached and not is_taken:
            if tables := tables_of(model):
                model.register_comm_hook({id(table) for table in tables}, exchange)
            self.attached = model


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    """Weights on the CPU that are trained, and used by one embedding alone; a tied head gives every row a gradient."""
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    found = (module.weight for module in model.modules() if type(module) is nn.Embedding and not module.sparse)
    return [
        weight
        for weight in found
        if weight.requires_grad
        and weight.device.type == "cpu"
        and weight.numel() >= WORTH_ELEMENTS
        and users[id(weight)] == 1
    ]


def exchange(tables: set[int], bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: a future of the bucket's mean gradients. `tables` has the ids of the embeddings' weights. It waits for
    the other ranks within the backward pass, which must hold no other collectives."""
    apart = [
        gradient
        for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        if id(weight) in tables
    ]
    if not apart:
        return allreduce_hook(distributed.group.WORLD, bucket)
    buffer, ranks = bucket.buffer(), distributed.get_world_size()
    ends = [table.storage_offset() - buffer.storage_offset() for table in apart]
    begins = [0, *(end + table.numel() for end, table in zip(ends, apart, strict=True))]
    between = [buffer[begin:end] for begin, end in zip(begins, [*ends, buffer.numel()], strict=True) if begin < end]
    works = [distributed.all_reduce(part.div_(ranks), async_op=True) for part in between]
    for table in apart:
        _mean_of_rows(table, ranks)
    for work in works:
        work.wait()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _mean_of_rows(table: torch.Tensor, ranks: int) -> None:
    """Replace a gradient (rows, width) by its mean over ranks."""
    touched = table.view(torch.uint8).any(dim=1).view(torch.uint8)  # 2 ms for 47 MB; of floats 14
    distributed.all_reduce(touched, distributed.ReduceOp.MAX)
    rows = touched.nonzero().view(-1)
    if len(rows) > MOST_ROWS * len(table):
        distributed.all_reduce(table.div_(ranks))
        return
    sent = table.index_select(0, rows).div_(ranks)
    distributed.all_reduce(sent)
    table.index_copy_(0, rows, sent)
