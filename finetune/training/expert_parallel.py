"""Expert parallelism under the Trainer: each rank of a group holds some of the experts of every layer, and tokens
travel to them and back (DeepSpeed's AutoEP).

Elsewhere these ranks are data parallel. Each reads different rows; the engine sums an expert's gradient over the ranks
that hold it, those of other weights over all ranks, and divides both by the number of all ranks. So gradients, and
ZeRO-1 and 2's norm, are those of one process. Three things AutoEP (deepspeed 0.19.8) leaves to its caller:

- its settings for Qwen3-MoE and Mixtral, whose adapters fail with transformers 5.23 (module_inject/auto_ep_presets/
  base.py, _install_instance_transformers_output_recorders: `registry.get(key, default)`, but the registry's `get` takes
  no default). `section_for` writes them out over a preset whose adapter leaves transformers' recorders alone;
- the optimizer's groups: ZeRO partitions experts over other ranks, so they need groups of their own, marked as its own
  MoE layers mark them (runtime/zero/stage_1_and_2.py, _configure_moe_settings);
- the saved model: rank 0 has only its own experts, under other names than the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from finetune.models.expert_layers import EXPERT_WEIGHT, joined_experts
from finetune.models.experts import mixture_of
from finetune.training.reshard.expert_shards import as_layers
from finetune.training.reshard.portable import Group, Portable


class ExpertParallel:
    """Expert parallelism of one trainer; groups of `size` ranks hold all experts."""

    def __init__(self, size: int, trainer: Any) -> None:
        self.size, self.trainer = size, trainer
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["expert_parallel"] = section_for(trainer.model.config, size)
        self.names = frozenset(expert_weights(trainer.model))

    def split_groups(self, optimizer: Any) -> None:
        """Give experts groups of their own. Call it before the engine is built; it replaces the weights."""
        experts = {id(p) for name, p in self.trainer.model.named_parameters() if name in self.names}
        for group in list(optimizer.param_groups):
            apart = [p for p in group["params"] if id(p) in experts]
            if apart and "moe" not in group:  # the Trainer asks for its optimizer more than once
                group["params"] = [p for p in group["params"] if id(p) not in experts]
                optimizer.add_param_group({**group, "params": apart, "name": f"ep_size_{self.size}", "moe": True})

    def split_names(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """The names in an optimizer's groups after `split_groups`."""
        rest = [Group(tuple(n for n in one.names if n not in self.names), one.settings) for one in groups]
        apart = [Group(tuple(n for n in one.names if n in self.names), one.settings) for one in groups]
        return (*rest, *(one for one in apart if one.names))

    def whole(self, weights: dict[str, Any]) -> dict[str, Any]:
        """`weights` of the engine's model with the experts of all ranks, under the model's own names. Every rank must
        call it; only those that save get all of them."""
        layer = next(layers_of(self.trainer.accelerator.unwrap_model(self.trainer.model)))[1]

        def gathered(own: torch.Tensor) -> torch.Tensor:
            own = own.to(self.trainer.args.device).contiguous()  # NCCL needs it there; accelerate copies it to the CPU
            parts = [torch.empty_like(own) for _ in range(self.size)]
            distributed.all_gather(parts, own, group=layer.ep_group)
            return torch.cat(parts).cpu() if self.trainer.args.should_save else own

        kept = {name: gathered(one) if EXPERT_WEIGHT.search(name) else one for name, one in weights.items()}
        return joined_experts(kept) if self.trainer.args.should_save else kept

    def as_here(self, portable: Portable) -> Portable:
        """A checkpoint's weights by the names in this rank's engine, with its own experts only."""
        layers, place = as_layers(portable), self.trainer.args.process_index % self.size

        def read(name: str, key: str) -> torch.Tensor:
            whole = layers.read(name, key)
            return whole.chunk(self.size)[place] if EXPERT_WEIGHT.search(name) else whole

        return replace(layers, read=read)


def section_for(config: Any, size: int) -> dict[str, Any]:
    """AutoEP's section of a DeepSpeed config for a model's experts, `size` ranks a group."""
    config = config.get_text_config()
    attribute = "num_experts" if getattr(config, "num_experts", None) else "num_local_experts"
    return {
        "enabled": True,
        "autoep_size": size,
        "preset_model": "deepseek_v3",  # the names of weights are those of any mixture in transformers 5
        "num_experts_attr": attribute,
        "has_shared_experts": False,
        "score_func": "softmax",
        "route_norm": bool(getattr(config, "norm_topk_prob", True)),
        "routed_scaling_factor": 1.0,
    }


def expert_weights(model: Any) -> Iterator[str]:
    """The names of the weights that hold experts, before the engine has replaced them."""
    mixture = mixture_of(model)
    for place, module in (mixture.modules if mixture else {}).items():
        yield from (f"{place}.{name}" for name, _ in module.named_parameters(recurse=False))


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers that AutoEP has put into `model`, by name."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer))


def whole_shapes(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights`, tensors on the device "meta" by the engine's names, as `ExpertParallel.whole` returns them."""
    layers = dict(layers_of(model)) if any(EXPERT_WEIGHT.search(name) for name in weights) else {}
    for place, layer in layers.items():
        for name in ("w1", "w2", "w3"):
            own = weights[f"{place}.experts.{name}"]
            weights[f"{place}.experts.{name}"] = own.new_empty(layer.num_experts, *own.shape[1:])
    return joined_experts(weights) if layers else weights
