"""Open the model and the tokenizer of a run's folder, according to its recipe's task. The folder may be untrusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from finetune.errors import RequestError
from finetune.models.adapters import open_trained
from finetune.models.source import from_pretrained, named
from finetune.run.choose import recipes
from finetune.run.flags.text import ModelArguments
from finetune.run.task import Task


def open_model(folder: Path, recipe: Mapping[str, Any]) -> Any:
    """The model in fp32 and evaluation mode, with its adapter if it has one; `recipe` is the content of recipe.yaml.
    Raises RequestError."""
    with _without_flag():
        found = named(str(folder), False)
        return open_trained(found, _task(folder, recipe).auto, found.mend)


def open_processor(folder: Path, recipe: Mapping[str, Any]) -> Any:
    """The tokenizer, or the image processor. Raises RequestError."""
    kind = "AutoImageProcessor" if "Image" in _task(folder, recipe).auto else "AutoTokenizer"
    arguments = ModelArguments(model_name_or_path=str(folder))
    with _without_flag():
        found = named(str(folder), False)
        return from_pretrained(getattr(transformers, kind), found.flag, found.tokenizer, arguments)


@contextmanager
def _without_flag() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error).replace("--model_name_or_path ", "")) from error


def _task(folder: Path, recipe: Mapping[str, Any]) -> Task:
    """The recipe's task."""
    known, name = recipes(), recipe.get("recipe")
    if not isinstance(name, str) or name not in known:
        raise RequestError(
            f"{folder}: its recipe.yaml names none of {', '.join(known)}, so the kind of model is unknown. Open it "
            "with transformers' own Auto classes."
        )
    return known[name].task_of(recipe.get)
