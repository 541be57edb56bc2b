"""The first step of every recipe: set up the machine for a run and build `TrainingArguments`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed
from transformers import TrainingArguments, set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from finetune.dsconfig.load import Loaded
from finetune.errors import RequestError
from finetune.privacy import shown
from finetune.run.accelerate_plugin import config_of_fields
from finetune.run.engine import (
    context_of,
    deepspeed_by_accelerate,
    deepspeed_config_of,
    load_deepspeed,
    stated_precision,
)
from finetune.run.environment import precision as precision_by_accelerate
from finetune.run.facts import check_offloaded, checkpointing_kwargs, object_of, precision_flags, refuse_fp16_on_cpu
from finetune.run.flags.compression import check_comm_hook
from finetune.run.flags.profiling import check_profile
from finetune.run.importing import end_imports
from finetune.run.launch import Launch, accelerate_uses_deepspeed, accelerate_uses_fsdp
from finetune.run.optimizer import trains_half
from finetune.run.run import Run
from finetune.run.schedules import Schedule
from finetune.training import builds, runtime
from finetune.training.checkpoints.choice import Chosen, checkpoint_to_resume, settle
from finetune.training.course import Course, course_of, tokenizer_of
from finetune.training.figures import more_is_better
from finetune.training.profiling.callback import with_profilers
from finetune.training.progress import on_terminal
from finetune.training.reshard.batch import keep_global_batch, refuse_other_batch
from finetune.training.run_folder import lock_output_dir
from finetune.training.sequence_parallel import settle_batch

Group = TypeVar("Group")


@dataclass(frozen=True)
class Session:
    """One process of a run, ready to train. `session[ModelArguments]` are the values of a group of flags."""

    run: Run
    training: TrainingArguments
    checkpoint: str | None
    threads: int
    ds_config: dict[str, Any] | None  # in a pipeline run with every "auto" filled; otherwise the Trainer fills most
    course: Course  # which run this is, and what its checkpoint recorded

    def __getitem__(self, group: type[Group]) -> Group:
        return self.run[group]

    @property
    def launch(self) -> Launch:
        return self.run.launch

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.training.output_dir)

    @property
    def shards_weights(self) -> bool:
        """True under ZeRO-3 and FSDP."""
        return is_deepspeed_zero3_enabled() or bool(self.training.fsdp) or accelerate_uses_fsdp()

    def kept_tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer, if a run from scratch is resumed: the embeddings belong to its tokens."""
        return tokenizer_of(self.checkpoint, self.run)

    def say(self, *lines: str) -> None:
        """Print on one rank."""
        if self.launch.speaks and lines:
            print(*map(shown, lines), sep="\n", flush=True)

    def introduce(self, data: str, model: str) -> None:
        """Print the data and the model, and which flag changes the model."""
        other = "" if self.run.value("model_name_or_path") else "; --model_name_or_path takes any other"
        self.say(data, f"model: {model}{other}")


def start(run: Run) -> Session:
    """Set up the machine, meet the other ranks, and build `TrainingArguments`. Raises RequestError for what can only be
    checked on the machine or against the checkpoint."""
    launch = run.launch
    end_imports()
    runtime.quiet_libraries(launch)
    has_cuda = _choose_devices(run)
    chosen = checkpoint_to_resume(run)
    asked = deepspeed_config_of(run)
    precision = choose_precision(run, has_cuda, asked)
    run, note = keep_global_batch(run, chosen.checkpoint)
    check_profile(run, asked, chosen.checkpoint)
    check_comm_hook(run, asked or ("by accelerate" if accelerate_uses_deepspeed() else None), precision)
    capability = torch.cuda.get_device_capability() if has_cuda else None
    deepspeed = load_deepspeed(run, asked, context_of(run, precision, has_cuda, capability)) if asked else None
    ops = _ops_of(run, deepspeed, has_cuda)
    said = [*(f"note: {one}" for one in run.notes), note, _first_alone(run, ops) if launch.speaks else None]
    threads = runtime.set_threads(launch, has_cuda)
    uses_deepspeed = deepspeed is not None or accelerate_uses_deepspeed()
    fsdp_on_cpu = not has_cuda and bool(run.value("fsdp") or accelerate_uses_fsdp())
    with runtime.explained_meeting(launch):
        if uses_deepspeed:
            runtime.prepare_deepspeed(launch, has_cuda, run.value("ddp_timeout"))
        elif fsdp_on_cpu:
            runtime.prepare_fsdp(launch, run.value("ddp_timeout"))
        have_met = distributed.is_initialized()
        if have_met:
            chosen = settle_checkpoint(run, asked, chosen)
    if deepspeed:
        deepspeed = replace(deepspeed, config=with_profilers(deepspeed.config, run, chosen.checkpoint))
    for_trainer = _for_trainer(run, deepspeed)
    if run.stages is not None:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]  # the process state exists; TrainingArguments would add a plugin
    by_hand = uses_deepspeed or fsdp_on_cpu
    settled = {**settled_values(run, has_cuda, by_hand), **precision, "deepspeed": for_trainer}
    with runtime.explained_meeting(launch):
        training = training_arguments(run, **settled)
        if not have_met:
            chosen = settle_checkpoint(run, asked, chosen)
    if for_trainer:
        settle_batch(training.hf_deepspeed_config.config, run.sequence_parallel_size, launch.world_size)
    set_seed(training.seed)
    course = course_of(run, training, chosen.checkpoint)
    session = Session(run, training, chosen.checkpoint, threads, deepspeed.config if deepspeed else None, course)
    opening = _opening_line(session, deepspeed.name if deepspeed else None)
    warning = "warning: --trust_remote_code: code that comes with the model runs here, with your permissions"
    session.say(*[warning] * bool(run.value("trust_remote_code")), *filter(None, said), *chosen.notes, *course.notes)
    session.say(opening, *(deepspeed.notes if deepspeed else ()))
    return session


