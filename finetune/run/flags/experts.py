"""The flags of mixtures of experts, and what their router loss does not go with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE, flag
from finetune.run.flags.groups import is_on
from finetune.run.on_resume import GOES_ON, VALUES

if TYPE_CHECKING:
    from finetune.run.run import Run

# Flags under which the loss is not the model's own, or its layers are not called one by one.
REFUSED = {
    "sequence_parallel_size": "a router's loss needs whole texts",
    "teacher": "the loss is then computed outside the model, without the routers' part",
    "torch_compile": "a compiled model's router loss is untested here",
    "use_liger_kernel": "its forward pass computes the router loss by itself",
}


@dataclass
class ExpertArguments:
    """How the experts of a mixture are kept equally busy, and spread over ranks (docs/moe.md)."""

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


def unsupported(run: Run) -> str | None:
    """Why the routers' loss cannot be computed under the run's flags; None if it can."""
    for name, why in REFUSED.items():
        if name in run.recipe.flags and is_on(run, name):
            return f"{run.said(name)}, but the model has a router loss: {why}."
    return None
