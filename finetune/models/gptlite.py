"""GPT-lite: a decoder-only transformer (pre-norm, learned positions, GELU) as a Hugging Face model.

    config = GPTLiteConfig(num_hidden_layers=6, hidden_size=384, vocab_size=65)
    model = GPTLiteForCausalLM(config)

It saves, loads, generates with a key-value cache, checkpoints activations and takes any `attn_implementation`, like
other transformers models. Importing this module registers it with the Auto classes.
It keeps no causal mask as a buffer: scaled-dot-product and flash attention need none. With `num_experts` it is a
mixture of experts (gptlite_mlp.py, under `@use_experts_implementation`, for which transformers looks in this file).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

# Relative, so that saved folders include it (transformers, dynamic_module_utils.py, custom_object_save).
from .gptlite_mlp import GPTLiteMixture, GPTLiteMLP, GPTLiteRouter, ResidualProjection, draw_mlp


class GPTLiteConfig(PreTrainedConfig):
    """The shape of a GPT-lite. `dropout` acts on embeddings, attention weights and both residual branches."""

    model_type = "gptlite"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]

    vocab_size: int = 65
    num_hidden_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    intermediate_size: int | None = None  # four times hidden_size
    max_position_embeddings: int = 128
    hidden_act: str = "gelu"
    dropout: float | int = 0.0
    bias: bool = True
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    num_experts: int | None = None  # in each block; None: one MLP without a router
    num_experts_per_tok: int = 2
    output_router_logits: bool = False  # whether the routers' loss is added
    router_aux_loss_coef: float = 0.01
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with explicit weights: query, key and value (B, heads, T, head size), mask (B, 1, T, T) or None.

    Returns the output (B, T, heads, head size) and the weights (B, heads, T, T).
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class GPTLiteAttention(nn.Module):
    def __init__(self, config: GPTLiteConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_size = config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.bias)
        self.out = ResidualProjection(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: torch.Tensor, attention_mask: Any, past_key_values: Any, **kwargs: Any) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_size)
        parts = self.qkv(x).chunk(3, dim=-1)  # each (B, T, C)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)  # (B, heads, T, head size)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.dropout if self.training else 0.0
        scaling = self.head_size**-0.5
        mixed, _ = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return self.out(mixed.reshape(*x.shape[:-1], -1))


class GPTLiteBlock(GradientCheckpointingLayer):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTLiteConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, bias=config.bias)
        self.attention = GPTLiteAttention(config, layer_idx)
        self.norm_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, bias=config.bias)
        self.mlp = GPTLiteMixture(config) if config.num_experts else GPTLiteMLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm_1(x), attention_mask, past_key_values, **kwargs))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPTLiteEmbeddings(nn.Module):
    def __init__(self, config: GPTLiteConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, embedded: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.drop(embedded + self.positions(position_ids))


class GPTLitePreTrainedModel(PreTrainedModel):
    config_class = GPTLiteConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["GPTLiteBlock"]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar = {"router_logits": OutputRecorder(GPTLiteRouter)}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _init_weights(self, module: nn.Module) -> None:
        """Normal with `initializer_range`, and as `draw_mlp` says."""
        super()._init_weights(module)
        draw_mlp(module, self.config)


class GPTLiteModel(GPTLitePreTrainedModel):
    """Token ids to hidden states, final norm included."""

    def __init__(self, config: GPTLiteConfig) -> None:
        super().__init__(config)
        self.embeddings = GPTLiteEmbeddings(config)
        self.blocks = nn.ModuleList(GPTLiteBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, bias=config.bias)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.tokens = value

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """`input_ids` (B, T) or `inputs_embeds` (B, T, C) to `last_hidden_state` (B, T, C).

        Without `attention_mask`, `position_ids` (B, T) that restart at 0 within a row mark documents that do not
        attend to each other (transformers, masking_utils.py, find_packed_sequence_indices).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both")
        x = self.embeddings.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        is_alone = attention_mask is None or attention_mask.dim() < 4  # else texts share a row, each with own positions
        if is_alone and past + x.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"{past + x.shape[1]} tokens, but this GPT-lite has {self.config.max_position_embeddings} positions "
                "(max_position_embeddings): give it fewer."
            )
        # Pass on only positions that the caller gave: without any the mask is known to be plain causal, so attention
        # runs its causal kernel without a mask, and without a device synchronization. Before torch 2.13 transformers
        # does make a mask in a compiled graph (5.23, masking_utils.py, _ignore_causal_mask_sdpa).
        given = {"attention_mask": attention_mask, "past_key_values": past_key_values, "position_ids": position_ids}
        is_plain = self.config._attn_implementation == "sdpa" and all(one is None for one in given.values())
        mask = None if is_plain else create_causal_mask(config=self.config, inputs_embeds=x, **given)
        if use_cache and past_key_values is None:
            # After the mask: with a cache, it does not support packed rows.
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device).unsqueeze(0)
        x = self.embeddings(x, position_ids)
        for block in self.blocks:
            x = block(x, mask, past_key_values=past_key_values, position_ids=position_ids, **kwargs)
        return MoeModelOutputWithPast(self.norm(x), past_key_values if use_cache else None)


class GPTLiteForCausalLM(GPTLitePreTrainedModel, GenerationMixin):
    """GPT-lite with its head. The loss is the mean over target tokens, or with `num_items_in_batch` their sum divided
    by it, so that micro-batches of uneven size add up correctly."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "transformer.embeddings.tokens.weight"}

    def __init__(self, config: GPTLiteConfig) -> None:
        super().__init__(config)
        self.transformer = GPTLiteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """`labels` (B, T) are the input ids, with -100 at positions to ignore; they are shifted here. Returns `logits`
        (B, T, vocabulary), or only those of the last `logits_to_keep` positions."""
        config = self.config
        routed = config.output_router_logits if output_router_logits is None else output_router_logits
        output = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=routed,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept, :])
        loss = routers_loss = None
        if labels is not None:
            size = config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=size, num_items_in_batch=num_items_in_batch, **kwargs)
        if routed and config.num_experts:
            chosen = config.num_experts_per_tok
            routers_loss = load_balancing_loss_func(output.router_logits, config.num_experts, chosen, attention_mask)
            loss = None if loss is None else loss + self.router_aux_loss_coef * routers_loss
        return MoeCausalLMOutputWithPast(
            loss, routers_loss, logits, output.past_key_values, router_logits=output.router_logits
        )


class GPTLiteForSequenceClassification(GenericForSequenceClassification, GPTLitePreTrainedModel):
    """GPT-lite with a score for each label, computed from the last token that is not padding."""

    base_model_prefix = "transformer"

    def __init__(self, config: GPTLiteConfig) -> None:
        # The generic class builds its base with `from_config`, which ZeRO-3 shards before weights are initialized.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.transformer = GPTLiteModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


AutoConfig.register(GPTLiteConfig.model_type, GPTLiteConfig, exist_ok=True)
AutoModel.register(GPTLiteConfig, GPTLiteModel, exist_ok=True)
AutoModelForCausalLM.register(GPTLiteConfig, GPTLiteForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(GPTLiteConfig, GPTLiteForSequenceClassification, exist_ok=True)
# A saved folder includes this file, so it opens with `trust_remote_code=True` where the toolkit is not installed.
GPTLiteConfig.register_for_auto_class()
GPTLiteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
GPTLiteForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
