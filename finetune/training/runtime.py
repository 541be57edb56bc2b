"""Set up the process before anything is built: threads, precision, process group, DeepSpeed, Accelerate's state; and
which modules FSDP shards as a unit."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.dsconfig.config import Config
from finetune.errors import RequestError, RunError, first_line
from finetune.host.hardware import cores_here, cpuinfo
from finetune.run.importing import left_uncompiled
from finetune.run.launch import Launch, accelerate_uses_fsdp, join_as_single_process

# CPU features with which bf16 is faster than fp32. Without either it is about four times slower
# (docs/results/seq_cls.md). torch.backends.cpu.get_cpu_capability() says AVX512 with or without them.
BF16_CPU_FLAGS = {"amx_bf16", "avx512_bf16"}


def choose_precision(has_cuda: bool, file: Path = Path("/proc/cpuinfo")) -> str:
    """ "bf16", "fp16" or "fp32": the fastest precision that trains well on this machine."""
    if has_cuda:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if BF16_CPU_FLAGS & set(cpuinfo("flags", file).split()) else "fp32"


def precision_words(bf16: bool, fp16: bool) -> str:
    """As the opening line names it."""
    if not bf16:
        return "fp16" if fp16 else "fp32"
    is_slow = not torch.cuda.is_available() and choose_precision(has_cuda=False) != "bf16"
    return "bf16, which this CPU emulates (fp32 is faster)" if is_slow else "bf16"


def set_threads(launch: Launch, has_cuda: bool) -> int:
    """Divide the cores among this node's ranks, and return the number of threads of this rank.

    deepspeed and python give each rank one thread per core, so ranks compete; torchrun gives one thread by default. A
    number that the user set (OMP_NUM_THREADS other than torchrun's 1) is kept.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0 and not (given == "1" and launch.world_size > 1):
        return int(given)
    threads = max(1, cores_here() // launch.local_world_size)
    if not has_cuda:
        torch.set_num_threads(threads)
    return threads


@contextmanager
def explained_meeting(launch: Launch) -> Iterator[None]:
    """Around the rendezvous of ranks: if it fails because of the network, say what is wrong, as `finetune doctor`
    does."""
    try:
        yield
    except RuntimeError as error:  # also torch.distributed's own errors, which derive from it
        from finetune.host.network import why_ranks_do_not_meet

        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        found = (
            why_ranks_do_not_meet(address, int(port), str(error)) if launch.world_size > 1 and port.isdigit() else []
        )
        if not found:
            raise  # not a network problem, or none visible from here
        raise RunError(
            f"the ranks cannot connect at {address}:{port}: {first_line(error)}. {' '.join(found)} To check again, run "
            f"`finetune doctor --master_addr {address} --master_port {port}` on every host."
        ) from error


def prepare_deepspeed(launch: Launch, has_cuda: bool, timeout_seconds: float) -> None:
    """Build Accelerate's process state for DeepSpeed. Call it before `TrainingArguments`, which must be told to use it:
    `accelerator_config={"use_configured_state": True}`. Without DeepSpeed the Trainer does this correctly by itself,
    and a state built by hand would leave the model unwrapped: each rank would silently train alone.

    Without a GPU Accelerate chooses no backend and treats every rank as the only one, so the Trainer resolves "auto"
    batch sizes to wrong products (accelerate 1.15, state.py, PartialState.__init__: it requires `cpu=True`, which in
    turn rules out DeepSpeed). Naming the backend fixes both.
    """
    from accelerate import PartialState

    # DeepSpeed's builds look for ninja on PATH; if the environment is not activated, it is only beside this Python.
    here = os.path.dirname(sys.executable)
    if here not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{here}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # The number of ranks on this node. torchrun does not set the variable that DeepSpeed's CPU accelerator reads
    # (deepspeed/accelerator/cpu_accelerator.py, device_count), and qgZ would communicate as if between nodes.
    os.environ.setdefault("LOCAL_SIZE", str(launch.local_world_size))
    if launch.launcher == "python":
        join_as_single_process()
    PartialState(timeout=timedelta(seconds=timeout_seconds), **({} if has_cuda else {"backend": "gloo"}))
    if not has_cuda:
        _unlink_shared_buffer(launch)


def leave_muon_uncompiled(config: Mapping[str, Any]) -> None:
    """To recognize its Muon optimizer, DeepSpeed imports it whenever it wraps an optimizer in ZeRO, and Muon wraps a
    function in `torch.compile`, for which torch imports all of Inductor: a second or more (deepspeed 0.19.8,
    runtime/zero/utils.py, is_zero_supported_optimizer). Unless the config asks for Muon, import it without."""
    asked = Config(config)
    if not asked.stage or str(asked.get("optimizer.type")).lower() == "muon":
        return
    with left_uncompiled(), suppress(ImportError):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


def _unlink_shared_buffer(launch: Launch) -> None:
    """On a CPU each rank has created a buffer of 66 MiB in shared memory, which DeepSpeed never deletes: each run leaks
    memory, and a later run on the same port may open an old buffer (deepspeed 0.19.8, ops/csrc/cpu/comm/shm.cpp,
    shm_initialize). Once all ranks have it open, its name can go."""
    torch.distributed.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{launch.rank}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def prepare_fsdp(launch: Launch, timeout_seconds: float) -> None:
    """Build Accelerate's process state for FSDP2 on CPU ranks; the Trainer must be told to use it, as above.

    Accelerate classifies CPU ranks as MULTI_CPU, for which it silently ignores the FSDP plugin: the run is then plain
    DDP (accelerate 1.15, state.py, AcceleratorState.__init__, the list of types that may become FSDP). With one of
    those types, on the CPU and over gloo, it does shard. Remove this once MULTI_CPU is in that list.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    if launch.world_size > 1:
        state.distributed_type = DistributedType.MULTI_GPU


def quiet_libraries(launch: Launch) -> None:
    """Only rank 0 shows library messages, and progress bars only on a terminal."""
    import datasets
    import transformers

    if not launch.speaks or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    level = logging.WARNING if launch.speaks else logging.ERROR
    for name in ("transformers", "datasets", "accelerate", "DeepSpeed", "torch.distributed"):
        logging.getLogger(name).setLevel(level)
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # readers also log what they raise
    # torch 2.13 renames its collectives and warns whenever DeepSpeed calls the old ones.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\.")
    # DeepSpeed broadcasts a pipeline's tied weights outside of no_grad, which produces no gradients (0.19.8,
    # runtime/pipe/module.py, _synchronize_tied_weights).
    warnings.filterwarnings("ignore", category=UserWarning, message=r".*c10d::broadcast_: an autograd kernel")
    # Each rank's only GPU is the current one, which a barrier over NCCL says it uses (torch 2.11, barrier).
    warnings.filterwarnings("ignore", category=UserWarning, message=r"barrier\(\): using the device under")
    # transformers 5.23 warns peft about names that version 6 removes; users cannot fix that.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*deprecated and will be removed in v6")
    if not launch.speaks:
        warnings.simplefilter("ignore")


def settle_fsdp(trainer: Any) -> None:
    """Choose the modules whose weights FSDP gathers together, unless the user did: the layers of the model.

    accelerate 1.15 shards the modules in a model's `_no_split_modules`, and then the input embeddings separately
    (utils/fsdp_utils.py, fsdp2_prepare_model). BERT, RoBERTa, ViT and some forty others also list the module that holds
    the embeddings, which would then be sharded twice; torch 2.13 fails with "value was None when it should not be".
    DistilBERT lists nothing, so the weights of all its layers would be gathered at once. Remove this once accelerate
    skips embeddings that are already sharded. Raises RequestError for a model that FSDP cannot shard.
    """
    wants_fsdp = trainer.args.fsdp or accelerate_uses_fsdp()
    assert trainer.is_fsdp_enabled or not wants_fsdp, "FSDP was asked for, and Accelerate would run DDP"
    plugin, model = trainer.accelerator.state.fsdp_plugin if wants_fsdp else None, trainer.model
    if plugin is None or plugin.fsdp_version != 2 or plugin.transformer_cls_names_to_wrap is not None:
        return
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        raise RequestError(
            f"FSDP by accelerate shards models with input embeddings, and a {type(model).__name__} has none. Drop "
            "--fsdp; ZeRO-2 and ZeRO-3 shard any model."
        ) from None
    around = {type(one).__name__ for one in model.modules() if embeddings in one.children()}
    named = [name for name in model._no_split_modules or () if name not in around]
    plugin.transformer_cls_names_to_wrap = named or _layers(model)


def _layers(model: nn.Module) -> list[str]:
    """The classes of the modules in the model's longest ModuleList."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 1]
    return sorted({type(layer).__name__ for layer in max(lists, key=len)}) if lists else []


def cpu_adam(args: Any) -> tuple[Any, dict[str, Any]]:
    """DeepSpeed's AdamW for states in CPU memory, with the Trainer's weight decay groups: a section in the JSON would
    also apply weight decay to biases and norms (transformers, integrations/deepspeed.py, deepspeed_optim_sched)."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    betas = (args.adam_beta1, args.adam_beta2)
    return DeepSpeedCPUAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "adamw_mode": True}
