"""How many of a model's parameters multiply each token, for counting FLOPs."""

from __future__ import annotations

from typing import Any

from finetune.models.composite import elements, unread
from finetune.models.experts import mixture_of


def multiplied_parameters(model: Any) -> int:
    """The number of parameters that multiply a token: not the embeddings, unless tied to a head, nor what no text
    reaches, and of the experts of a layer as many as a token gets. Weights that ZeRO-3 has sharded count in full."""
    try:
        embedding = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):  # a model that reads numbers or images
        embedding = None
    head = model.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding else embedding
    aside = {id(p) for p in unread(model.get_base_model() if hasattr(model, "peft_config") else model).values()}
    every = elements(p for p in model.parameters() if p is not looked_up and id(p) not in aside)
    mixture = mixture_of(model)
    if mixture is None:
        return every
    held = elements(p for module in mixture.modules.values() for p in module.parameters(recurse=False))
    return every - held * (mixture.experts - mixture.chosen) // mixture.experts
