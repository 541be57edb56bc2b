"""The reference model of preference training: the policy before training."""

from __future__ import annotations

from finetune.errors import RequestError

OF_REFERENCE = ("dpo", "ipo", "kto")  # losses that compare the policy with its initial state


def form_of_reference(loss: str, asked: str, has_adapter: bool, goes_on: bool) -> str:
    """ "none", "adapter" (the model without it), "cached" or "online". `goes_on`: an existing adapter is trained
    further. Raises RequestError."""
    if loss not in OF_REFERENCE:
        return "none"
    if has_adapter and asked == "online":
        raise RequestError("--reference online: an adapter's reference needs no second model. Drop it.")
    if has_adapter and not goes_on:
        return "cached" if asked == "cached" else "adapter"
    return "online" if asked == "online" else "cached"
