"""The first chapter of every recipe: from the command line to a settled machine and the Trainer's arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from finetune.privacy import without_home
from finetune.training import runtime
from finetune.training.arguments import Request
from finetune.training.checkpoints.choice import Chosen, checkpoint_to_resume, settle
from finetune.training.comm_hooks.arguments import check_comm_hook
from finetune.training.engine import (
    accelerate_uses_deepspeed,
    accelerate_uses_fsdp,
    deepspeed_config_of,
    fsdp_of,
    load_deepspeed,
    stated_precision,
)
from finetune.training.guards.arguments import check_guards
from finetune.training.hub import check_hub
from finetune.training.launch import Launch, read_launch
from finetune.training.output_dir import check_output_dir, lock_output_dir
from finetune.training.pipeline.arguments import check_pipeline
from finetune.training.profiling.arguments import check_profile
from finetune.training.profiling.deepspeed import with_profilers
from finetune.training.reshard.batch import keep_global_batch, refuse_other_batch


@dataclass(frozen=True)
class Session:
    """One process of one run, ready to train. `arguments` has the recipe's groups in order."""

    launch: Launch
    arguments: tuple[Any, ...]
    training: Any
    request: Request
    checkpoint: str | None
    threads: int
    ds_config: dict[str, Any] | None  # every "auto" filled in a pipeline run; else the Trainer fills most

    @property
    def shards_weights(self) -> bool:
        """True under ZeRO-3 and FSDP."""
        return is_deepspeed_zero3_enabled() or bool(self.training.fsdp) or accelerate_uses_fsdp()

    def say(self, *lines: str) -> None:
        """Print on one rank."""
        if self.launch.speaks:
            print(*map(without_home, lines), sep="\n", flush=True)


def start(
    groups: Sequence[type], defaults: dict[str, Any], argv: Sequence[str], scratch_defaults: dict[str, Any]
) -> Session:
    """Parse, check, settle, and build `TrainingArguments`. Raises RequestError before anything heavy is done.

    `scratch_defaults` overrule `defaults` when no --model_name_or_path is given.
    """
    launch = read_launch()
    if launch.launcher == "python":
        # The Trainer would spread over all GPUs by DataParallel, which multiplies the batch and some losses unasked.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    request = Request(groups, defaults, argv, launch, scratch_defaults)
    runtime.quiet_libraries(launch)
    chosen = checkpoint_to_resume(request)
    if request.value("use_cpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks for the GPUs
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns on each rank when it finds out by itself
    if request.stages is not None:
        check_pipeline(request)
    request.values["fsdp"] = fsdp_of(request)
    asked = deepspeed_config_of(request)
    if asked and not accelerate_uses_deepspeed():
        request.values["deepspeed"] = asked  # so that recipe.yaml repeats it
    precision = choose_precision(request, has_cuda, stated_precision(asked))
    said: list[str | None] = [keep_global_batch(request, chosen.checkpoint)]
    check_profile(request, asked, chosen.checkpoint)
    check_comm_hook(request, asked or ("by accelerate" if accelerate_uses_deepspeed() else None), precision)
    check_guards(request)
    deepspeed = load_deepspeed(request, asked, precision, has_cuda) if asked else None
    if launch.speaks:
        check_output_dir(request)
        if Path(request.values["output_dir"]).expanduser().is_dir():
            said.append(lock_output_dir(request))
        check_hub(request)
        if deepspeed:
            runtime.refuse_stale_builds()
    threads = runtime.set_threads(launch, has_cuda)
    uses_deepspeed = deepspeed is not None or accelerate_uses_deepspeed()
    fsdp_on_cpu = not has_cuda and bool(request.value("fsdp") or accelerate_uses_fsdp())
    with runtime.explained_meeting(launch):
        if uses_deepspeed:
            runtime.prepare_deepspeed(launch, has_cuda, request.value("ddp_timeout"))
        elif fsdp_on_cpu:
            runtime.prepare_fsdp(launch, request.value("ddp_timeout"))
        have_met = distributed.is_initialized()
        if have_met:
            chosen = settle_checkpoint(request, asked, chosen)
    if deepspeed:
        deepspeed = replace(deepspeed, config=with_profilers(deepspeed.config, request, chosen.checkpoint))
    for_trainer = deepspeed.config if deepspeed and request.stages is None else None
    if request.stages is not None:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]  # the process state stands; TrainingArguments would build a plugin
    settled = _settled(request, has_cuda, by_hand=uses_deepspeed or fsdp_on_cpu)
    settled |= {**precision, "deepspeed": for_trainer}
    with runtime.explained_meeting(launch):
        *arguments, training = request.build(**settled)
        if not have_met:
            chosen = settle_checkpoint(request, asked, chosen)
    set_seed(training.seed)
    config = deepspeed.config if deepspeed else None
    session = Session(launch, tuple(arguments), training, request, chosen.checkpoint, threads, config)
    if request.values.get("trust_remote_code"):
        session.say(
            "warning: --trust_remote_code: code that comes with the model runs here, and may do all that you may"
        )
    headline = _headline(session, deepspeed.name if deepspeed else None)
    session.say(*filter(None, said), *chosen.notes, headline, *(deepspeed.notes if deepspeed else ()))
    return session


