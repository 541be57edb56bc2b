"""The models to benchmark, the study's and some of the toolkit's own, by name, at any scale. Never imports torch.

find_model("wide", scale=0.125, changes={"layers": 4}).config     # {"width": 1024, "layers": 4, ...}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from finetune.errors import RequestError, or_meant
from finetune.plan.named import find_model_config
from finetune.run.sizes import ALEXNET_SIZES

HEAD_SIZE = 64  # of the transformers: narrower ones have fewer heads
CLASSES = {"num_labels": 10}
STILL = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}  # so that all layouts have the same loss
# The study's MLPs and GPT-lite (brunomaga.github.io/GPT-lite-DeepSpeed), and one of each recipe. `sequence_tokens` and
# `image_size` describe the samples, the rest is a Hugging Face config.
PRESETS: dict[str, dict[str, Any]] = {
    "wide": {**find_model_config("mlp-wide"), "architectures": ["MLPForClassification"], **CLASSES},
    "deep": {**find_model_config("mlp-deep"), "architectures": ["MLPForClassification"], **CLASSES},
    "gptlite": {**find_model_config("gptlite-post"), "sequence_tokens": 2048},
    "distilbert": {
        **find_model_config("distilbert-base-uncased"),
        "architectures": ["DistilBertForSequenceClassification"],
        **STILL,
        "num_labels": 2,
        "sequence_tokens": 256,
    },
    "resnet": {**find_model_config("resnet-18"), "image_size": 224},
    "alexnet": {
        **ALEXNET_SIZES["original"],
        "model_type": "alexnet",
        "architectures": ["AlexNetForImageClassification"],
        "num_channels": 3,
        "hidden_sizes": [64, 192, 384, 256, 256],
        "classifier_size": 4096,
        "dropout": 0.0,
        "num_labels": 1000,
    },
}
# The sizes that a scale shrinks, and what each remains a multiple of.
SCALED: dict[str, dict[str, int]] = {
    "wide": {"width": 64},
    "deep": {"layers": 1},
    "gptlite": {"num_hidden_layers": 1, "hidden_size": HEAD_SIZE, "sequence_tokens": 64},
    "distilbert": {"n_layers": 1, "dim": HEAD_SIZE, "hidden_dim": 4 * HEAD_SIZE, "sequence_tokens": 32},
    "resnet": {"embedding_size": 8, "hidden_sizes": 8, "image_size": 32},
    "alexnet": {"hidden_sizes": 8, "classifier_size": HEAD_SIZE, "image_size": 64},
}
HEADS = {"num_attention_heads": "hidden_size", "n_heads": "dim"}  # and the width that they divide
IN_STAGES = ("wide", "deep", "gptlite", "alexnet")  # lists of layers, which can run as a pipeline
TEXT = ("gptlite", "distilbert")


@dataclass(frozen=True)
class BenchModel:
    """`config` is Hugging Face's, with `model_type` and `architectures`; `sequence_tokens` and `image_size` describe
    one sample, and are 0 if they do not apply."""

    name: str
    config: dict[str, Any]
    sequence_tokens: int = 0
    image_size: int = 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def find_model(name: str, scale: float = 1.0, changes: Mapping[str, Any] | None = None) -> BenchModel:
    """A model by name, made smaller (or larger) by `scale`, and then with `changes`, which are not scaled. Raises
    RequestError for an invalid name, key or value."""
    if name not in PRESETS:
        raise RequestError(f"{name!r} is not a model of the benchmark.{nearest(name, PRESETS)}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 16:
        raise RequestError(f"scale is {scale!r}, but it must be a number above 0, and at most 16.")
    values, changes = dict(PRESETS[name]), dict(changes or {})
    for key, value in changes.items():
        if key not in values or key in ("model_type", "architectures"):
            raise RequestError(f"{name}: {key!r} is not a size that can be changed.{nearest(key, values)}")
        if type(value) is not type(values[key]) and not (isinstance(values[key], float) and isinstance(value, int)):
            raise RequestError(f"{name}: {key} is {value!r}, but it must be like {values[key]!r}.")
        if any(isinstance(one, int | float) and one < 0 for one in (value if isinstance(value, list) else [value])):
            raise RequestError(f"{name}: {key} is {value!r}, but it must not be below 0.")
    for key, multiple in SCALED[name].items():
        values[key] = _scaled(values[key], scale, multiple)
    values |= changes
    for heads, width in HEADS.items():
        if heads in values and heads not in changes:
            values[heads] = max(1, values[width] // HEAD_SIZE)
        if heads in values and values[width] % max(1, values[heads]):
            raise RequestError(
                f"{name}: {width} is {values[width]}, but it must be a multiple of {heads}, {values[heads]}."
            )
    tokens, pixels = values.pop("sequence_tokens", 0), values.get("image_size", 0)
    if "max_position_embeddings" in values and (name == "gptlite" or tokens > values["max_position_embeddings"]):
        values["max_position_embeddings"] = tokens
    if name == "resnet":
        values.pop("image_size")  # not part of its config
    return BenchModel(name, values, tokens, pixels)


def _scaled(value: Any, scale: float, multiple: int) -> Any:
    if isinstance(value, list):
        return [_scaled(one, scale, multiple) for one in value]
    return max(multiple, round(value * scale / multiple) * multiple)


def nearest(word: str, known: Any) -> str:
    """The end of an error: the closest match, or all known names."""
    return or_meant(str(word), map(str, known), f" The known ones are {', '.join(map(str, known))}.")
