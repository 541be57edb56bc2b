"""Flags that another flag makes void, so that a run would silently ignore them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.run.conflicts import BY_METRIC, FILES
from finetune.run.engine import deepspeed_by_accelerate, fsdp_by_accelerate
from finetune.run.files import RUN_RECORD
from finetune.run.flag import GIVEN, Void
from finetune.run.flags.adapter import OF_NEW_ADAPTERS
from finetune.run.flags.compression import HOOKS, KEEPS_ERRORS, OF_DDP
from finetune.run.flags.guards import POLICIES
from finetune.run.flags.language import OF_CHATS
from finetune.run.flags.profiling import OF_DEEPSPEED as OF_PROFILES
from finetune.run.optimizer import without_args
from finetune.run.parse import COMMAND_LINE
from finetune.run.run import Run

KEEP_ONE = "Keep one of the two."
NOTHING: tuple[Any, ...] = (None, False, "", [], -1, "no", "none")  # values that ask for nothing; 0 is False


# As in transformers 5.23: trainer_callback.py (DefaultFlowCallback), training_args.py, optimization.py (get_scheduler),
# trainer_optimizer.py; the others are our flags.
VOID = (
    Void(("save_steps",), "save_strategy", ("no", "epoch", "best"), "Give --save_strategy steps.", "steps"),
    Void(("eval_strategy", "eval_steps", "eval_delay", "eval_on_start"), "do_eval", (False,), "Add --do_eval True."),
    Void(("early_stopping_patience", "load_best_model_at_end"), "do_eval", (False,), "Add --do_eval True."),
    Void(("max_eval_samples",), "do_eval", (False,), "Add --do_eval True."),
    Void(
        ("eval_accumulation_steps", "batch_eval_metrics", "prediction_loss_only", "bf16_full_eval", "fp16_full_eval"),
        "do_eval",
        (False,),
        "Nothing is evaluated then. Drop it.",
        unless=("do_predict",),
    ),
    Void(("eval_steps",), "eval_strategy", ("no", "epoch"), "Give --eval_strategy steps.", "steps"),
    Void(("eval_delay", "early_stopping_patience"), "eval_strategy", ("no",), "Give --eval_strategy steps or epoch."),
    Void(("logging_steps",), "logging_strategy", ("no", "epoch"), "Give --logging_strategy steps.", "steps"),
    Void(("num_train_epochs",), "max_steps", GIVEN),
    Void(("save_total_limit", "save_only_model", "async_save"), "save_strategy", ("no",)),
    Void(
        ("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        "report_to",
        (["none"], []),
        "It is for a tracker. Give --report_to.",
    ),
    Void(
        ("warmup_steps",),
        "lr_scheduler_type",
        ("constant", *BY_METRIC),
        "It has no warmup: give --lr_scheduler_type constant_with_warmup, or drop it.",
    ),
    Void(("warmup_steps",), "lr_scheduler_type", ("step",), "It begins at the full rate. Drop it."),
    Void(("warmup_steps",), "lr_scheduler_type", ("one_cycle",), "Use pct_start in --lr_scheduler_kwargs instead."),
    Void(("lr_scheduler_kwargs",), "lr_scheduler_type", ("constant", "constant_with_warmup")),
    Void(("adam_beta1", "adam_beta2", "adam_epsilon"), "optim", ("sgd", "adagrad", "rmsprop", "adafactor")),
    Void(("greater_is_better",), "metric_for_best_model", (None,), "Add --metric_for_best_model."),
    Void(("torch_compile_backend", "torch_compile_mode"), "torch_compile", (False,), implies=True),
    Void(("liger_kernel_config",), "use_liger_kernel", (False,), "Add --use_liger_kernel True."),
    Void(("fsdp_config",), "fsdp", (None, "", "False", "false", "none"), "Add --fsdp True."),
    Void(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        "activation_checkpointing",
        (None, False),
        "Add --activation_checkpointing True.",
        unless=("gradient_checkpointing", "activation_checkpoint_interval"),
    ),
    Void(("gradient_checkpointing", "activation_checkpoint_interval"), "activation_checkpointing", (False,), KEEP_ONE),
    Void(("activation_checkpointing", "activation_checkpoint_interval"), "gradient_checkpointing", (False,), KEEP_ONE),
    Void(
        ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"),
        "dataloader_num_workers",
        (0,),
        "Give --dataloader_num_workers 1 or more.",
    ),
    Void(
        ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
        "push_to_hub",
        (False,),
        "Add --push_to_hub True, or drop it.",
    ),
    Void(
        (*OF_NEW_ADAPTERS, "merge_adapter", "load_in_4bit"),
        "use_peft",
        (False,),
        "It is for adapters. Add --use_peft True, or drop it.",
    ),
    Void(("bnb_4bit_use_double_quant",), "load_in_4bit", (False,), "Add --load_in_4bit True, or drop it."),
    Void(
        ("model_size", "model_type", "config_overrides", "dropout", "norm", "tokenizer", "bpe_vocab_size"),
        "model_name_or_path",
        GIVEN,
        "It is for a model from scratch. Drop it.",
    ),
    Void(("resize_embeddings",), "model_name_or_path", (None,), "It is for a trained model. Drop it."),
    Void(
        ("model_revision", "trust_remote_code"),
        "model_name_or_path",
        (None,),
        "Add --model_name_or_path.",
        unless=("tokenizer_name",),
    ),
    Void(("dataset_config_name", "image_column_name"), "dataset_name", (None,), "Add --dataset_name."),
    Void(("group_by_length",), "packing", ("wrapped", "bfd"), "Blocks have one length. Drop it."),
    Void(("group_by_length",), "streaming", (True,), "A stream is read in order. Drop it."),
    Void(("preprocessing_num_workers",), "streaming", (True,), "Texts are tokenized as they come. Drop it."),
    Void(("drop_duplicates",), "streaming", (True,), "A stream is not searched for duplicates. Drop one of them."),
    Void(("document_mask",), "packing", ("none",), "A block has one document. Drop it."),
    Void(("encoding",), "train_file", (None,), "It is for files. Drop it.", unless=("validation_file", "test_file")),
    Void(("class_weights", "label_smoothing_factor"), "task", ("regression",), "It is for classes. Drop it."),
    Void(("label_smoothing_factor",), "task", ("multi_label_classification",), "It is for one label per row. Drop it."),
    Void(("optim_args",), "optim", without_args(), "It takes none. Drop it."),
    Void(("optim_target_modules",), "optim", ("adamw_torch", "adamw_torch_fused", "adafactor")),
    Void(("tokenizer", "bpe_vocab_size"), "tokenizer_name", GIVEN),
    Void(("bpe_vocab_size",), "tokenizer", ("char", "byte"), "Give --tokenizer bpe."),
    Void(("validation_fraction", "validation_split_percentage"), "validation_file", GIVEN),
    Void(("validation_fraction",), "validation_dir", GIVEN),
    Void(("test_file", "test_dir", "max_predict_samples"), "do_predict", (False,), "Add --do_predict True.", True),
    Void(("sample_prompt", "sample_temperature"), "sample_tokens", (0,)),
    Void(
        ("num_beams", "generation_max_length", "generation_max_new_tokens", "metrics"),
        "predict_with_generate",
        (False,),
        "Nothing is generated then. Add --predict_with_generate True.",
    ),
    Void(
        ("num_beams", "generation_max_length", "generation_max_new_tokens", "predict_with_generate", "metrics"),
        "do_eval",
        (False,),
        "Nothing is evaluated then. Add --do_eval True or --do_predict True.",
        unless=("do_predict",),
    ),
    Void(("distill_alpha", "distill_temperature", "teacher_top_k"), "teacher", (None,), "Add --teacher, or drop it."),
    Void(("teacher_top_k",), "distill_alpha", (0,), "The teacher has no influence. Drop it."),
    Void(("teacher",), "do_train", (False,), "A teacher is only for training. Drop it."),
    Void(("router_aux_loss_coef",), "do_train", (False,), "It is only for training. Drop it."),
    Void(("profile_first_step",), "profile", (0,), "Give --profile the number of steps.", unless=OF_PROFILES[:2]),
    Void(("nan_limit",), "on_nan", tuple(one for one in POLICIES if one not in ("skip", "rollback"))),
    Void(("comm_hook_start_steps",), "ddp_comm_hook", tuple(one for one in HOOKS if one not in KEEPS_ERRORS)),
    Void(("powersgd_rank",), "ddp_comm_hook", tuple(one for one in HOOKS if one != "powersgd")),
    Void(("resume",), "do_train", (False,), "Give the checkpoint as --model_name_or_path, or drop it."),
    Void(
        ("resume_changed", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "resume",
        (None,),
        "Add --resume allow, or drop it.",
    ),
)

OTHER_DATA = ("dataset_name", *FILES[1:])
COLUMNS = (
    *("text_column_name", "text_column_names", "tokens_column_name"),
    *("label_column_name", "label_column_names", "tags_column_name", "tag_names"),
    *("source_column_name", "target_column_name", "column_mapping"),
)
# Only for a run that is to start here: for another, the data may be named later.
VOID_HERE = (
    Void(COLUMNS, "train_file", (None,), "Built-in data has its own columns. Give --train_file.", unless=OTHER_DATA),
    Void(
        OF_CHATS,
        "train_file",
        (None,),
        "Built-in data has no conversations. Give --train_file.",
        unless=OTHER_DATA,
        spares_defaults=True,
    ),
    Void(  # for other data, data/seq2seq.py checks them
        ("source_lang", "target_lang"),
        "train_file",
        (None,),
        "Built-in data has no languages. Give --train_file.",
        unless=(*OTHER_DATA, "model_name_or_path", "tokenizer_name"),
    ),
)
DDP, DEEPSPEED, FSDP = "DistributedDataParallel", "DeepSpeed", "FSDP"
# Engines -> the flags that only they read (transformers 5.23, trainer.py and training_args.py; the last two are ours).
# A pipeline refuses the Trainer's flags with its own messages.
OF_ENGINES: dict[tuple[str, ...], tuple[str, ...]] = {
    (DDP,): OF_DDP,
    (DDP, FSDP): ("ddp_backend",),
    (DEEPSPEED,): ("disable_check", "nvme_path"),
}


def void_here(run: Run, deepspeed: str | None) -> Iterator[str]:
    """The void flags of a run that is to start on this machine, with the DeepSpeed config of that name, if any."""
    yield from settle_void(run, VOID_HERE)[1]
    if run.stages is not None:
        return
    engine, said, place = _engine(run, deepspeed)
    for engines, flags in OF_ENGINES.items():
        for name in flags if engine not in engines else ():
            if says(run.given.get(name)) and not is_overruled(run.source(name), place):
                yield f"{run.said(name)}, which is for {' and '.join(engines)}, but {said}."


def _engine(run: Run, deepspeed: str | None) -> tuple[str, str, str]:
    """The engine that trains, its wording in an error, and where it was asked for. A YAML may serve several launches,
    so an engine from the command line overrides the YAML's lines."""
    flags: tuple[str, ...]
    if deepspeed or deepspeed_by_accelerate(run):
        engine, flags = DEEPSPEED, ("deepspeed", "deepspeed_config")
    elif run.value("fsdp") or fsdp_by_accelerate(run):
        engine, flags = FSDP, ("fsdp",)
    else:
        return DDP, "this run is without DeepSpeed. Add --deepspeed, or drop it", COMMAND_LINE
    by = next((name for name in flags if says(run.value(name))), None)
    said = run.said(by) if by else f"accelerate launch asks for {engine}"
    said += ". Drop one of the two"
    return engine, said, run.source(by) if by in (*run.given, "fsdp") else COMMAND_LINE  # else the launcher chose it


