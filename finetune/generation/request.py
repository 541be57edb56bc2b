"""Checks the requests of `finetune generate` and `finetune chat` before anything heavy is imported."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import NothingToDoError, RequestError, listed
from finetune.generation.answers import Answers
from finetune.generation.flags import check_numbers
from finetune.generation.prompts import read_prompts
from finetune.run.files import ADAPTER_CONFIG
from finetune.run.launch import Launch
from finetune.safe_read import read_bytes, read_json_object
from finetune.safe_read.folders import JSON_OBJECTS, MOST_TEMPLATE_BYTES

# Flags that determine the answers: if one changes, existing answers cannot be continued. Batch size, ranks and
# DeepSpeed are not among them: they only change rounding.
DECIDING = (
    *("prompt_column", "max_new_tokens", "temperature", "top_p", "seed", "stop", "dtype", "chat_template", "reasoning"),
    "truncate_prompts",
)
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # endings of classes with a language-model head
CONFIG = "config.json"
ENDS_BYTES = 2**20  # of each file are hashed at its beginning, and as many at its end
VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt")


def answer_file(asked: argparse.Namespace, launch: Launch) -> None:
    """Run `finetune generate`, on every rank. Most mistakes are found before torch is imported. Only the first rank
    reads --output, since other hosts may not have it. Raises NothingToDoError if all answers are there."""
    check_numbers(asked)
    check_model(asked.model)
    prompts = read_prompts(asked.prompts, asked.prompt_column, asked.reasoning)
    answers = None
    if launch.speaks:
        if Path(asked.output).expanduser().resolve() == Path(asked.prompts).expanduser().resolve():
            raise RequestError(f"--output {asked.output}: is the file with the prompts. Name another.")
        answers = Answers(asked.output, identity_of(asked, prompts), len(prompts), asked.overwrite)
        if answers.is_done and launch.world_size == 1:
            raise NothingToDoError(answers.all_there)
    from finetune.generation.answering import answer_all

    answer_all(asked, prompts, answers, launch)


def check_model(name: str) -> None:
    """Raises RequestError if a folder evidently holds no model that generates text. A hub id is not checked yet."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise RequestError(f"{name}: there is no such folder. Give the folder of a run or a model, or a hub id.")
        return
    if (folder / ADAPTER_CONFIG).is_file():
        adapter = read_json_object(folder / ADAPTER_CONFIG, inside=folder)
        if (task := adapter.get("task_type")) not in (None, "CAUSAL_LM"):
            raise RequestError(f"{name}: is an adapter for {task}, not for text. Give one of a causal language model.")
        return
    if not (folder / CONFIG).is_file():
        checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
        there = f"it holds {listed(checkpoints)}. Give one of them" if checkpoints else "give a model's folder"
        raise RequestError(f"{name}: the folder has no {CONFIG}; {there}.")
    config = read_json_object(folder / CONFIG, inside=folder)
    kinds = config.get("architectures") or []
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    if (kind and not kind.endswith(WRITERS)) or config.get("is_encoder_decoder"):
        raise RequestError(
            f"{name}: is a {kind or 'model with an encoder'}, but only a causal language model continues a text. Give "
            "the folder of one."
        )


def identity_of(asked: argparse.Namespace, prompts: Any) -> dict[str, Any]:
    """Everything that determines the answers, by name, so that a difference can be named; without local paths."""
    settings = {name: getattr(asked, name) for name in DECIDING}
    if asked.chat_template and (template := Path(asked.chat_template).expanduser()).is_file():
        content = read_bytes(template, MOST_TEMPLATE_BYTES, name=f"--chat_template {asked.chat_template}")
        settings["chat_template"] = _digest([content])
    said = (repr([prompt.content, prompt.tools, prompt.id]).encode() for prompt in prompts)
    return {"model": _digest(_parts(asked.model)), "prompts": _digest(said), **settings}


def _parts(model: str, is_base: bool = False) -> Iterator[bytes]:
    """The content of a folder that determines its model's output; for an adapter, its base's, too, but no further."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        yield model.encode()
        return
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.name in (*JSON_OBJECTS, *VOCABULARIES) or path.suffix in (".safetensors", ".jinja", ".model", ".py"):
            size = path.stat().st_size
            yield f"{path.name} {size}".encode()
            with path.open("rb") as file:
                yield file.read(ENDS_BYTES)
                file.seek(max(0, size - ENDS_BYTES))
                yield file.read(ENDS_BYTES)
    if (folder / ADAPTER_CONFIG).is_file() and not is_base:
        base = read_json_object(folder / ADAPTER_CONFIG, inside=folder).get("base_model_name_or_path")
        yield from _parts(base, is_base=True) if isinstance(base, str) and base else ()


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]
