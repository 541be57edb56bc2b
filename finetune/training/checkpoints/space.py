"""Is there room for a checkpoint? Checked before each save, and once before the first step."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import psutil

from finetune.errors import RunError
from finetune.host.hardware import memory_granted
from finetune.models.composite import elements
from finetune.training.checkpoints.writing import by_first

FP32_BYTES = 4
# Bytes of optimizer state per trained element, in fp32 unless quantized. Other optimizers keep two moments, like Adam.
STATES_BYTES = {"sgd": 0, "rmsprop": 4, "adagrad": 4, "adafactor": 0, "lion": 4, "8bit": 2, "4bit": 1}
MOMENTS_BYTES = 8
OTHER_BYTES = 2**18  # config, tokenizer, random states
MARGIN = 1.02  # headers, and partly filled blocks

_said: set[Path] = set()  # folders whose note has been printed


def trainer_bytes(trainer: Any, zero_stage: int | None) -> int:
    """The approximate size of this Trainer's checkpoint, all ranks together.

    The weights are in `model*.safetensors`. DeepSpeed and FSDP write them a second time in their own format, and
    DeepSpeed's optimizer shards hold an fp32 copy of the trained weights (deepspeed 0.19.8, runtime/engine.py,
    save_checkpoint; zero/stage3.py and stage_1_and_2.py, state_dict). Under ZeRO-3 no second copy is written.
    """
    weights = _weights_bytes(trainer)
    if trainer.args.save_only_model:
        return int(MARGIN * weights) + OTHER_BYTES
    trained = elements(p for p in trainer.model.parameters() if p.requires_grad)
    states = trained * states_bytes(str(trainer.args.optim), "momentum" in str(trainer.args.optim_args or ""))
    if zero_stage is not None:
        states += trained * FP32_BYTES
        weights += 0 if zero_stage == 3 else weights
    elif trainer.is_fsdp_enabled:
        weights += weights
    return int(MARGIN * (weights + states)) + OTHER_BYTES


def _weights_bytes(trainer: Any) -> int:
    saves_all = not hasattr(trainer.model, "peft_config")  # adapters are saved alone
    saved = [p for p in trainer.model.parameters() if saves_all or p.requires_grad]
    return sum(elements([p]) * p.element_size() for p in saved)


def copied_bytes(trainer: Any, size: int, zero_stage: int | None) -> int:
    """Of a checkpoint of `size` bytes, about how many the ranks of the busiest host copy: rank 0 the weights, once even
    if two files need them, and from ZeRO-1 each rank its part of the optimizer states. Without ZeRO rank 0 copies all,
    but FSDP writes its own files at once."""
    weights = min(size, _weights_bytes(trainer))
    if trainer.is_fsdp_enabled:
        return weights
    if zero_stage is None or trainer.args.save_only_model:
        return size
    ranks = int(trainer.args.world_size)
    hosts = max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))) if zero_stage else 1
    states = max(0, size - (weights if zero_stage == 3 else 2 * weights))
    return weights + states // hosts


def free_memory() -> int:
    """Bytes still available on this host, in this process's control groups and in its address space (ulimit -v),
    whichever is least."""
    found = [int(psutil.virtual_memory().available), *(granted.free for granted in memory_granted())]
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        found.append(max(0, most - int(psutil.Process().memory_info().vms)))
    return min(found)


def stage_bytes(counts: list[int], optim: str, has_momentum: bool, weights_only: bool) -> int:
    """Bytes that one rank writes of a pipeline's checkpoint, all in fp32; `counts` are the elements of each tensor."""
    states = 0 if weights_only else states_bytes(optim, has_momentum)
    return int(MARGIN * sum(counts) * (FP32_BYTES + states))


def states_bytes(optim: str, has_momentum: bool = False) -> int:
    """Bytes of optimizer state per trained element, from --optim, and for SGD from --optim_args."""
    kind = optim.rpartition(".")[2].lower()
    for width in ("8bit", "4bit"):
        if width in kind:
            return STATES_BYTES[width]
    if kind == "sgd" and has_momentum:
        return FP32_BYTES
    return next((count for name, count in STATES_BYTES.items() if kind.startswith(name)), MOMENTS_BYTES)


def check_space(run_folder: Path, needed: int, when: str) -> None:
    """Raises RunError on all ranks if there is too little room. All ranks must call it; rank 0 checks."""
    by_first(lambda: refuse_full_disk(run_folder, needed, when))


def refuse_full_disk(run_folder: Path, needed: int, when: str) -> None:
    there = next(place for place in (run_folder, *run_folder.absolute().parents) if place.exists())
    disk = shutil.disk_usage(there)
    if disk.total == 0:  # some network and user-space file systems do not say
        if run_folder not in _said:
            print(f"note: the disk of {run_folder} does not report its free space, so it is not checked.", flush=True)
            _said.add(run_folder)
        return
    if (free := disk.free) >= needed:
        return
    raise RunError(
        f"{when}: a checkpoint needs about {needed / 2**20:,.0f} MiB, but the disk of {run_folder} has "
        f"{free / 2**20:,.0f} MiB free. Nothing was written, and earlier checkpoints are whole. Make room, keep "
        "fewer with --save_total_limit, save without the optimizer with --save_only_model True, or give another "
        "--output_dir; then --resume allow."
    )
