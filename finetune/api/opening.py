"""The model and the tokenizer of a run's folder, by what its recipe is for. The folder may be a stranger's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import transformers

from finetune.errors import RequestError, first_line, plain
from finetune.export.adapter import OWN_MODELS
from finetune.models.adapters import TASKS, with_adapter
from finetune.models.source import from_pretrained, named, with_labels
from finetune.run.choose import recipes
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments

AUTO = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "text-generation": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}
FLAG = "--model_name_or_path "  # how errors of finetune.models begin; here the folder is named without a flag


def open_model(folder: Path, recipe: str | None) -> Any:
    """In fp32 and in evaluation mode, with its adapter on its base model. Raises RequestError."""
    try:
        return _opened(folder, _task(folder, recipe)).eval()
    except RequestError as error:
        raise RequestError(str(error).replace(FLAG, "")) from error


def open_processor(folder: Path, recipe: str | None) -> Any:
    """The tokenizer, or the image processor. Raises RequestError."""
    kind = "AutoImageProcessor" if _task(folder, recipe) == "image-classification" else "AutoTokenizer"
    try:
        arguments = ModelArguments(model_name_or_path=str(folder))
        flag = "model_name_or_path"
        return from_pretrained(getattr(transformers, kind), flag, named(str(folder), False).tokenizer, arguments)
    except RequestError as error:
        raise RequestError(str(error).replace(FLAG, "")) from error


def _task(folder: Path, recipe: str | None) -> str:
    known = recipes()
    if recipe not in known:
        raise RequestError(
            f"{folder}: its recipe.yaml names none of {', '.join(known)}, so it is not known which kind of model this "
            "is. Open it with transformers' own Auto classes."
        )
    return known[recipe].task


def _opened(folder: Path, task: str) -> Any:
    found, arguments = named(str(folder), False), ModelArguments(model_name_or_path=str(folder))
    for module in OWN_MODELS:
        importlib.import_module(f"finetune.models.{module}")
    config = with_labels(from_pretrained(transformers.AutoConfig, found.flag, found.base, arguments), found.adapter)
    auto = getattr(transformers, AUTO[task])
    try:
        model = auto.from_pretrained(
            found.base,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=found.adapter is not None,  # a classifier's head is the adapter's
            local_files_only=found.hub_id is None,
        )
    except Exception as error:  # whatever a folder made to break it can raise
        raise RequestError(f"{folder}: the model cannot be opened ({plain(first_line(error, 300))}).") from error
    if found.adapter is None:
        return model
    return with_adapter(model, AdapterArguments(), found.adapter, task if task in TASKS else "text-generation")
