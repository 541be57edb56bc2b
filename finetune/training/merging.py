"""What a run does for an adapter at its end: says how to open its folder, and merges it into its base model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.models.adapters import write_merged
from finetune.models.causal import build_causal_lm
from finetune.models.classifier import build_classifier
from finetune.run.files import LABELS, SETTLED
from finetune.run.flags.language import CausalModelArguments
from finetune.run.flags.text import ModelArguments
from finetune.safe_read import read_json_object
from finetune.training.run_folder import add_to_config
from finetune.training.samples import QUESTION
from finetune.training.start import Session

USE_ADAPTER = """import json
from pathlib import Path
from transformers import {auto}, AutoTokenizer, pipeline

folder = Path("path/to/this/folder")  # of the adapter; adapter_config.json names its base model
names = json.loads((folder / "labels.json").read_text())["id2label"]
model = {auto}.from_pretrained(folder, id2label={{int(i): name for i, name in names.items()}})
{name} = pipeline("{task}", model, tokenizer=AutoTokenizer.from_pretrained(folder))
"""


USE_WRITER = """from transformers import pipeline

write = pipeline("text-generation", "path/to/this/folder"{own})
said = write({prompt}, max_new_tokens=100)[0]["generated_text"]
print({said})"""


def use_of_writer(session: Session, is_chat: bool) -> str:
    """Python that opens the folder of a language model and lets it write, or answer."""
    own = ', tokenizer="path/to/this/folder"' if has_adapted(session) else ""  # transformers would take the base's
    if is_chat:
        turns = f'[{{"role": "user", "content": "{QUESTION}"}}]'
        return USE_WRITER.format(own=own, prompt=turns, said='said[-1]["content"]')
    return USE_WRITER.format(own=own, prompt='"The "', said="said")


def has_adapted(session: Session) -> bool:
    return bool(session.run.value("use_peft") and session.training.do_train)


def use_of(session: Session, name: str, whole: str) -> str:
    """Python that opens the folder of a classifier as `name`; returns `whole` unless the run trained an adapter."""
    task = session.run.task
    return USE_ADAPTER.format(auto=task.auto, name=name, task=task.name) if has_adapted(session) else whole


def merged(session: Session, source: Any, data: Any, build: Callable[[], Any] | None = None) -> list[str]:
    """With --merge_adapter, write the whole model to merged/ and return the line that says so. `build` makes the base
    model of recipes that train neither a text classifier nor a causal language model."""
    if not session.run.value("merge_adapter") or not session.training.do_train:
        return []

    def known() -> Any:
        if CausalModelArguments in session.run.recipe.groups:
            return build_causal_lm(session[CausalModelArguments], source, data.tokenizer, seed=0)  # loads weights
        return build_classifier(session[ModelArguments], source, data.labels, data.tokenizer)

    place, labels = write_merged(session.folder, build or known, data.tokenizer), session.folder / LABELS
    for name, value in read_json_object(labels).items() if labels.is_file() else ():
        if name in SETTLED:
            add_to_config(place, name, value)
    return [f"merged: {place}"]
