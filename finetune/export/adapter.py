"""Merges an adapter into the weights of its base model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.files import ADAPTER_CONFIG
from finetune.safe_read import read_json_object
from finetune.safe_read.folders import check_model_folder


def write_merged(adapter: Path, out: Path, base: str | None, dtype: torch.dtype, max_shard_size: str) -> str:
    """Merge the adapter in the folder `adapter` into its base model, and write it to `out`. Returns the base's name."""
    if importlib.util.find_spec("peft") is None:
        raise RequestError("--merge_adapter needs peft, which is not installed. pip install peft.")
    from finetune.models.adapters import open_trained
    from finetune.models.source import Named

    check_model_folder(adapter, "--merge_adapter")
    config = read_json_object(adapter / ADAPTER_CONFIG)
    named = base or config.get("base_model_name_or_path")
    classes = {task.adapter: task.auto for recipe in recipes().values() if (task := recipe.task).adapter}
    kind = classes.get(str(config.get("task_type")))
    if not isinstance(named, str) or not named:
        raise RequestError(
            f"--merge_adapter: {adapter / ADAPTER_CONFIG} does not name a base model. Give --base_model FOLDER."
        )
    if kind is None:
        raise RequestError(f"--merge_adapter: the adapter is for {config.get('task_type')!r}; known are {[*classes]}.")
    found = Named(named, adapter, "merge_adapter: its base")
    try:
        merged = open_trained(found, kind, "Give --base_model FOLDER.").merge_and_unload()
    except RequestError as error:
        said = str(error).replace(f"--model_name_or_path {adapter}", "--merge_adapter: the adapter")
        raise RequestError(f"{said} --base_model names another base.") from error
    merged.to(dtype).save_pretrained(str(out), max_shard_size=max_shard_size)
    return Path(named).name
