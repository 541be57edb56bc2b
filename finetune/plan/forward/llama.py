"""Llama and what followed it: one decoder, whose parts a `Style` chooses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from finetune.plan.families.decoders import STYLES, Style
from finetune.plan.families.parts import CAUSAL, Sizes
from finetune.plan.forward.attention import (
    FUSED,
    Heads,
    attend,
    bool_mask,
    float_mask,
    kind_of,
    partly_turned,
    rotary,
    rotations,
    split_heads,
)
from finetune.plan.forward.losses import causal_head, label_loss
from finetune.plan.forward.moe import experts
from finetune.plan.forward.parts import Setting, activation, rms_norm, stack
from finetune.plan.values import Value

FULL, WINDOW = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class _Shared:
    """What the model makes once for all layers: masks and rotations by kind of layer."""

    masks: dict[str, Value | None]
    rotations: dict[str, tuple[Value, Value]]

    def of(self, *kinds: str) -> tuple[Value, ...]:
        masks = [mask for kind in kinds if (mask := self.masks[kind]) is not None]
        return (*masks, *(part for kind in kinds for part in self.rotations[kind]))


def llama_like(family: str) -> Callable[[Setting], Value]:
    style = STYLES[family]
    return lambda setting: _decoder(setting, style)


def _decoder(setting: Setting, style: Style) -> Value:
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    hidden, layers = sizes("hidden_size"), sizes("num_hidden_layers")
    kinds = [layer_kind(setting, style, index) for index in range(layers)]
    with tape.segment("embeddings"):
        x = tape.embedding(rows, "model.embed_tokens", hidden)
        if style.is_gemma:
            x = tape.scale(x)
        shared = _shared(setting, style, kinds)

    def key(index: int) -> Hashable:
        return kinds[index], style.is_sparse(sizes, index)

    def block(index: int, x: Value) -> Value:
        return _block(setting, style, index, x, shared, kinds[index])

    last = stack(setting, x, range(layers), lambda i: f"model.layers.{i}", block, key, lambda i: shared.of(kinds[i]))
    with tape.segment("head"):
        normed = rms_norm(tape, last, "model.norm", rows, style.is_gemma)
        tape.hold(x, last, *shared.of(*shared.masks))
        if setting.head != CAUSAL:
            return class_head(setting, normed, hidden)
        tied = "model.embed_tokens.weight" if sizes.is_on("tie_word_embeddings", style.tied) else None
        cap = _caps(sizes, "final_logit_softcapping", style.final_softcap)
        return causal_head(setting, normed, tied, hidden, softcap=cap)


def _caps(sizes: Sizes, name: str, default: float) -> bool:
    return bool(default) if name not in sizes.config else bool(sizes.config[name])


def class_head(setting: Setting, x: Value, hidden: int) -> Value:
    """Scores at every position, of which the last of each row counts (modeling_layers.py,
    GenericForSequenceClassification)."""
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    scores = tape.linear(x, "score", batch.positions, hidden, sizes.labels, bias=False)
    pooled = tape.op("index", (scores,), batch.rows * sizes.labels, bytes_each=scores.bytes_each)
    return label_loss(setting, pooled)


def layer_kind(setting: Setting, style: Style, index: int) -> str:
    sizes = setting.sizes
    types = sizes.config.get("layer_types")
    if style.window is None and sizes.maybe("sliding_window") is None:
        return FULL
    if types:
        return str(types[index])
    if style.windows == "switched":
        used = sizes.is_on("use_sliding_window", False) and index >= sizes("max_window_layers", default=28)
        return WINDOW if used else FULL
    if style.windows == "all":
        return WINDOW
    period = 2 if style.windows == "every second" else sizes("sliding_window_pattern", default=6)
    return WINDOW if (index + 1) % period else FULL


def _shared(setting: Setting, style: Style, kinds: list[str]) -> _Shared:
    """Masks are made where attention is eager, or its window shorter than the text (masking_utils.py,
    _ignore_causal_mask_sdpa)."""
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    window = sizes.maybe("sliding_window") or style.window
    masks: dict[str, Value | None] = {}
    for kind in dict.fromkeys(kinds):
        short = kind == WINDOW and window is not None and batch.tokens >= window
        if tape.numbers.attention == "eager":
            masks[kind] = float_mask(tape, batch.rows, batch.tokens, batch.tokens)
        elif short and tape.numbers.attention == "sdpa":
            masks[kind] = bool_mask(tape, batch.tokens, batch.tokens)
        else:
            masks[kind] = None
    width = int(style.head_width(sizes) * sizes.share("partial_rotary_factor", 1.0))
    made = rotations(tape, batch.tokens, width)
    turns = dict.fromkeys(masks, made)
    if style.two_rotations and len(masks) > 1:
        turns[WINDOW] = rotations(tape, batch.tokens, width)
    return _Shared(masks, turns)


def _heads(setting: Setting, style: Style) -> Heads:
    sizes, batch = setting.sizes, setting.batch
    count = sizes("num_attention_heads")
    return Heads(
        batch.rows,
        batch.tokens,
        count,
        style.head_width(sizes),
        sizes("num_key_value_heads", default=count),
        batch.tokens,
        dropout=sizes.share("attention_dropout"),
        softcap=_caps(sizes, "attn_logit_softcapping", style.attention_softcap),
    )


def _block(setting: Setting, style: Style, index: int, x: Value, shared: _Shared, kind: str) -> Value:
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    name = f"model.layers.{index}"
    dropout = sizes.share("resid_pdrop") if style.joined else 0.0
    normed = rms_norm(tape, x, f"{name}.input_layernorm", rows, style.is_gemma)
    out = _attention(setting, style, f"{name}.self_attn", normed, shared, kind)
    tape.hold(normed)
    if style.closing_norms:
        out = rms_norm(tape, out, f"{name}.post_attention_layernorm", rows, style.is_gemma)
    x = tape.add(x, tape.dropout(out, dropout))
    second = "pre_feedforward_layernorm" if style.closing_norms else "post_attention_layernorm"
    normed = rms_norm(tape, x, f"{name}.{second}", rows, style.is_gemma)
    if style.expert_width and style.is_sparse(sizes, index):
        out = experts(setting, f"{name}.mlp", normed, style.expert_width, style.act)
    else:
        out = _mlp(setting, style, f"{name}.mlp", normed)
    tape.hold(normed)
    if style.closing_norms:
        out = rms_norm(tape, out, f"{name}.post_feedforward_layernorm", rows, style.is_gemma)
    return tape.add(x, tape.dropout(out, dropout))


def _attention(setting: Setting, style: Style, name: str, x: Value, shared: _Shared, layer_kind: str) -> Value:
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    hidden, heads, mask = sizes("hidden_size"), _heads(setting, style), shared.masks[layer_kind]
    kind = kind_of(tape, heads, mask is not None)
    bias, closing_bias = style.bias(sizes)
    if style.joined:
        widths = [heads.query_width, heads.pair_width, heads.pair_width]
        joined = tape.linear(x, f"{name}.qkv_proj", rows, hidden, sum(widths), bias=False)
        parts = [tape.alias(joined, rows * width, "slice") for width in widths]
    else:
        parts = []
        for part, width in (("q", heads.query_width), ("k", heads.pair_width), ("v", heads.pair_width)):
            made = tape.linear(x, f"{name}.{part}_proj", rows, hidden, width, bias)
            if style.head_norms and part != "v":
                made = split_heads(tape, made, kind, rotated=True) if kind != FUSED else made
                made = rms_norm(tape, made, f"{name}.{part}_norm", rows * width // heads.width, style.is_gemma)
            parts.append(made)
    query, key, value = (split_heads(tape, part, kind, at < 2) for at, part in enumerate(parts))
    cos, sin = shared.rotations[layer_kind]
    query_turned, key_turned = (
        partly_turned(tape, part, heads.width, cos, sin, setting.batch.tokens)[0]
        if style.joined
        else rotary(tape, part, cos, sin)
        for part in (query, key)
    )
    tape.hold(query, key)
    mixed = attend(setting, heads, query_turned, key_turned, value, mask, joined=style.joined)
    return tape.linear(mixed, f"{name}.o_proj", rows, heads.query_width, hidden, closing_bias)


def _mlp(setting: Setting, style: Style, name: str, x: Value) -> Value:
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    hidden, inner = sizes("hidden_size"), sizes("intermediate_size")
    bias, act = (
        sizes.is_on("mlp_bias", False),
        sizes.word("hidden_activation", "") or sizes.word("hidden_act", style.act),
    )
    if style.joined:
        joined = tape.linear(x, f"{name}.gate_up_proj", rows, hidden, 2 * inner, bias=False)
        gate, up = tape.chunk(joined, rows * inner, rows * inner)
        both = tape.multiply(up, activation(tape, act, gate))
    else:
        gate = activation(tape, act, tape.linear(x, f"{name}.gate_proj", rows, hidden, inner, bias))
        both = tape.multiply(gate, tape.linear(x, f"{name}.up_proj", rows, hidden, inner, bias))
    return tape.linear(both, f"{name}.down_proj", rows, inner, hidden, bias)
