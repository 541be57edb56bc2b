"""Well-known models by name: what a plan needs of their config.json, kept in models.json beside this file.

    model_of(find_model("unsloth/Qwen3-4B-Base-bnb-4bit").config)

An entry there has `config`, in Hugging Face's own keys, where a shape hangs on them or they differ from the class's
defaults, and from those of the entry that it is `like`; its `source`; the published `parameters`; in `count` whether
that number is "exact" or rounded ("within 1%"), and in `seen` where it was found; `hub`, the model's id there, which
the toolkit's own lack; `also`, other names of it; and what a plan `says` of it. GPT-lites are not in the file: their
shapes stand where recipes take them from.

A name that is none of these is taken apart into words. Its owner, and the words below that say how weights were trained
or kept and when, make no other shape; all others do, a size and a version above all.
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
from finetune.run.sizes import GPTLITE_SIZES

TABLE = Path(__file__).resolve().parent / "models.json"
MOST_HINTS = 4
GPTLITE = "gptlite-"  # begins the names of those from scratch, of which finetune.run.sizes says the shape
VOCABULARIES = {"small": 50_304}  # as recipes/configs/gpt2_124m.yaml trains it
CHARACTERS = 65  # of Tiny Shakespeare, which the study of GPT-lite was trained on
OWNED = re.compile(r"(?:[\w-][\w.-]*/)?([\w-][\w.:-]*)")  # a hub id or a plain name, and no path
JOINED = re.compile(r"([a-z]{3,})(\d+(?:\.\d+)?)")  # "llama3.1", which is "llama-3.1"
KEPT = {"hf", "bf16", "fp16", "bnb", "4bit", "nf4", "unsloth", "dynamic", "meta"}  # how, and by whom
TRAINED = {"base", "pt", "instruct", "it", "chat", "thinking", "reasoning"}
DATE = re.compile(r"\d{4}|\d{8}")
NOT_TRAINED = {"gguf", "gptq", "awq", "fp8", "mlx", "exl2", "onnx", "int4", "int8", "8bit", "w4a16", "w8a8", "nvfp4"}


@dataclass(frozen=True)
class Named:
    """A model that is known. `notes`: what to say of a plan of it. `is_packed`: by its name its weights are kept in 4
    bits, of which the config says nothing."""

    name: str
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    is_packed: bool = False


def find_model(given: str) -> Named:
    """By name or hub id, in any case: "gpt2", "openai-community/gpt2", "Qwen/Qwen3-4B-Base". The config is the caller's
    own copy. Raises RequestError with the names that are near, or where such weights are not trained."""
    if name := _spellings().get(given.lower()):
        return _known(name)
    owned = OWNED.fullmatch(given)
    words = _words(owned[1]) if owned else ()
    name = next((_shapes()[form] for form in _forms(words) if form in _shapes()), None)
    if packed := NOT_TRAINED.intersection(words):
        rest = f": {name}" if name else ""
        raise RequestError(
            f"{given}: weights in {min(packed).upper()} are not trained. Give the model that they were made of{rest}."
        )
    if owned is None or name is None:
        raise RequestError(_unknown(given))
    found = _known(name)
    return replace(found, notes=(f"{owned[1]}: planned as {name}", *found.notes), is_packed="4bit" in words)


def find_model_config(given: str) -> dict[str, Any]:
    return find_model(given).config


def model_names() -> list[str]:
    """Family by family, small to large."""
    return list(_table())


def gptlite_config(shape: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Of one from scratch: `shape` is what `finetune.run.sizes` says of it; the vocabulary is the tokenizer's."""
    return {"model_type": "gptlite", "architectures": ["GPTLiteForCausalLM"], "vocab_size": vocab_size, **shape}


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    found = dict(json.loads(TABLE.read_text(encoding="utf-8")))
    for size, shape in GPTLITE_SIZES.items():
        found[f"{GPTLITE}{size}"] = {"config": gptlite_config(shape, VOCABULARIES.get(size, CHARACTERS))}
    return found


def _known(name: str) -> Named:
    entry = _table()[name]
    base = _known(entry["like"]) if "like" in entry else Named(name, {})
    says = (entry["says"],) if "says" in entry else base.notes
    return Named(name, {**base.config, **copy.deepcopy(entry["config"])}, says)


@functools.cache
def _spellings() -> dict[str, str]:
    """Names by what they may be written as: Llama-2-7b is also Llama-2-7b-hf, either with or without meta-llama/."""
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
    """From the name as it is to what is left of it. A date goes last: models of another have other positions."""
    whole = _without(words, KEPT)
    plain = _without(whole, TRAINED | NOT_TRAINED)
    dateless = tuple(word for word in plain if not DATE.fullmatch(word))
    return words, whole, _without(whole, NOT_TRAINED), plain, dateless


def _without(words: tuple[str, ...], these: set[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in these)


def _unknown(given: str) -> str:
    spellings, plain = _spellings(), "-".join(_forms(_words(given.rpartition("/")[2]))[-1])
    near = [spelling for spelling in spellings if plain and (plain in spelling or spelling in plain)]
    near += difflib.get_close_matches(plain, spellings, MOST_HINTS)
    found = list(dict.fromkeys(spellings[spelling] for spelling in near))[:MOST_HINTS]
    hint = f"Did you mean {' or '.join(found)}?" if found else f"Those known are {', '.join(model_names())}."
    return f"{given}: no model is known by this name. {hint} Any other: give its folder or its config.json, by path."
