"""Well-known models by name: the part of their config.json that a plan needs, from models.json beside this file.

    model_of(find_model("unsloth/Qwen3-4B-Base-bnb-4bit").config)

An entry there has `config`, with Hugging Face's own keys where a shape depends on them, or where they differ from the
class's defaults and from the entry that it is `like`; its `source`; the published `parameters`; `count`, whether that
number is "exact" or rounded ("within 1%"), and `seen`, where it was found; `hub`, the model's id there, which the
toolkit's own models lack; `also`, other names; and what a plan `says` about it. GPT-lites are not in the file: their
shapes come from where recipes take them.

Any other name is split into words. Its owner, and the words below that say how and when weights were trained or stored,
do not change the shape; all other words do, above all a size and a version.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.paths import missing_path
from finetune.run.sizes import GPTLITE_SIZES, MOE_TYPE, causal_shape

TABLE = Path(__file__).resolve().parent / "models.json"
MOST_HINTS = 4
GPTLITE = "gptlite-"  # prefix of models from scratch, whose shapes finetune.run.sizes has
VOCABULARIES = {"small": 50_304}  # as in recipes/configs/gpt2_124m.yaml
CHARACTERS = 65  # of Tiny Shakespeare, the data of the GPT-lite study
OWNED = re.compile(r"(?:[\w-][\w.-]*/)?([\w-][\w.:-]*)")  # a hub id or a plain name, not a path
JOINED = re.compile(r"([a-z]{3,})(\d+(?:\.\d+)?)")  # "llama3.1" for "llama-3.1"
KEPT = {"hf", "bf16", "fp16", "bnb", "4bit", "nf4", "unsloth", "dynamic", "meta"}  # how weights are stored, and by whom
TRAINED = {"base", "pt", "instruct", "it", "chat", "thinking", "reasoning"}
DATE = re.compile(r"\d{4}|\d{8}")
NOT_TRAINED = {"gguf", "gptq", "awq", "fp8", "mlx", "exl2", "onnx", "int4", "int8", "8bit", "w4a16", "w8a8", "nvfp4"}


@dataclass(frozen=True)
class Named:
    """A known model. `notes`: to show with a plan of it. `is_packed`: its name says that weights are stored in 4 bits,
    which the config does not."""

    name: str
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    is_packed: bool = False


def find_model(given: str) -> Named:
    """By name or hub id, in any case: "gpt2", "openai-community/gpt2", "Qwen/Qwen3-4B-Base". The config is a copy for
    the caller. Raises RequestError with similar names, or if such weights cannot be trained."""
    if name := _spellings().get(given.lower()):
        return _known(name)
    if fault := missing_path(given):
        raise RequestError(f"{given}: no model is known by this name, and {fault}")
    owned = OWNED.fullmatch(given)
    words = _words(owned[1]) if owned else ()
    name = next((_shapes()[form] for form in _forms(words) if form in _shapes()), None)
    if packed := NOT_TRAINED.intersection(words):
        rest = f": {name}" if name else ""
        raise RequestError(
            f"{given}: weights in {min(packed).upper()} are not trained. Give the model that they were made from{rest}."
        )
    if owned is None or name is None:
        raise RequestError(_unknown(given))
    found = _known(name)
    return replace(found, notes=(f"{owned[1]}: planned as {name}", *found.notes), is_packed="4bit" in words)


def find_model_config(given: str) -> dict[str, Any]:
    return find_model(given).config


def model_names() -> list[str]:
    """By family, from small to large."""
    return list(_table())


def refuse_size(given: str) -> None:
    """Raises RequestError for the name of a --model_size."""
    of_size = [name for name, one in recipes().items() if given in one.flags["model_size"].choices]
    if of_size and not Path(given).exists():
        raise RequestError(f"{given} is a size, not a model: --recipe {of_size[0]} --model_size {given} plans it.")


def scratch_config(shape: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The config of a model from scratch: `shape` from `finetune.run.sizes`, the vocabulary size from the tokenizer."""
    names = {"gptlite": "GPTLiteForCausalLM", MOE_TYPE: "Qwen3MoeForCausalLM"}
    return {"architectures": [names[shape["model_type"]]], "vocab_size": vocab_size, **shape}


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    found = dict(json.loads(TABLE.read_text(encoding="utf-8")))
    for size in GPTLITE_SIZES:
        found[f"{GPTLITE}{size}"] = {
            "config": scratch_config(causal_shape(size, None), VOCABULARIES.get(size, CHARACTERS))
        }
    return found


def _known(name: str) -> Named:
    entry = _table()[name]
    base = _known(entry["like"]) if "like" in entry else Named(name, {})
    says = (entry["says"],) if "says" in entry else base.notes
    return Named(name, {**base.config, **copy.deepcopy(entry["config"])}, says)


@functools.cache
def _spellings() -> dict[str, str]:
    """Names by spelling: Llama-2-7b is also Llama-2-7b-hf, either with or without meta-llama/."""
    found = {}
    for name, entry in _table().items():
        organisation, _, plain = entry.get("hub", name).rpartition("/")
        for spelling in (name, plain, *entry.get("also", ())):
            found[spelling.lower()] = name
            if organisation:
                found[f"{organisation}/{spelling}".lower()] = name
    return found


@functools.cache
def _shapes() -> dict[tuple[str, ...], str]:
    """Names by their words."""
    return {
        form: name
        for spelling, name in _spellings().items()
        if "/" not in spelling
        for form in _forms(_words(spelling))[:2]
    }


def _words(plain: str) -> tuple[str, ...]:
    parts = re.split("[-_:]", plain.lower())
    apart = ((None if part in KEPT | NOT_TRAINED else JOINED.fullmatch(part), part) for part in parts)
    return tuple(word for joined, part in apart for word in (joined.groups() if joined else (part,)))


def _forms(words: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """From the full name to its shortest form. A date goes last: models of another date have other positions."""
    whole = _without(words, KEPT)
    plain = _without(whole, TRAINED | NOT_TRAINED)
    dateless = tuple(word for word in plain if not DATE.fullmatch(word))
    return words, whole, _without(whole, NOT_TRAINED), plain, dateless


def _without(words: tuple[str, ...], these: set[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in these)


def _unknown(given: str) -> str:
    spellings, words = _spellings(), _forms(_words(given.rpartition("/")[2]))[-1]
    plain = "-".join(words)
    near = [spelling for spelling in spellings if plain and {*words} <= {*_words(spelling)}]
    near += [spelling for spelling in spellings if plain and (plain in spelling or spelling in plain)]
    near += difflib.get_close_matches(plain, spellings, MOST_HINTS)
    found = list(dict.fromkeys(spellings[spelling] for spelling in near))[:MOST_HINTS]
    rest = "give the path of its folder or config.json."
    if found:
        return f"{given}: no model is known by this name. Did you mean {' or '.join(found)}? For any other, {rest}"
    return f"{given}: no model is known by this name; {rest} Known models: {', '.join(model_names())}."