def settle_void(run: Run, rows: Sequence[Void] | None = None) -> tuple[Run, list[str]]:
    """The run without its void flags, and the mistakes. Void flags in a YAML are dropped if the command line makes them
    void, and those in a run's record always, because it also lists defaults. The rest is a mistake, or implied."""
    mistakes: list[str] = []
    for row in (*VOID, *run.recipe.void) if rows is None else rows:
        if row.by not in run.recipe.flags or not _is_void(row, run):
            continue
        for name in row.flags:
            if not says(run.given.get(name)) or (row.spares_defaults and run.value(name) == run.recipe.default(name)):
                continue
            if row.by not in run.given and row.implies is not None:
                before = run.said(row.by).partition(" is ")[2]
                run = run.settled(f"follows from --{name}", **{row.by: row.implies})
                run = replace(run, notes=(*run.notes, f"{run.said(row.by)}, and not {before}"))
                break
            if is_overruled(run.settings[name].source, run.settings[row.by].source if row.by in run.given else None):
                if run.settings[row.by].source == COMMAND_LINE:
                    run = replace(run, notes=(*run.notes, f"{run.said(name)}: {run.said(row.by)} overrides it"))
                run = replace(run, settings={key: one for key, one in run.settings.items() if key != name})
            else:
                mistakes.append(f"{run.said(name)}, which does nothing: {run.said(row.by)}. {row.mend}")
    return run, mistakes


def says(value: Any) -> bool:
    return value not in NOTHING


def _is_void(row: Void, run: Run) -> bool:
    value = run.value(row.by)
    return (says(value) if row.values == GIVEN else value in row.values) and not any(
        says(run.value(name)) for name in row.unless
    )


def is_overruled(source: str, by: str | None) -> bool:
    """Whether a value from `source` yields to a value from `by`; None means not given."""
    is_record = Path(source.rpartition(" line ")[0]).name == RUN_RECORD
    return by is not None and source != COMMAND_LINE and (by == COMMAND_LINE or is_record)
