"""Settle the machine before anything is built: threads, precision, process group, DeepSpeed, Accelerate's state."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from finetune.errors import RunError, first_line
from finetune.run.launch import Launch, join_as_single_process

# The widths at which bf16 beats fp32 on a CPU. Without either it is about four times slower (docs/results/seq_cls.md);
# torch.backends.cpu.get_cpu_capability() says AVX512 for both kinds, so the flags are read instead.
BF16_CPU_FLAGS = {"amx_bf16", "avx512_bf16"}


def choose_precision(has_cuda: bool, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """ "bf16", "fp16" or "fp32": the fastest that trains well on this machine."""
    if has_cuda:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    try:
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return "fp32"
    return "bf16" if BF16_CPU_FLAGS & set(flags.split()) else "fp32"


def set_threads(launch: Launch, has_cuda: bool) -> int:
    """Share the cores among this node's ranks, and return the threads of this one.

    deepspeed and python give each rank a thread a core, so that ranks fight; torchrun gives one thread unless told. A
    number that the user set (OMP_NUM_THREADS other than torchrun's 1) is kept.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0 and not (given == "1" and launch.world_size > 1):
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // launch.local_world_size)
    if not has_cuda:
        torch.set_num_threads(threads)
    return threads


@contextmanager
def explained_meeting(launch: Launch) -> Iterator[None]:
    """Inside, where the ranks meet: a network that is not as it should be is named, as `finetune doctor` names it."""
    try:
        yield
    except RuntimeError as error:  # also torch.distributed's own errors, which derive from it
        from finetune.host.network import why_ranks_do_not_meet

        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        found = (
            why_ranks_do_not_meet(address, int(port), str(error)) if launch.world_size > 1 and port.isdigit() else []
        )
        if not found:
            raise  # not the network's fault, or none that can be seen from here
        raise RunError(
            f"the ranks do not meet at {address}:{port}: {first_line(error)}. {' '.join(found)} "
            f"`finetune doctor --master_addr {address} --master_port {port}` on every host looks again."
        ) from error


def prepare_deepspeed(launch: Launch, has_cuda: bool, timeout_seconds: float) -> None:
    """Build Accelerate's process state for DeepSpeed. Call it before `TrainingArguments`, which must be told to use it:
    `accelerator_config={"use_configured_state": True}`. Without DeepSpeed the Trainer does it right by itself, and a
    state built by hand would leave the model unwrapped: each rank would train alone, and nobody would say so.

    Without a GPU Accelerate finds no backend by itself and takes every rank for the only one, so that the Trainer
    resolves "auto" batch sizes to wrong products (accelerate 1.15, state.py, PartialState.__init__: it wants
    `cpu=True`, which in turn rules out DeepSpeed). Naming the backend mends both.
    """
    from accelerate import PartialState

    # ninja lies beside this Python when the environment is not activated, and DeepSpeed's builds look for it by PATH.
    here = os.path.dirname(sys.executable)
    if here not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{here}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # The ranks of this node, which torchrun does not tell in the way that DeepSpeed's CPU accelerator reads it
    # (deepspeed/accelerator/cpu_accelerator.py, device_count): it would take qgZ's path between nodes.
    os.environ.setdefault("LOCAL_SIZE", str(launch.local_world_size))
    if launch.launcher == "python":
        join_as_single_process()
    PartialState(timeout=timedelta(seconds=timeout_seconds), **({} if has_cuda else {"backend": "gloo"}))
    if not has_cuda:
        _unlink_shared_buffer(launch)


def _unlink_shared_buffer(launch: Launch) -> None:
    """On a CPU each rank has made a buffer of 66 MiB in shared memory, and nobody ever deletes it: memory is lost with
    each run, and a later run of the same port may open what an earlier one left (deepspeed 0.19.8,
    ops/csrc/cpu/comm/shm.cpp, shm_initialize). Once all ranks have it open, its name is not needed."""
    torch.distributed.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{launch.rank}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def prepare_fsdp(launch: Launch, timeout_seconds: float) -> None:
    """Build Accelerate's process state for FSDP2 on CPU ranks; the Trainer must be told to use it, as above.

    Accelerate takes CPU ranks for MULTI_CPU, and for these it leaves the FSDP plugin out without a word: the run is
    then plain DDP (accelerate 1.15, state.py, AcceleratorState.__init__, the list of types that may become FSDP). A
    state of one of those types, on the CPU and over gloo, shards for real. Let this go once MULTI_CPU is in that list.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    if launch.world_size > 1:
        state.distributed_type = DistributedType.MULTI_GPU


def quiet_libraries(launch: Launch) -> None:
    """One rank speaks: progress bars and library chatter are for rank 0, and for a terminal."""
    import datasets
    import transformers

    if not launch.speaks or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    level = logging.WARNING if launch.speaks else logging.ERROR
    for name in ("transformers", "datasets", "accelerate", "DeepSpeed", "torch.distributed"):
        logging.getLogger(name).setLevel(level)
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # readers log what they raise, too
    # torch 2.13 renames its collectives, and tells so whoever calls DeepSpeed.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\.")
    # DeepSpeed broadcasts a pipeline's tied weights outside of no_grad; no gradient comes of it (0.19.8,
    # runtime/pipe/module.py, _synchronize_tied_weights).
    warnings.filterwarnings("ignore", category=UserWarning, message=r".*c10d::broadcast_: an autograd kernel")
    # transformers 5.23 tells peft of names that go with version 6; the user can mend nothing.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*deprecated and will be removed in v6")
    if not launch.speaks:
        warnings.simplefilter("ignore")
