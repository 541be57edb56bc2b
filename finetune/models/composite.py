"""Models of several parts, such as a language model with a tower that reads pictures: which class opens them, and what
of them no text reaches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import transformers

from finetune.errors import RequestError

# A class that also opens language models: without pictures, a LLaVA is one.
ALSO = {"AutoModelForCausalLM": "AutoModelForImageTextToText"}


def class_for(auto: str, config: Any) -> Any:
    """transformers' class `auto`, or the one that opens such models in its place. Raises RequestError if transformers
    has none for this architecture."""
    for name in (auto, ALSO.get(auto, auto)):
        kind = getattr(transformers, name)
        if name in (getattr(config, "auto_map", None) or {}):
            return kind
        if type(config) in kind._model_mapping and (name == auto or _reads_text(kind._model_mapping[type(config)])):
            return kind
    raise RequestError(
        f"its config.json is that of a {config.model_type}, for which transformers {transformers.__version__} has no "
        f"{auto}. Give a model that has one."
    )


def _reads_text(model: Any) -> bool:
    """Whether it also takes samples without pictures, which a BLIP-2 does not."""
    pixels = inspect.signature(model.forward).parameters.get("pixel_values")
    return pixels is None or pixels.default is not inspect.Parameter.empty


def unread(model: Any) -> dict[str, Any]:
    """The parameters of a text model that no text reaches, by name: its towers for pictures and sound, and what joins
    them to the language model."""
    config, first = model.config, model.main_input_name
    if config.get_text_config() is config or getattr(config, "is_encoder_decoder", False) or first != "input_ids":
        return {}
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    read = {id(one) for part in parts if part is not None for one in part.parameters()}
    inside = {id(one) for one in model.base_model.parameters()}
    return {name: one for name, one in model.named_parameters() if id(one) in inside - read}


def freeze_unread(model: Any) -> Any:
    """`model`, with what no text reaches frozen: it gets no gradient, and weight decay under ZeRO would shrink it."""
    for one in unread(model).values():
        one.requires_grad_(False)
    return model


def describe_frozen(model: Any) -> list[str]:
    """A line about what no text reaches and `freeze_unread` has frozen; none if there is nothing, or if it is a detail,
    because adapters freeze the rest too."""
    frozen = [] if hasattr(model, "peft_config") else [p for p in unread(model).values() if not p.requires_grad]
    count = elements(frozen)
    return [f"{count:,} parameters that no text reaches (such as a vision tower's) stay frozen"] if count else []


def elements(parameters: Iterable[Any]) -> int:
    """Their elements; weights that ZeRO-3 has sharded count in full."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
