"""The flags of mixtures of experts, and what their router loss does not go with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import RequestError
from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE, flag
from finetune.run.flags.groups import is_on, shape_shown
from finetune.run.on_resume import GOES_ON, VALUES

if TYPE_CHECKING:
    from finetune.run.run import Run

# Flags under which the loss is not the model's own, or its layers are not called one by one.
REFUSED = {
    "teacher": "the loss is then computed outside the model, without the routers' part",
    "torch_compile": "a compiled model's router loss is untested here",
    "use_liger_kernel": "its forward pass computes the router loss by itself",
}


@dataclass
class ExpertArguments:
    """How the experts of a mixture are kept equally busy, and divided among ranks (docs/moe.md)."""

    router_aux_loss_coef: float | None = flag(
        None,
        "weight of the loss that keeps experts equally busy; 0: none; default: as the model's config says",
        VALUES,
        range=NOT_NEGATIVE,
    )
    expert_parallel_size: int = flag(
        1,
        "ranks that hold the experts of each layer together (DeepSpeed's AutoEP); the number of ranks must be a "
        "multiple of it",
        GOES_ON,
        range=AT_LEAST_ONE,
    )


def has_router_loss(run: Run, shape: Mapping[str, Any]) -> bool:
    """Whether the run's flag, or else the model's config, which is `shape`, turns the routers' loss on."""
    asked = run.value("router_aux_loss_coef")
    is_on_by_itself = shape.get("output_router_logits") and shape.get("router_aux_loss_coef", True)
    return "router_aux_loss_coef" in run.recipe.flags and bool(is_on_by_itself if asked is None else asked)


def look_at_router(run: Run) -> None:
    """Raises RequestError if the run's flags, with a config.json or the shape of a model from scratch, show that there
    is no routers' loss, or that it cannot be computed."""
    asked, is_pipeline = run.value("router_aux_loss_coef"), run.stages is not None
    fault = unsupported(run)
    does_ask = asked or fault or is_pipeline
    if "router_aux_loss_coef" not in run.recipe.flags or not run.value("do_train") or not does_ask:
        return
    shape = shape_shown(run) or {}
    fault = fault or (dropout_fault(shape.get("dropout")) if is_pipeline else None)
    if asked and shape and not any(one for name, one in shape.items() if "expert" in name or name == "text_config"):
        raise RequestError(f"{run.said('router_aux_loss_coef')}, but the model has no experts. Drop it.")
    if fault and has_router_loss(run, shape):
        raise RequestError(fault)


def dropout_fault(share: float | None) -> str | None:
    """Why a pipeline cannot compute the routers' loss of a model with this dropout; None if it can."""
    if not share:
        return None
    return (
        f"the model has a router loss, and dropout {share:g}: a pipeline counts the load of experts without dropout. "
        "Give --router_aux_loss_coef 0, or a model without dropout."
    )


def unsupported(run: Run) -> str | None:
    """Why the routers' loss cannot be computed under the run's flags, and what to do; None if it can."""
    from finetune.run.facts import checkpointing_kwargs

    mend = "Drop it, or give --router_aux_loss_coef 0."
    for name, why in REFUSED.items():
        if name in run.recipe.flags and is_on(run, name):
            return f"{run.said(name)}, but the model has a router loss: {why}. {mend}"
    if (checkpointing_kwargs(run) or {}).get("use_reentrant"):
        return f"use_reentrant: reentrant checkpointing gives the routers' loss no gradient. {mend}"
    return None
