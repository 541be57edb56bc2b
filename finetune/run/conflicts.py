"""Flags that contradict each other, or that ask for what is missing: what their values alone show."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.run.run import Run

FILES = ("train_file", "validation_file", "test_file")
ADAPTER_NEEDS = {"use_peft": "peft", "load_in_4bit": "bitsandbytes"}  # by flag, the package


def conflicts(run: Run) -> Iterator[str]:
    """Each in a sentence with its mend."""
    yield from _twice(run)
    yield from _of_hub(run)
    yield from _of_order(run)
    if "lora_r" in run.recipe.flags:
        yield from _of_adapters(run)


def missing(run: Run) -> Iterator[str]:
    """Likewise, what a run that is to start here needs and nobody gave."""
    for name, package in ADAPTER_NEEDS.items():
        if run.value("use_peft") and run.value(name) and importlib.util.find_spec(package) is None:
            yield f"{run.said(name)}: needs {package}, which is not installed. pip install {package}, or drop it."
    if run.value("use_peft") and not run.value("model_name_or_path"):
        yield (
            f"{run.said('use_peft')}: it adapts a trained model, and one from scratch has nothing to keep. Give "
            "--model_name_or_path."
        )
    if "block_size" in run.recipe.flags:
        yield from _of_language(run)


def _twice(run: Run) -> Iterator[str]:
    given = run.given
    if run.values.get("resume") and run.values.get("overwrite_output_dir"):
        yield "--resume and --overwrite_output_dir contradict each other. Keep one."
    if given.get("deepspeed") and given.get("deepspeed_config"):
        yield "--deepspeed and --deepspeed_config say the same thing twice. Keep one."
    if given.get("bf16") and given.get("fp16"):
        yield "--bf16 and --fp16 are both True. Keep one."
    if given.get("label_column_name") and given.get("label_column_names"):
        yield "--label_column_name and --label_column_names are both given. Keep one."
    mixed = FILES[:1] if "block_size" in run.recipe.flags else FILES
    for name in mixed:
        if given.get("dataset_name") and given.get(name):
            yield f"--dataset_name and --{name} are both given. Keep one: splits are not mixed."


def _of_hub(run: Run) -> Iterator[str]:
    if run.given.get("hub_model_id") and not run.given.get("push_to_hub"):
        yield "--hub_model_id names where to push, but nothing is pushed. Add --push_to_hub True."
    if run.given.get("hub_token"):
        yield (
            f"--hub_token ({run.settings['hub_token'].source}): command lines are seen by everybody on this machine, "
            "and files are kept. Set HF_TOKEN, or run `hf auth login`."
        )


def _of_order(run: Run) -> Iterator[str]:
    for name, usual in (("dataloader_drop_last", False), ("train_sampling_strategy", "random")):
        if run.given.get(name, usual) != usual:
            yield (
                f"{run.said(name)}: steps are made here so that they do not depend on the number of ranks. Use "
                "--group_by_length."
            )


def _of_adapters(run: Run) -> Iterator[str]:
    if not run.value("use_peft"):
        for name in ("load_in_4bit", "merge_adapter"):
            if run.value(name):
                yield f"{run.said(name)}, but it is for adapters. Add --use_peft True, or drop it."
        return
    if run.value("lora_r") < 1:
        yield f"{run.said('lora_r')}, but an adapter has a rank of 1 or more."
    if run.value("resize_embeddings"):
        yield (
            "--resize_embeddings and --use_peft: an adapter leaves the embeddings as they are, so the new tokens would "
            "never be learnt. Drop one of them."
        )


def _of_language(run: Run) -> Iterator[str]:
    streaming, trains, value = run.value("streaming"), run.value("do_train"), run.value
    if trains and value("validation_file") and not (value("train_file") or value("dataset_name")):
        yield "--validation_file without --train_file: give one, or evaluate alone by --do_train False."
    if streaming and trains and value("max_steps") < 1:
        yield f"{run.said('streaming')}: nobody knows how long a stream is. Say how long to train by --max_steps."
    if streaming and not (value("train_file") or value("dataset_name")):
        yield f"{run.said('streaming')}: there is nothing to stream. Give --train_file or --dataset_name."
    if streaming and value("dataloader_num_workers") > 1:
        yield (
            f"{run.said('dataloader_num_workers')}: a stream is read by one process. Give 1 to have it tokenized "
            "beside the training, or 0."
        )
    for name in ("save_strategy", "eval_strategy"):
        if streaming and run.given.get(name) == "epoch":
            yield f"{run.said(name)}: nobody knows how long a stream is. Use steps, with --save_steps."
    if value("label_smoothing_factor"):
        yield f"{run.said('label_smoothing_factor')}: the Trainer shifts labels that are shifted here. Drop it."
    if not trains and not value("do_eval"):
        yield "--do_train and --do_eval are both False: there is nothing to do. Set one to True."
    if not trains and not value("model_name_or_path"):
        yield f"{run.said('do_train')}: there is no trained model to evaluate. Give --model_name_or_path."
    if value("do_predict"):
        yield f"{run.said('do_predict')}: a language model writes samples instead (--sample_prompt). Drop it."
