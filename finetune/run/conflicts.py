"""Flags that contradict each other or need something that is missing, judged by their values alone."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from finetune.errors import RequestError, or_meant
from finetune.run.mixture import parts_of
from finetune.run.optimizer import dtype_mistakes, optim_mistakes
from finetune.run.paths import METRICS
from finetune.run.rates import schedule_mistakes
from finetune.run.reference import OF_REFERENCE
from finetune.run.run import Run
from finetune.run.sizes import IMAGE_SIZES

FILES = ("train_file", "validation_file", "test_file")
FOLDERS = ("train_dir", "validation_dir", "test_dir")
TESTS = ("test_file", "test_dir", "cifar_dir", "dataset_name")
BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedules whose rate depends on past evaluations, not on the step
# Flag -> the package it needs; --load_in_4bit counts only with an adapter.
NEEDS = {"use_peft": "peft", "load_in_4bit": "bitsandbytes", "use_liger_kernel": "liger-kernel"}
# The names in transformers 5.23 (modeling_utils.py, AttentionInterface); a name with a slash is a kernel on the hub.
ATTENTIONS = "eager sdpa flex_attention flash_attention_2 flash_attention_3 flash_attention_4".split()
# Our metrics for the --task values that do not support all of them.
METRICS_OF_TASK = {"multi_label_classification": ("accuracy", "f1"), "regression": ("mse", "pearson")}
# Metrics and plots are made from all rows at once, at the end of an evaluation.
WHOLE_EVALUATION = {
    "prediction_loss_only": False,
    "eval_do_concat_batches": True,
    "batch_eval_metrics": False,
    "eval_use_gather_object": False,
    "include_for_metrics": [],
    "label_names": ["labels"],
}


def conflicts(run: Run) -> Iterator[str]:
    """Each conflict as a sentence with its fix."""
    yield from _twice(run)
    yield from _of_hub(run)
    yield from _of_order(run)
    yield from _of_evaluations(run)
    yield from _of_encoding(run)
    yield from schedule_mistakes(run)
    yield from optim_mistakes(run)
    yield from _of_metrics(run)
    yield from _of_best(run)
    if "train_dir" in run.recipe.flags:
        yield from _of_images(run)
    attention = run.value("attn_implementation") if "attn_implementation" in run.recipe.flags else None
    if attention and "/" not in attention and attention.removeprefix("paged|") not in ATTENTIONS:
        yield f"{run.said('attn_implementation')}, but it must be one of {', '.join(ATTENTIONS)}."
    if "reference" in run.recipe.flags and run.given.get("preprocessing_num_workers"):
        said = run.said("preprocessing_num_workers")
        yield f"{said}, which does nothing: one process tokenizes preferences. Drop it."
    if {"reference", "mined_negatives"} & set(run.recipe.flags) and run.given.get("label_smoothing_factor"):
        mend = "For dpo and simpo use --label_smoothing." if "reference" in run.recipe.flags else "Drop it."
        yield f"{run.said('label_smoothing_factor')}, which does nothing: this loss has no classes. {mend}"
    if run.given.get("enable_jit_checkpoint"):  # its signal handler is replaced by ours, which is installed later
        yield (
            f"{run.said('enable_jit_checkpoint')}: here every run saves a checkpoint on SIGTERM and SIGUSR1, on all "
            "ranks at once. Drop it."
        )
    if "streaming" in run.recipe.flags and run.value("streaming") and run.value("dataloader_num_workers") > 1:
        yield (
            f"{run.said('dataloader_num_workers')}: a stream is read by one process. Give 1 to tokenize in the "
            "background, or 0."
        )
    if run.value("save_total_limit") == 0:
        yield (
            f"{run.said('save_total_limit')}, which keeps every checkpoint. Write none for that, or --save_strategy no "
            "to save none."
        )
    yield from _of_ddp(run)
    yield from dtype_mistakes(run)
    if run.value("use_peft") and run.value("resize_embeddings"):
        yield (
            f"{run.said('resize_embeddings')}, and {run.said('use_peft')}: an adapter does not train the embeddings, "
            "so the new tokens would never be learned. Drop one of them."
        )


def _of_ddp(run: Run) -> Iterator[str]:
    if run.value("ddp_comm_hook") == "powersgd" and run.given.get("ddp_find_unused_parameters") is False:
        yield (
            f"{run.said('ddp_find_unused_parameters')}, and {run.said('ddp_comm_hook')}: PowerSGD keeps its errors per "
            "bucket, and DDP keeps its buckets only if that is True. Drop one of them."
        )
    if run.value("ddp_static_graph") and run.value("gradient_accumulation_steps") > 1 and run.launch.world_size > 1:
        yield (  # torch 2.13 (reducer.cpp, expect_autograd_hooks_) fails with an assertion in the first step
            f"{run.said('ddp_static_graph')}, and {run.said('gradient_accumulation_steps')}: DDP learns its graph in a "
            "first step without accumulation. Drop one of them."
        )


def missing(run: Run) -> Iterator[str]:
    """Each thing that a run that is to start here needs and was not given, as a sentence with its fix."""
    value = run.value
    for name, package in NEEDS.items():
        asked = value(name) and (name != "load_in_4bit" or value("use_peft"))
        if asked and importlib.util.find_spec(package.replace("-", "_")) is None:
            yield f"{run.said(name)}: needs {package}, which is not installed. pip install {package}, or drop it."
    if value("use_peft") and not value("model_name_or_path"):
        yield (
            f"{run.said('use_peft')}: an adapter needs a trained model, not one from scratch. Give "
            "--model_name_or_path."
        )
    if "block_size" in run.recipe.flags:
        if value("do_train") and value("validation_file") and not _trains_on(run):
            yield f"{run.said('validation_file')}, but there is no --train_file. Give one, or --do_train False."
        if run.stages is None:  # a pipeline refuses more, with its own messages
            yield from _of_language(run)
    elif value("do_predict") and not any(value(name) for name in TESTS):
        tests = [f"--{name}" for name in TESTS if name in run.recipe.flags]
        yield f"{run.said('do_predict')}, but it needs a test split. Give {', or '.join(tests)} with one."
    knows = value("do_train") or value("model_name_or_path") or "model_name_or_path" not in run.recipe.flags
    if not knows and run.stages is None:
        yield f"{run.said('do_train')}: there is no trained model to evaluate. Give --model_name_or_path."


def _twice(run: Run) -> Iterator[str]:
    given = run.given
    pairs = [
        ("resume", "overwrite_output_dir", "they contradict each other"),
        ("deepspeed", "deepspeed_config", "they say the same thing twice"),
        ("bf16", "fp16", "a run has one precision"),
        ("bf16_full_eval", "fp16_full_eval", "a run has one precision"),
        ("label_column_name", "label_column_names", "rows have one column of labels, or several"),
    ]
    files = FILES[:1] if "block_size" in run.recipe.flags else FILES
    sources = [("dataset_name", *files)] if "train_file" in run.recipe.flags else []
    sources += [(one, *FOLDERS) for one in ("dataset_name", "cifar_dir") if "train_dir" in run.recipe.flags]
    pairs += [(one, other, "data comes from one place") for one, *others in sources for other in others]
    pairs += [("dataset_name", "cifar_dir", "data comes from one place")]
    for one, other, why in pairs:
        if given.get(one) and given.get(other):
            yield f"{run.said(one)}, and {run.said(other)}: {why}. Keep one."


def _of_hub(run: Run) -> Iterator[str]:
    if run.given.get("hub_token"):
        yield (
            f"--hub_token ({run.source('hub_token')}): command lines are visible to everyone on this machine, "
            "and files are kept. Set HF_TOKEN, or run `hf auth login`."
        )


def _of_order(run: Run) -> Iterator[str]:
    usually = {"dataloader_drop_last": False, "train_sampling_strategy": "random", "length_column_name": "length"}
    for name, usual in usually.items():
        if run.given.get(name, usual) != usual:
            yield (
                f"{run.said(name)}: recipes order samples independently of the number of ranks. Use --group_by_length."
            )


def _of_encoding(run: Run) -> Iterator[str]:
    given = run.value("encoding")
    if not given or not any(run.value(name) for name in FILES):
        return  # without a file it does nothing, which void.py reports
    try:
        "".encode(given)
    except (LookupError, ValueError):
        yield f"{run.said('encoding')}, which Python does not know. Give a name such as cp1252, gb18030 or utf-16."


def _of_best(run: Run) -> Iterator[str]:
    said, best, figures = run.said("metric_for_best_model"), run.value("metric_for_best_model"), run.recipe.figures
    name, mend = (best or "").removeprefix("eval_"), " Give one that fits the data."
    if best and figures and not run.value("metrics") and name not in figures:
        yield f"{said}, but the evaluations of this recipe report {', '.join(figures)}.{or_meant(name, figures, mend)}"
    loss = run.value("loss") if "reference" in run.recipe.flags else None
    if name == "kl" and loss and loss not in OF_REFERENCE:
        yield f"{said}, but {run.said('loss')}, which has no reference model. Use another."
    if name.startswith("logp_") and loss == "reward":
        yield f"{said}, but a reward model has no log-probabilities. Use another."


def _of_metrics(run: Run) -> Iterator[str]:
    """Repeated metrics and metrics of another task. Whether a metric or its file exists is checked with the paths."""
    said, asked = run.said("metrics"), run.value("task")
    fit = METRICS_OF_TASK.get(asked, run.recipe.metrics)
    for name, times in Counter(run.value("metrics") or ()).items():
        if times > 1:
            yield f"{said}, which names {name} twice. Name it once."
        if name in METRICS and name not in fit:
            task = (asked or str(run.task)).replace("_", " ")
            yield f"{said}, but {name} is not for {task}. Available are {', '.join(fit)}."


def _of_evaluations(run: Run) -> Iterator[str]:
    """What transformers 5.23 refuses (training_args.py, _validate_args), and settings that would never save."""
    value, said = run.value, run.said
    for name, usual in WHOLE_EVALUATION.items():
        if value(name) not in (None, usual):
            yield f"{said(name)}: metrics here are computed from all predictions of an evaluation. Drop it."
    saves, evaluates = value("save_strategy"), value("eval_strategy")
    if not value("do_eval") or not value("do_train"):
        return
    schedule = value("lr_scheduler_type")
    needs = ("save_strategy",) * (saves == "best") + ("load_best_model_at_end",) * bool(value("load_best_model_at_end"))
    needs += ("lr_scheduler_type",) * (schedule in BY_METRIC)
    if evaluates == "no" and needs:
        yield f"{said(needs[0])}, which depends on evaluations, but {said('eval_strategy')}. Give steps or epoch."
    elif value("load_best_model_at_end") and saves not in ("best", evaluates):
        yield (
            f"{said('load_best_model_at_end')}, which saves what it evaluates, but {said('save_strategy')} and "
            f"{said('eval_strategy')}. Set both to the same value, or use --save_strategy best."
        )
    elif value("load_best_model_at_end") and saves == "steps":
        each, between = (Fraction(str(value(name))) for name in ("save_steps", _steps_of_evaluation(run)))
        if each % between or (each < 1) != (between < 1):
            yield (
                f"{said('load_best_model_at_end')}, which saves what it evaluates, but {said('save_steps')}, which is "
                f"not a multiple: {said(_steps_of_evaluation(run))}. Change one."
            )


def _steps_of_evaluation(run: Run) -> str:
    return "eval_steps" if run.value("eval_steps") else "logging_steps"


def _of_images(run: Run) -> Iterator[str]:
    kind, size, is_named = run.value("model_type"), run.value("model_size"), bool(run.value("model_name_or_path"))
    if size not in IMAGE_SIZES[kind]:
        yield f"{run.said('model_size')}, but {run.said('model_type')}, which has {', '.join(IMAGE_SIZES[kind])}."
    for name, only, usual in (("norm", "resnet", "batch"), ("dropout", "alexnet", None)):
        if run.value(name) != usual and kind != only and not is_named:
            yield f"{run.said(name)}, which is for {only}s, but {run.said('model_type')}. Drop it."
    for name in ("bf16_full_eval", "fp16_full_eval"):  # the Trainer casts only the weights
        if run.value(name):
            yield f"{run.said(name)}: images are in fp32, which such weights do not accept. Drop it."
    if run.given.get("group_by_length"):
        yield f"{run.said('group_by_length')}, which does nothing: all images have one size. Drop it."
    if run.given.get("label_column_name") and not run.value("dataset_name"):
        yield f"{run.said('label_column_name')}, which does nothing: folders name their classes. Add --dataset_name."
    if run.value("freeze_batch_norm"):
        if not is_named:
            yield f"{run.said('freeze_batch_norm')}: a model from scratch has no statistics to keep. Drop it."
        elif run.value("sync_batch_norm"):
            yield f"{run.said('freeze_batch_norm')}, and {run.said('sync_batch_norm')}: it collects new ones. Drop one."
    if run.stages is not None and not is_named and kind != "alexnet":
        yield (
            f"{run.said('pipeline_parallel_size')}, but {run.said('model_type')}, which is not a list of layers here. "
            "Drop it, or give --model_type alexnet."
        )


def _of_language(run: Run) -> Iterator[str]:
    streaming, trains, value = run.value("streaming"), run.value("do_train"), run.value
    if streaming and trains and value("max_steps") < 1:
        yield f"{run.said('streaming')}: the length of a stream is unknown. Give --max_steps."
    if streaming and not _trains_on(run):
        yield f"{run.said('streaming')}: there is nothing to stream. Give --train_file or --dataset_name."
    try:
        parts = parts_of(value("train_file"))
    except RequestError as error:
        yield str(error)
        return
    if streaming and value("teacher_top_k"):
        yield f"{run.said('teacher_top_k')}, but {run.said('streaming')}: a stream is not read ahead. Drop one of them."
    if streaming and len(parts) > 1:
        yield f"{run.said('streaming')}, but {run.said('train_file')}: only one file can be streamed. Drop --streaming."
    if run.given.get("group_by_length") and any(part.weight for part in parts):
        yield (
            f"{run.said('group_by_length')}, but {run.said('train_file')}: samples mixed by weight keep "
            "their order. Drop one of them."
        )
    if streaming and value("tokenizer") == "char" and not (value("tokenizer_name") or value("model_name_or_path")):
        yield (
            f"{run.said('streaming')}, but {run.said('tokenizer')}: later text may have characters that the first "
            "lacks. Give --tokenizer byte or bpe."
        )
    for name in ("save_strategy", "eval_strategy"):
        if streaming and run.given.get(name) == "epoch":
            yield f"{run.said(name)}: the length of a stream is unknown. Use steps, with --save_steps."
    if value("label_smoothing_factor"):
        yield f"{run.said('label_smoothing_factor')}: the Trainer would shift labels that are already shifted. Drop it."
    yield from _of_writing(run)


def _of_writing(run: Run) -> Iterator[str]:
    """Conflicts about evaluating a language model and generating text with it."""
    value = run.value
    if not value("do_train") and not value("do_eval"):
        yield f"{run.said('do_train')}, and {run.said('do_eval')}: there is nothing to do. Set one to True."
    if value("do_predict"):
        yield f"{run.said('do_predict')}: `finetune generate` answers a file of prompts. Drop it."
    said = run.said("predict_with_generate")
    if value("predict_with_generate") and not (_trains_on(run) or value("validation_file")):
        yield f"{said}: the built-in data is plain text, which has no answers. Give --train_file, or drop it."
    elif value("predict_with_generate") and value("train_on") == "all":
        yield f"{said}, but {run.said('train_on')}: the start of an answer is then unknown. Drop one of them."


def _trains_on(run: Run) -> bool:
    return bool(run.value("train_file") or run.value("dataset_name"))