def _choose_devices(run: Run) -> bool:
    """Set which GPUs this process may see, before anything initializes them. Returns whether there are any."""
    if run.launch.launcher == "python":
        # The Trainer would use all GPUs with DataParallel, which silently multiplies the batch and some losses.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if run.value("use_cpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # already applied; accelerate would skip DeepSpeed (1.15, state.py)
    has_cuda: bool = torch.cuda.is_available()
    if not has_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed detects it with a warning on each rank
    check_kernels(run, has_cuda)
    return has_cuda


def _first_alone(run: Run, ops: set[str]) -> str | None:
    """What rank 0 does while the others wait for it. Returns a message about the run folder, if any."""
    said = lock_output_dir(run) if Path(run.value("output_dir")).expanduser().is_dir() else None
    builds.refuse_stale_builds(ops)
    builds.tell_of_builds(ops)
    return said


def _ops_of(run: Run, deepspeed: Loaded | None, has_cuda: bool) -> set[str]:
    """The ops that DeepSpeed may have to compile for this run; none without DeepSpeed."""
    if deepspeed:
        return builds.ops_of(deepspeed.config, has_cuda)
    return builds.ops_of(config_of_fields(), has_cuda) if deepspeed_by_accelerate(run) else set()


def _for_trainer(run: Run, deepspeed: Loaded | None) -> dict[str, Any] | None:
    """The config that the Trainer gets."""
    if deepspeed is None or run.stages is not None:
        return None
    # If ranks share texts, the batch has been checked, and `settle_batch` fills it in.
    return deepspeed.config | ({"train_batch_size": "auto"} if run.sequence_parallel_size > 1 else {})


def training_arguments(run: Run, **settled: Any) -> TrainingArguments:
    """The Trainer's own arguments, overridden by those in `settled`."""
    known = {f.name for f in fields(TrainingArguments) if f.init}
    kind = run.value("lr_scheduler_type")
    ours = Schedule(kind) if kind in tuple(Schedule) else None
    settled |= {"lr_scheduler_type": "constant"} if ours else {}  # the Trainer's own accept only its names
    try:
        training = TrainingArguments(**{k: v for k, v in {**run.values, **settled}.items() if k in known})
    except ValueError as error:
        raise RequestError(str(error)) from error
    training.lr_scheduler_type = ours or training.lr_scheduler_type
    return training


def settled_values(run: Run, has_cuda: bool, by_hand: bool) -> dict[str, Any]:
    """The Trainer's arguments that follow from the machine and from other flags. `by_hand`: Accelerate's state was
    built here."""
    settled: dict[str, Any] = {}
    if not run.value("do_eval"):
        settled["eval_strategy"] = "no"  # any other would switch do_eval on again
    # A resumed run continues the counts of early stopping and other callbacks.
    restores = run.given.get("restore_callback_states_from_checkpoint", True)
    settled["restore_callback_states_from_checkpoint"] = restores
    settled["log_level_replica"] = run.given.get("log_level_replica", "error")  # only rank 0 logs
    settled["use_cpu"] = not has_cuda  # otherwise bf16 without a GPU is refused
    settled["disable_tqdm"] = run.given.get("disable_tqdm", not on_terminal())
    # Batches are in pinned memory; otherwise the host waits for each copy.
    accelerator: dict[str, Any] = {"non_blocking": True} if has_cuda else {}
    accelerator |= {"use_configured_state": True} if by_hand else {}
    if run.value("streaming"):
        # Dispatching from rank 0 concatenates the ranks' batches, which are padded to different lengths (accelerate
        # 1.15, data_loader.py, DataLoaderDispatcher). Unused columns stay, because the collator tokenizes the text.
        accelerator["dispatch_batches"] = False
        settled["remove_unused_columns"] = False
        for name in ("save_strategy", "eval_strategy"):
            if {**run.values, **settled}.get(name) == "epoch":  # a stream has none
                settled |= {name: "steps", "eval_steps": run.value("eval_steps") or run.value("save_steps")}
    if (best := run.value("metric_for_best_model")) and "greater_is_better" not in run.given:
        settled["greater_is_better"] = more_is_better(best) is not False  # the Trainer's own names are those of losses
    settled |= checkpointing(run) if run.stages is None else {}
    settled["accelerator_config"] = {**accelerator, **(object_of(run, "accelerator_config") or {})}
    settled["liger_kernel_config"] = object_of(run, "liger_kernel_config")
    return settled


