"""Explains an out-of-memory error: what was measured, what `finetune plan` predicts, and the cheapest changes."""

from __future__ import annotations

import gc
import math
import os
import resource
import shlex
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from finetune.errors import FinetuneError, RunError
from finetune.host.hardware import memory_granted, own_group
from finetune.plan.advice import cheaper, limits_of, ways_out
from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, PIPELINE
from finetune.plan.machine import LEAST_HOST_GIB, Machine, find_machine, with_host_memory
from finetune.plan.plan import Plan, plan
from finetune.plan.run_model import run_of_record
from finetune.plan.search import LAYOUTS, Candidate, search
from finetune.run.files import RUN_RECORD
from finetune.run.launch import Launch, own_rank, read_launch
from finetune.run.run import Run
from finetune.training.kept_memory import heap_bytes, stop_keeping_freed_memory
from finetune.training.runtime import choose_precision
from finetune.training.speed import peak_rss_bytes

GIB = 2**30
NO_LIMIT = 2**62
# Measured on two cores with torch 2.13 and DeepSpeed 0.19.8:
LOST_BETWEEN_BLOCKS = 0.3  # causal_lm with batches of 256 to 1,024 held 1.04 to 1.37 times its planned peak
SPACE_OF_DEEPSPEED = int(0.6 * GIB)  # address space that a run has more under DeepSpeed
MALLOC_OF_LIBRARIES = int(0.2 * GIB)  # of Python and libraries, apart from their code
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
    physical, _, group = _host_limits()
    host = min(physical, group)
    if not torch.cuda.is_available():
        return _with_precision(with_host_memory(find_machine("cpu"), host))
    machine, (total, _, others) = find_machine(torch.cuda.get_device_name()), _device_bytes()
    left = total - max(0, others - machine.context_bytes)
    return replace(with_host_memory(machine, host), memory_bytes=left)


def _with_precision(cpu: Machine) -> Machine:
    """With bf16 where runs choose it, at the speed of fp32, which does not matter here."""
    if choose_precision(has_cuda=False) != "bf16":
        return cpu
    peaks, shares = cpu.peak_flops, cpu.gemm_efficiency
    return replace(cpu, peak_flops={**peaks, "bf16": peaks["fp32"]}, gemm_efficiency={**shares, "bf16": shares["fp32"]})


def _for_tensors(found: Plan) -> Plan:
    """The plan of a run on CPUs that has begun, with only the memory that is there for tensors: libraries, threads and
    the gaps between malloc's blocks take the rest. May be asked in the middle of a step."""
    stop_keeping_freed_memory()
    if (heap := heap_bytes()) is None:
        return found
    machine, (_, space, _), (used, free) = found.machine, _host_limits(), heap
    now = psutil.Process().memory_info()
    beside, reserved = (max(0, size) + MALLOC_OF_LIBRARIES for size in (now.rss - used, now.vms - used - free))
    reserved += 0 if found.job.engine in (DEEPSPEED, PIPELINE) else SPACE_OF_DEEPSPEED
    host = max(1, machine.host_memory_bytes - found.job.ranks_per_node * beside)
    least = max(2, min(host, space - reserved))  # of which a profile has at least a byte for tensors
    return replace(
        found, machine=replace(machine, memory_bytes=least, host_memory_bytes=host, fragmentation=LOST_BETWEEN_BLOCKS)
    )


def advice(folder: Path, launch: Launch | None = None) -> str:
    """The plan for a run's recipe.yaml: the peak of the fullest rank, the room that is here, and what would fit; or, if
    the run should have fitted, the three cheapest changes that lower its peak. Without `launch` it is read from the
    environment, which `start` may have changed for the libraries."""
    try:
        run, machine = run_of_record(folder, launch or read_launch()), _machine_here()
        job, _, _ = job_of(run, machine)
        found = plan(job, machine)
        if machine.device == "cpu":
            found = _for_tensors(found)
        fitting = list[Candidate]()
        if not found.fits:  # a pipeline's script takes no other layout
            limits = limits_of(run, job, [name for name in LAYOUTS if name != PIPELINE]).usual
            layouts = None if job.engine == PIPELINE else search(job, found.machine, limits)
            fitting = ways_out(found, layouts, run, limits)
    except (FinetuneError, OSError, MemoryError) as error:
        why = str(error) or "no memory is left for it."
        return f"No plan could be made: {why} Smaller micro-batches or --deepspeed zero3 take less."
    changes = "".join(
        f"\n  {one.layout}: {one.plan.peak_bytes / GIB:.2f} GiB, "
        f"{found.seconds.samples_per_second / one.samples_per_second:.2f} times the time per sample"
        for one in fitting or cheaper(found)
    )
    room = found.limit_bytes / GIB
    text = f"Planned: {found.peak_bytes / GIB:.2f} GiB of tensors on the fullest rank; there is room for {room:.2f}. "
    where = f"`{_plan_command(folder, run, found, fitting)}` shows what uses it."
    if fitting:
        said = "This would fit"
    else:
        said = "The cheapest changes" if found.fits else "Nothing that was tried fits, but this takes less"
    return text + (f"{said}:{changes}\n" if changes else "No known change lowers it. ") + where


def _plan_command(folder: Path, run: Run, found: Plan, fitting: Sequence[Candidate]) -> str:
    """The command that makes the plan of this run again, with enough host memory for what is `fitting`."""
    job, machine = found.job, found.machine
    words = ["finetune", "plan", str(folder / RUN_RECORD), "--gpus_per_node", str(job.ranks_per_node)]
    words += ["--nodes", str(nodes)] if (nodes := job.world_size // job.ranks_per_node) > 1 else []
    host = found.host_limit_bytes
    if machine.device != "cpu":
        words += ["--gpu", machine.name]
    else:  # the ranks' room, also where it is less than the host has, and what the profile takes off
        room = max([job.ranks_per_node * found.limit_bytes, *(one.plan.host_bytes for one in fitting)])
        host = min(host, int(room / (1 - find_machine("cpu").fragmentation)))
    words += ["--host_memory", f"{max(LEAST_HOST_GIB, math.ceil(100 * host / GIB) / 100):.2f}"]
    if not {"bf16", "fp16"} & run.given.keys() and job.precision != "fp32":
        words += [f"--{job.precision}", "True"]
    return shlex.join(words)


def oom_kills() -> int:
    """How many processes of this cgroup the kernel's OOM killer has killed so far (cgroup v2, memory.events)."""
    with suppress(OSError):
        lines = (own_group() / "memory.events").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
