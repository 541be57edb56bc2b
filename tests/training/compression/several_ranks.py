"""A small model trained on several ranks over gloo, by every hook, without the Trainer, for test_compression.py:
`torchrun --nproc_per_node 3 several_ranks.py FOLDER`. Each rank writes what `_train` tells to FOLDER/RANK.result."""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from finetune.run.flags.compression import HOOKS, CompressionArguments
from finetune.training.compression import Compression, OneBitAdam

STEPS, START, SAVED = 14, 4, 9  # all steps; whole gradients before; where the resumed run begins
WIDTH, ROWS = 96, 16


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = distributed.FileStore(str(folder / "store"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    torch.save({hook: _train(hook, folder / hook) for hook in HOOKS}, folder / f"{rank}.result")
    distributed.barrier()
    distributed.destroy_process_group()


def _train(hook: str, checkpoint: Path) -> dict[str, Any]:
    """Weights after START, SAVED and STEPS steps, and after STEPS of runs that began at SAVED: resumed, and with all
    that no rank had sent lost; and the figures."""
    model, wrapped, optimizer = _fresh(hook)
    compression = _compression(hook, wrapped, optimizer)
    found: dict[str, Any] = {"start": None, "windows": []}
    for step in range(STEPS):
        if step == START:
            found["start"] = _weights(model)
        if step == SAVED:
            found["saved"] = _weights(model)
            before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            distributed.broadcast_object_list(before)  # files of a checkpoint that rank 0 writes for all
            if compression:
                compression.save(checkpoint)
                distributed.barrier()
        _step_and_count(wrapped, optimizer, step, compression, found["windows"])
    found |= {"end": _weights(model), "summary": compression.figures("", "compressed_") if compression else {}}
    found["freeze"] = _freeze(optimizer)
    for name, where in (("resumed", checkpoint), ("lost", checkpoint / "none")):
        model, wrapped, optimizer = _fresh(hook)
        model.load_state_dict(before[0])
        optimizer.load_state_dict(copy.deepcopy(before[1]))
        compression = _compression(hook, wrapped, optimizer)
        found[f"said_of_{name}"] = compression.restore(where, SAVED) if compression else None
        found |= {f"{name}_windows": [], f"freeze_of_{name}": _freeze(optimizer)}
        for step in range(SAVED, STEPS):
            _step_and_count(wrapped, optimizer, step, compression, found[f"{name}_windows"])
        found[name] = _weights(model)
    model, wrapped, optimizer = _fresh(hook)
    compression = _compression(hook, wrapped, optimizer)
    found["said_of_none"] = compression.restore(checkpoint / "none", START) if compression else None
    for step in range(START, STEPS):
        _step(wrapped, optimizer, step)
    found["without_errors"] = _weights(model)
    return found


def _fresh(hook: str) -> tuple[torch.nn.Module, DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Embedding(50, WIDTH), *layers, torch.nn.Linear(WIDTH, 7))
    optimizer_class = OneBitAdam if hook == "onebit_adam" else torch.optim.AdamW
    optimizer = optimizer_class(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    # Buckets of a layer each, laid out anew after the first step where unused parameters are not looked for.
    layout = {"bucket_cap_mb": 0.03, "find_unused_parameters": hook == "powersgd", "gradient_as_bucket_view": True}
    return model, DistributedDataParallel(model, **layout), optimizer


def _compression(hook: str, wrapped: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Compression | None:
    arguments = CompressionArguments(ddp_comm_hook=hook, powersgd_rank=2)
    if arguments.keeps_errors:
        arguments.comm_hook_start_steps = START
    if not arguments.is_on:
        return None
    compression = Compression(arguments)
    compression.attach(wrapped, optimizer, STEPS)
    return compression


def _step_and_count(
    wrapped: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    step: int,
    compression: Compression | None,
    windows: list[dict[str, float]],
) -> None:
    """A step, and what it has sent."""
    _step(wrapped, optimizer, step)
    if compression:
        compression.on_step_end()
        windows.append(compression.figures("window"))


def _freeze(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """The step of the freeze, and how much longer a rank's gradients are; of others nothing."""
    return (optimizer.freeze_step, float(optimizer.longer)) if isinstance(optimizer, OneBitAdam) else (0, 0)


def _step(wrapped: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two micro-batches, of which the second sends; the same samples for a step, whenever it is taken."""
    generator = torch.Generator().manual_seed(1000 * step + distributed.get_rank())
    # The last words come late: they have no variance at the freeze.
    words = torch.randint(50 if step > START else 40, (2, ROWS), generator=generator)
    with wrapped.no_sync():
        _loss(wrapped, words[0]).backward()
    _loss(wrapped, words[1]).backward()
    torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _loss(wrapped: DistributedDataParallel, words: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(wrapped(words), words % 7)


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


if __name__ == "__main__":
    main()
