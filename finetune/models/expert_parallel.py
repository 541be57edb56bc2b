"""Can DeepSpeed's AutoEP replace the experts of this model? A small copy is tried, since layers that it understands
differently do not fail."""

from __future__ import annotations

from typing import Any

import torch

from finetune.errors import RequestError
from finetune.models.expert_layers import joined_experts
from finetune.models.experts import ALL_SPARSE, PROBE_TOKENS
from finetune.models.probes import small_copy, tried
from finetune.run.flags.expert_parallel import check_experts


def check_expert_parallel(model: Any, size: int, section: dict[str, Any], ranks: int = 1) -> None:
    """Raises RequestError if `size` of the `ranks` would not compute what one rank computes; `section` are AutoEP's
    settings."""
    check_experts(model.config.to_dict().get, size, ranks)
    if reason := tried(model, refusal, section, failed="could not be tried with DeepSpeed's AutoEP"):
        raise RequestError(f"--expert_parallel_size {size}: {reason}. Drop it; ZeRO-3 shards experts like any weight.")


def refusal(model: Any, section: dict[str, Any]) -> str | None:
    """Why AutoEP does not support `model`; None if it does. In a small copy all experts are on one rank, so nothing is
    exchanged: its layers must have the model's weights, and compute the same."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    name = type(model).__name__
    changes = {key: value for key, value in ALL_SPARSE.items() if hasattr(model.config, key)}
    twin = small_copy(model, PROBE_TOKENS, changes)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for weight in twin.parameters():
            if weight.dim() > 1:  # large enough that experts matter to the logits
                weight.normal_(std=weight.shape[-1] ** -0.5)
        weights, logits = {key: one.clone() for key, one in twin.state_dict().items()}, _logits(twin)
        auto = AutoEP(twin, parse_autoep_config({**section, "autoep_size": 1, "use_grouped_mm": False}))
        for spec in auto.ep_parser():
            auto.replace_moe_layer(spec, 1, 0)
        replaced = joined_experts(twin.state_dict())
        if replaced.keys() != weights.keys() or any(not torch.equal(replaced[key], weights[key]) for key in weights):
            return f"DeepSpeed's AutoEP does not keep all weights of the experts of {name}"
        same = torch.allclose(_logits(twin), logits, rtol=1e-4, atol=1e-4)
    return None if same else f"DeepSpeed's AutoEP computes something else than {name}"


def _logits(twin: Any) -> torch.Tensor:
    logits: torch.Tensor = twin(input_ids=torch.arange(PROBE_TOKENS).reshape(2, -1), output_router_logits=False).logits
    return logits
