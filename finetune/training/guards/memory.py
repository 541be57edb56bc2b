"""Explains an out-of-memory error: what was measured, what `finetune plan` predicts, and the cheapest changes."""

from __future__ import annotations

import gc
import os
import resource
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from finetune.errors import FinetuneError, RunError
from finetune.host.hardware import memory_granted, own_group
from finetune.plan.advice import cheaper
from finetune.plan.from_run import job_of
from finetune.plan.machine import find_machine
from finetune.plan.plan import plan
from finetune.plan.run_model import run_of_record
from finetune.run.files import RUN_RECORD
from finetune.run.launch import Launch, own_rank, read_launch
from finetune.training.speed import peak_rss_bytes

GIB = 2**30
# From torch/c10/core/impl/alloc_cpu.cpp and the caching allocators of 2.13; DeepSpeed and numpy pass them on.
WORDS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU torch has its own error class; on a CPU it raises a RuntimeError, recognizable only by its message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in WORDS)


def out_of_memory(error: BaseException, folder: Path, launch: Launch | None = None) -> RunError:
    """The error to raise. The plan is made from recipe.yaml in the run's `folder`, for this run's `launch`."""
    said = (str(error).strip().splitlines() or ["no memory"])[0].removesuffix(".")
    traceback.clear_frames(error.__traceback__)  # frees the tensors in its frames: planning needs the memory
    gc.collect()
    return RunError(f"out of memory on rank {own_rank()}: {said[:200]}. {_measured()} {advice(folder, launch)}")


def _measured() -> str:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        own, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
        others = total - free - own
        return (
            f"Measured: tensors took at most {peak / GIB:.2f} GiB; this process holds {own / GIB:.2f} of the device's "
            f"{total / GIB:.2f} GiB, others {others / GIB:.2f}."
        )
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    bound = f"; its address space is limited to {limit / GIB:.2f} GiB (ulimit -v)" if limit > 0 else ""
    if groups := memory_granted():
        bound += f"; its cgroup to {min(group.bytes for group in groups) / GIB:.2f} GiB"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    own = f"this process took at most {peak_rss_bytes() / GIB:.2f} GiB (everything included)"
    return f"Measured: {own}, of the machine's {memory:.2f} GiB{bound}."


def advice(folder: Path, launch: Launch | None = None) -> str:
    """The plan for a run's recipe.yaml: the peak of the fullest rank, and the three cheapest changes that lower it.
    Without `launch` it is read from the environment, which `start` may have changed for the libraries."""
    where = f"`finetune plan {folder / RUN_RECORD}` shows what uses it."
    try:
        machine = find_machine(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
        job, _, _ = job_of(run_of_record(folder, launch or read_launch()), machine)
        found = plan(job, machine)
    except (FinetuneError, OSError) as error:
        return f"No plan could be made: {error} Smaller micro-batches or --deepspeed zero3 take less."
    changes = "; ".join(
        f"{one.layout} ({one.plan.peak_bytes / GIB:.2f} GiB, {one.plan.seconds.total / found.seconds.total:.2f} times "
        "the time)"
        for one in cheaper(found)
    )
    text = f"Planned: {found.peak_bytes / GIB:.2f} GiB of tensors on the fullest rank. "
    return text + (f"The cheapest changes: {changes}. " if changes else "No known change lowers it. ") + where


def oom_kills() -> int:
    """How many processes of this cgroup the kernel's OOM killer has killed so far (cgroup v2, memory.events)."""
    with suppress(OSError):
        lines = (own_group() / "memory.events").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
