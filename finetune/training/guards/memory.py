"""Explains an out-of-memory error: what was measured, what `finetune plan` predicts, and the cheapest changes."""

from __future__ import annotations

import gc
import os
import resource
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from finetune.errors import FinetuneError, RunError
from finetune.host.hardware import memory_granted, own_group
from finetune.plan.advice import cheaper, limits_of, ways_out
from finetune.plan.from_run import job_of
from finetune.plan.job import PIPELINE
from finetune.plan.machine import Machine, find_machine, with_host_memory
from finetune.plan.plan import plan
from finetune.plan.run_model import run_of_record
from finetune.plan.search import LAYOUTS, Candidate, search
from finetune.run.files import RUN_RECORD
from finetune.run.launch import Launch, own_rank, read_launch
from finetune.training.speed import peak_rss_bytes

GIB = 2**30
NO_LIMIT = 2**62
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
        total, held, others = _device_bytes()
        peak = torch.cuda.max_memory_allocated()
        return (
            f"Measured: tensors took at most {peak / GIB:.2f} GiB; this process holds {held / GIB:.2f} of the device's "
            f"{total / GIB:.2f} GiB, others {others / GIB:.2f}."
        )
    memory, space, group = _host_limits()
    bound = f"; its address space is limited to {space / GIB:.2f} GiB (ulimit -v)" if space < NO_LIMIT else ""
    bound += f"; its cgroup to {group / GIB:.2f} GiB" if group < NO_LIMIT else ""
    own = f"this process took at most {peak_rss_bytes() / GIB:.2f} GiB (everything included)"
    return f"Measured: {own}, of the machine's {memory / GIB:.2f} GiB{bound}."


def _device_bytes() -> tuple[int, int, int]:
    """All of the GPU, what this process's allocator holds of it, and what others hold, with this process's context."""
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    return total, own, total - free - own


def _host_limits() -> tuple[int, int, int]:
    """Bytes of the machine, of this process's address space, and of its cgroup."""
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    group = min((group.bytes for group in memory_granted()), default=NO_LIMIT)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), space if space > 0 else NO_LIMIT, group


def _machine_here() -> Machine:
    """The profile of this device, with the memory that this process can have. Raises RequestError."""
    physical, space, group = _host_limits()
    host = min(physical, group)
    if not torch.cuda.is_available():
        machine = with_host_memory(find_machine("cpu"), host)
        return replace(machine, memory_bytes=min(host, space))
    machine, (total, _, others) = find_machine(torch.cuda.get_device_name()), _device_bytes()
    left = total - max(0, others - machine.context_bytes)
    return replace(with_host_memory(machine, host), memory_bytes=left)


def advice(folder: Path, launch: Launch | None = None) -> str:
    """The plan for a run's recipe.yaml: the peak of the fullest rank, and what would fit here; or, if the run should
    have fitted, the three cheapest changes that lower its peak. Without `launch` it is read from the environment, which
    `start` may have changed for the libraries."""
    where = f"`finetune plan {folder / RUN_RECORD}` shows what uses it."
    try:
        run, machine = run_of_record(folder, launch or read_launch()), _machine_here()
        job, _, _ = job_of(run, machine)
        found = plan(job, machine)
        limits = limits_of(run, job, [name for name in LAYOUTS if name != PIPELINE]).usual
        fitting = list[Candidate]()
        if not found.fits:  # a pipeline's script takes no other layout
            layouts = None if job.engine == PIPELINE else search(job, machine, limits)
            fitting = ways_out(found, layouts, run, limits)
    except (FinetuneError, OSError, MemoryError) as error:
        why = str(error) or "no memory is left for it."
        return f"No plan could be made: {why} Smaller micro-batches or --deepspeed zero3 take less."
    changes = "; ".join(
        f"{one.layout} ({one.plan.peak_bytes / GIB:.2f} GiB, "
        f"{found.seconds.samples_per_second / one.samples_per_second:.2f} times the time per sample)"
        for one in fitting or cheaper(found)
    )
    text = f"Planned: {found.peak_bytes / GIB:.2f} GiB of tensors on the fullest rank. "
    if fitting:
        said = "This would fit"
    else:
        said = "The cheapest changes" if found.fits else "Nothing that was tried fits, but this takes less"
    return text + (f"{said}: {changes}. " if changes else "No known change lowers it. ") + where


def oom_kills() -> int:
    """How many processes of this cgroup the kernel's OOM killer has killed so far (cgroup v2, memory.events)."""
    with suppress(OSError):
        lines = (own_group() / "memory.events").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
