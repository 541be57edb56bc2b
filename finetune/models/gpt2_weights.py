"""GPT-2's weights in a GPT-lite, which has the same parts under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from finetune.errors import RequestError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM


def from_gpt2(config: Any, weights: Mapping[str, torch.Tensor]) -> GPTLiteForCausalLM:
    """A GPT-lite that computes what a GPT-2 does, from its config and the state dict of a `GPT2LMHeadModel`.

    GPT-2 keeps the weights of its projections as (in, out); a Linear has (out, in). Raises RequestError for a GPT-2
    that scales its attention by its own switches.
    """
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise RequestError("this GPT-2 scales its attention otherwise than a GPT-lite does. Train it as it is.")
    shape = {name: getattr(config, name) for name in ("vocab_size", "num_hidden_layers", "hidden_size")}
    model = GPTLiteForCausalLM(
        GPTLiteConfig(
            **shape,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            intermediate_size=config.n_inner,
            hidden_act=config.activation_function,
            layer_norm_epsilon=config.layer_norm_epsilon,
            dropout=config.resid_pdrop,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
        )
    )
    names = {"wte": "embeddings.tokens", "wpe": "embeddings.positions", "ln_f": "norm", "h": "blocks"}
    names |= {"ln_1": "norm_1", "ln_2": "norm_2", "attn": "attention", "c_attn": "qkv", "c_fc": "up"}
    renamed = {}
    for old, tensor in weights.items():
        parts = old.split(".")
        if parts[-2] == "c_proj":
            parts[-2] = "out" if parts[-3] == "attn" else "down"
        is_projection = old.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        renamed[".".join(names.get(part, part) for part in parts)] = tensor.T if is_projection else tensor
    model.load_state_dict(renamed)
    return model
