"""How many of a model's parameters multiply each token, for counting FLOPs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from finetune.models.experts import mixture_of


def multiplied_parameters(model: Any) -> int:
    """The number of parameters that multiply a token: all but the embeddings, unless tied to a head, and of the experts
    of a layer only as many as a token gets. Weights that ZeRO-3 has sharded count in full."""
    try:
        embedding = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):  # a model that reads numbers or images
        embedding = None
    head = model.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding else embedding
    every = _elements(p for p in model.parameters() if p is not looked_up)
    mixture = mixture_of(model)
    if mixture is None:
        return every
    held = _elements(p for module in mixture.modules.values() for p in module.parameters(recurse=False))
    return every - held * (mixture.experts - mixture.chosen) // mixture.experts


def _elements(parameters: Iterable[Any]) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