def settle_checkpoint(run: Run, deepspeed: str | None, chosen: Chosen) -> Chosen:
    """The checkpoint that the ranks agree on, which may differ from the one that this rank found."""
    settled = settle(run, chosen)
    if settled.checkpoint != chosen.checkpoint:
        refuse_other_batch(run, settled.checkpoint)
        check_profile(run, deepspeed, settled.checkpoint)
    return settled


def checkpointing(run: Run) -> dict[str, Any]:
    """The Trainer's `activation_checkpointing`, from this flag, its older name, or --activation_checkpoint_interval."""
    kwargs = checkpointing_kwargs(run)
    if kwargs is None:
        return {}
    older = {"gradient_checkpointing": None, "gradient_checkpointing_kwargs": None}  # they would warn
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs or None, **older}


def check_kernels(run: Run, has_cuda: bool) -> None:
    """Raises RequestError for kernels that need a GPU."""
    if has_cuda:
        return
    check_offloaded(run)
    if run.value("use_liger_kernel"):
        raise RequestError(f"{run.said('use_liger_kernel')}: its Triton kernels need a GPU. Drop it.")
    if run.value("attn_implementation") == "flex_attention" and run.value("do_train"):
        # torch 2.13, nn/attention/flex_attention.py: NotImplementedError in the first step.
        raise RequestError(
            f"{run.said('attn_implementation')}: on a CPU it has no backward pass. Give sdpa, or leave it out."
        )


def choose_precision(run: Run, has_cuda: bool, deepspeed: str | None) -> dict[str, bool]:
    """The Trainer's `bf16` and `fp16`: from the flags, or the config, or else the fastest on this machine."""
    by_accelerate = precision_by_accelerate()
    is_chosen = by_accelerate in ("bf16", "fp16")
    known = by_accelerate if is_chosen else None
    by_deepspeed = bool(deepspeed) or deepspeed_by_accelerate(run)
    fastest = known or runtime.choose_precision(has_cuda)
    found = precision_flags(run, stated_precision(deepspeed), lambda: fastest, by_deepspeed)
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # else the Trainer uses it in an fp32 run (5.23, training_args.py)
        os.environ["ACCELERATE_MIXED_PRECISION"] = next((name for name, is_chosen in found.items() if is_chosen), "no")
    if not has_cuda:
        refuse_fp16_on_cpu(run, found["fp16"] and not by_deepspeed)  # DS402 is about an engine's
    for half in ("bf16", "fp16"):
        if deepspeed and run.value(f"{half}_full_eval") and not found[half]:
            raise RequestError(
                f"{run.said(f'{half}_full_eval')}: DeepSpeed's engine evaluates in the precision that it trains in. "
                f"Add --{half} True, or drop it."
            )
    return found


def _opening_line(session: Session, deepspeed: str | None) -> str:
    training, launch = session.training, session.launch
    precision = runtime.precision_words(training.bf16, training.fp16)
    if trains_half(session.run):
        precision += ", its weights and optimizer too"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {session.threads} thread(s) a rank"
    engines = (
        (deepspeed, f"DeepSpeed {deepspeed}"),
        (training.deepspeed_plugin, "DeepSpeed by accelerate"),
        (training.fsdp, "FSDP"),
        (accelerate_uses_fsdp(), "FSDP by accelerate"),
    )
    engine = next((name for used, name in engines if used), "no DeepSpeed")
    accumulation = training.gradient_accumulation_steps
    stages = session.run.stages
    ranks, shared = session.run.data_parallel_size, session.run.sequence_parallel_size
    groups = f" = {stages} stage(s) x {ranks} pipeline(s)" if stages else ""
    groups = f" = {ranks} group(s) of {shared} that share each text" if shared > 1 else groups
    experts = session.run.expert_parallel_size
    groups += f", each group of {experts} holds all experts," if experts > 1 else ""
    total = training.train_batch_size * accumulation * ranks
    batch = f"{training.train_batch_size} x {accumulation} x {ranks} = {total}"
    return f"run: {launch.world_size} rank(s){groups} on {device}; {engine}; {precision}; global batch {batch}"