def _settled(request: Request, has_cuda: bool, by_hand: bool) -> dict[str, Any]:
    """The Trainer's arguments that follow from the machine and from other flags. `by_hand` says that Accelerate's state
    has been built here."""
    settled: dict[str, Any] = {}
    if not request.values.get("do_eval"):
        settled["eval_strategy"] = "no"  # which would switch it on again
    # Early stopping and others count on where a resumed run goes on.
    restores = request.given.get("restore_callback_states_from_checkpoint", True)
    settled["restore_callback_states_from_checkpoint"] = restores
    settled["log_level_replica"] = request.given.get("log_level_replica", "error")  # one rank speaks
    settled["use_cpu"] = not has_cuda  # bf16 without a GPU is refused otherwise
    settled["disable_tqdm"] = request.given.get("disable_tqdm", not sys.stderr.isatty())  # a bar is for a terminal
    accelerator: dict[str, Any] = {}
    if has_cuda:
        accelerator["non_blocking"] = True  # batches come from pinned memory; without this the host waits for each
    if by_hand:
        accelerator["use_configured_state"] = True
    if request.value("streaming"):
        # Dispatching from rank 0 joins the batches of all ranks, which are padded to different lengths (accelerate
        # 1.15, data_loader.py, DataLoaderDispatcher). Unused columns stay, for the text is tokenized by the collator.
        accelerator["dispatch_batches"] = False
        settled["remove_unused_columns"] = False
    settled |= checkpointing(request) if request.stages is None else {}
    settled["accelerator_config"] = {**accelerator, **(request.values.get("accelerator_config") or {})}
    return settled


def settle_checkpoint(request: Request, deepspeed: str | None, chosen: Chosen) -> Chosen:
    """What the ranks agree on, which may be another than each has looked at by itself."""
    settled = settle(request, chosen)
    if settled.checkpoint != chosen.checkpoint:
        refuse_other_batch(request, settled.checkpoint)
        check_profile(request, deepspeed, settled.checkpoint)
    return settled


def checkpointing(request: Request) -> dict[str, Any]:
    """The Trainer's `activation_checkpointing`, by this or its older name, or by --activation_checkpoint_interval."""
    values = request.values
    interval = values.get("activation_checkpoint_interval")
    on = values.get("activation_checkpointing") or values.get("gradient_checkpointing") or interval
    if not on:
        return {}
    kwargs = values.get("activation_checkpointing_kwargs") or values.get("gradient_checkpointing_kwargs") or {}
    if interval:
        kwargs = {**kwargs, "every_n_layers": interval}
    older = {"gradient_checkpointing": None, "gradient_checkpointing_kwargs": None}  # which would warn
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs or None, **older}


def choose_precision(request: Request, has_cuda: bool, stated: dict[str, bool]) -> dict[str, bool]:
    """The Trainer's `bf16` and `fp16`: as asked for by flag, or `stated` in the config, or what is fastest here."""
    asked = {name: request.given[name] for name in ("bf16", "fp16") if name in request.given} or stated
    if asked:
        return {"bf16": False, "fp16": False} | asked
    by_accelerate = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # "no" is what it says when nobody chose
    best = by_accelerate if by_accelerate in ("bf16", "fp16") else runtime.choose_precision(has_cuda)
    return {"bf16": best == "bf16", "fp16": best == "fp16"}


def _headline(session: Session, deepspeed: str | None) -> str:
    training, launch = session.training, session.launch
    precision = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {session.threads} thread(s) a rank"
    engines = (
        (deepspeed, f"DeepSpeed {deepspeed}"),
        (training.deepspeed_plugin, "DeepSpeed by accelerate"),
        (training.fsdp, "FSDP"),
        (accelerate_uses_fsdp(), "FSDP by accelerate"),
    )
    engine = next((name for used, name in engines if used), "no DeepSpeed")
    accumulation = training.gradient_accumulation_steps
    stages = session.request.stages
    ranks = launch.world_size // (stages or 1)  # that read different samples
    spread = f" = {stages} stage(s) x {ranks} pipeline(s)" if stages else ""
    total = training.train_batch_size * accumulation * ranks
    batch = f"{training.train_batch_size} x {accumulation} x {ranks} = {total}"
    return f"run: {launch.world_size} rank(s){spread} on {device}; {engine}; {precision}; global batch {batch}"
