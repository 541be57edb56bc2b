"""Well-known models by name: what a plan needs of their config.json, kept in models.json beside this file.

    model_of(find_model_config("meta-llama/Meta-Llama-3-8B"))

An entry there has `config`, in Hugging Face's own keys, where a shape hangs on them or they differ from the class's
defaults; its `source`; the published `parameters`; in `count` whether that number is "exact" or rounded ("within 1%"),
and in `seen` where it was found; and `hub`, the model's id there, which the toolkit's own lack. GPT-lites are not in
the file: their shapes stand where recipes take them from.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.sizes import GPTLITE_SIZES

TABLE = Path(__file__).resolve().parent / "models.json"
MOST_HINTS = 4
GPTLITE = "gptlite-"  # begins the names of those from scratch, of which finetune.run.sizes says the shape
VOCABULARIES = {"small": 50_304}  # as recipes/configs/gpt2_124m.yaml trains it
CHARACTERS = 65  # of Tiny Shakespeare, which the study of GPT-lite was trained on


def find_model_config(name: str) -> dict[str, Any]:
    """The config by name or hub id, in any case: "gpt2", "openai-community/gpt2". It is the caller's own copy.
    Raises RequestError with the names that are near."""
    spellings = _spellings()
    if name.lower() in spellings:
        return copy.deepcopy(_table()[spellings[name.lower()]]["config"])
    plain = name.lower().rpartition("/")[2]
    near = [spelling for spelling in spellings if plain and (plain in spelling or spelling in plain)]
    near += difflib.get_close_matches(plain, spellings, MOST_HINTS)
    found = list(dict.fromkeys(spellings[spelling] for spelling in near))[:MOST_HINTS]
    hint = f"Did you mean {' or '.join(found)}?" if found else f"Those known are {', '.join(model_names())}."
    raise RequestError(
        f"{name}: no model is known by this name. {hint} Any other: give its folder or its config.json, by path."
    )


def model_names() -> list[str]:
    """Family by family, small to large."""
    return list(_table())


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    found = dict(json.loads(TABLE.read_text(encoding="utf-8")))
    for size, shape in GPTLITE_SIZES.items():
        found[f"{GPTLITE}{size}"] = {"config": gptlite_config(shape, VOCABULARIES.get(size, CHARACTERS))}
    return found


def gptlite_config(shape: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Of one from scratch: `shape` is what `finetune.run.sizes` says of it; the vocabulary is the tokenizer's."""
    return {"model_type": "gptlite", "architectures": ["GPTLiteForCausalLM"], "vocab_size": vocab_size, **shape}


@functools.cache
def _spellings() -> dict[str, str]:
    """Names by what they may be written as: Llama-2-7b is also Llama-2-7b-hf, either with or without meta-llama/."""
    found = {}
    for name, entry in _table().items():
        organisation, _, plain = entry.get("hub", name).rpartition("/")
        for spelling in (name, plain):
            found[spelling.lower()] = name
            if organisation:
                found[f"{organisation}/{spelling}".lower()] = name
    return found
