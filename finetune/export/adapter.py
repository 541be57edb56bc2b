"""Merges an adapter into the weights of its base model."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from finetune.errors import RequestError, first_line
from finetune.run.choose import recipes
from finetune.run.files import ADAPTER_CONFIG, LABELS
from finetune.safe_read import read_json_object
from finetune.safe_read.checkpoint_files import refuse_unsafe
from finetune.safe_read.folders import check_model_folder

OWN_MODELS = ("gptlite", "alexnet", "resnet_group_norm")  # registered with transformers when their module is imported


def write_merged(adapter: Path, out: Path, base: str | None, dtype: torch.dtype, max_shard_size: str) -> str:
    """Merge the adapter in the folder `adapter` into its base model, and write it to `out`. Returns the base's name."""
    if importlib.util.find_spec("peft") is None:
        raise RequestError("--merge_adapter needs peft, which is not installed. pip install peft.")
    from peft import PeftModel

    check_model_folder(adapter, "--merge_adapter")
    for path in adapter.glob("adapter_model*.bin"):
        refuse_unsafe(path)
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
    model = _base(named, kind, adapter)
    try:
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except Exception as error:  # as below
        raise RequestError(
            f"--merge_adapter: the adapter does not fit {named} ({first_line(error)}). Give its base with --base_model."
        ) from error
    merged.to(dtype).save_pretrained(str(out), max_shard_size=max_shard_size)
    return Path(named).name


def _base(named: str, kind: str, adapter: Path) -> Any:
    """The base model, with the labels that are stored with a classifier's adapter."""
    import transformers

    from finetune.models.source import with_labels

    folder = Path(named).expanduser()
    if folder.is_dir():
        check_model_folder(folder, f"--merge_adapter: its base {named}")
        model_type = read_json_object(folder / "config.json").get("model_type")
        if model_type in OWN_MODELS:
            importlib.import_module(f"finetune.models.{model_type}")
    chosen: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
    try:
        if (adapter / LABELS).is_file():
            config = with_labels(transformers.AutoConfig.from_pretrained(named), adapter)
            chosen |= {"config": config, "ignore_mismatched_sizes": True}
        return getattr(transformers, kind).from_pretrained(named, **chosen)
    except Exception as error:  # a crafted folder can raise anything
        raise RequestError(
            f"--merge_adapter: the base model {named} cannot be opened ({first_line(error)}). Give --base_model FOLDER."
        ) from error
