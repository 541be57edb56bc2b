"""The feed-forward part of a GPT-lite block: one MLP, or several of which a router gives each token the best few."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation


class ResidualProjection(nn.Linear):
    """A Linear whose output is added to the residual stream; its initial weights are smaller. It is a class because
    transformers 5.23 calls `_init_weights` only on modules that hold weights themselves, for models from outside the
    library (modeling_utils.py, _initialize_weights)."""


class GPTLiteMLP(nn.Module):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, inner_size(config), bias=config.bias)
        self.act = ACT2FN[config.hidden_act]
        self.down = ResidualProjection(inner_size(config), config.hidden_size, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def inner_size(config: PreTrainedConfig) -> int:
    """The width between the two projections of an MLP."""
    return int(config.intermediate_size or 4 * config.hidden_size)


class GPTLiteRouter(nn.Linear):
    """Tokens (N, C) to the logits of all experts (N, E)."""


@use_experts_implementation(has_gate=False)
class GPTLiteExperts(nn.Module):
    """E MLPs without biases. transformers has faster forward passes for weights laid out so (integrations/moe.py)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.num_experts, inner, outer = config.num_experts, inner_size(config), config.hidden_size
        self.up_proj = nn.Parameter(torch.empty(self.num_experts, inner, outer))
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, outer, inner))

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """`rows` (N, C) through the experts that are `chosen` (N, k), weighted by their `shares` (N, k)."""
        out = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            token, place = torch.where(chosen == expert)
            inner = self.act_fn(nn.functional.linear(rows[token], self.up_proj[expert]))
            part = nn.functional.linear(inner, self.down_proj[expert]) * shares[token, place, None]
            out = out.index_add(0, token, part.to(out.dtype))
        return out


class GPTLiteMixture(nn.Module):
    """What `deepspeed.moe.layer.MoE` computes without a capacity, so that no token is dropped: each token goes to its
    `num_experts_per_tok` likeliest experts, whose probabilities add up to 1; a single expert keeps its own, from which
    the router learns (deepspeed 0.19.8, moe/sharded_moe.py, top1gating and topkgating)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.gate = GPTLiteRouter(config.hidden_size, config.num_experts, bias=False)
        self.experts = GPTLiteExperts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)  # (B, T, C) to (B T, C)
        shares, chosen = self.gate(rows).float().softmax(dim=-1).topk(self.chosen, dim=-1)
        if self.chosen > 1:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        out: torch.Tensor = self.experts(rows, chosen, shares.to(x.dtype))
        return out.view_as(x)


def draw_mlp(module: nn.Module, config: PreTrainedConfig) -> None:
    """Initialize experts, which transformers does not know, and projections onto the residual stream, whose weights are
    scaled by 1 / sqrt(2 x layers), since each layer adds to it twice (GPT-2: Radford et al. 2019, section 2.3)."""
    std = config.initializer_range
    if isinstance(module, GPTLiteExperts):
        init.normal_(module.up_proj, mean=0.0, std=std)
    if isinstance(module, GPTLiteExperts | ResidualProjection):
        weight = module.down_proj if isinstance(module, GPTLiteExperts) else module.weight
        init.normal_(weight, mean=0.0, std=std / math.sqrt(2 * config.num_hidden_layers))
