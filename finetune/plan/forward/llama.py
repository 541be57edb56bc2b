"""Llama and its descendants: one decoder, whose parts a `Style` chooses."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from finetune.plan.families.decoders import STYLES, WINDOW, Style
from finetune.plan.families.parts import Sizes
from finetune.plan.forward.attention import (
    FUSED,
    Heads,
    attend,
    bool_mask,
    eager_mask,
    kind_of,
    partly_turned,
    rotary,
    rotary_halves,
    rotations,
    split_heads,
)
from finetune.plan.forward.losses import decoder_head
from finetune.plan.forward.moe import experts, oss_experts
from finetune.plan.forward.parts import Setting, activation, rms_norm, stack
from finetune.plan.values import Value


@dataclass(frozen=True)
class _Shared:
    """Masks and rotations by kind of layer, which the model makes once for all layers."""

    masks: dict[str, tuple[Value, ...]]  # one, or none
    rotations: dict[str, tuple[Value, Value]]

    def of(self, *kinds: str) -> tuple[Value, ...]:
        return tuple(value for made in (self.masks, self.rotations) for kind in kinds for value in made[kind])


def llama_like(setting: Setting) -> Value:
    tape, sizes, style = setting.tape, setting.sizes, STYLES[setting.family]
    layers = range(sizes("num_hidden_layers"))
    kinds = [style.layer_kind(sizes, index) for index in layers]
    with tape.segment("embeddings"):
        x = tape.embedding("model.embed_tokens", setting.batch.positions)
        if style.is_gemma:
            x = tape.scale(x)
        shared = _shared(setting, style, kinds)

    def key(index: int) -> Hashable:
        return kinds[index], style.is_sparse(sizes, index), style.rotates(sizes, index)

    def block(index: int, x: Value) -> Value:
        return _block(setting, style, index, x, shared, kinds[index])

    last = stack(setting, x, layers, lambda i: f"model.layers.{i}", block, key, lambda i: shared.of(kinds[i]))
    with tape.segment("head"):
        normed = rms_norm(tape, last, "model.norm", style.casts_late)
        tape.hold(x, last, *shared.of(*shared.masks))
        cap = _caps(sizes, "final_logit_softcapping", style.final_softcap)
        return decoder_head(setting, normed, "model.embed_tokens.weight", softcap=cap)


def _caps(sizes: Sizes, name: str, default: float) -> bool:
    return bool(sizes.config.get(name, default))


def _shared(setting: Setting, style: Style, kinds: list[str]) -> _Shared:
    """A mask is made if attention is eager, or if its window is shorter than the text (masking_utils.py,
    _ignore_causal_mask_sdpa)."""
    tape, sizes, tokens = setting.tape, setting.sizes, setting.batch.tokens
    window = sizes.maybe("sliding_window") or style.window
    masks: dict[str, tuple[Value, ...]] = {}
    for kind in dict.fromkeys(kinds):
        short = kind == WINDOW and window is not None and tokens >= window
        masks[kind] = eager_mask(setting)
        if short and tape.numbers.attention == "sdpa":
            masks[kind] = (bool_mask(setting),)
    width = int(style.head_width(sizes) * sizes.share("partial_rotary_factor", 1.0)) // (2 if style.is_oss else 1)
    turns = dict.fromkeys(masks, rotations(tape, tokens, width))
    if style.two_rotations and len(masks) > 1:
        turns[WINDOW] = rotations(tape, tokens, width)
    return _Shared(masks, turns)


def _block(setting: Setting, style: Style, index: int, x: Value, shared: _Shared, kind: str) -> Value:
    tape, sizes, name = setting.tape, setting.sizes, f"model.layers.{index}"

    def norm(x: Value, its_name: str) -> Value:
        return rms_norm(tape, x, f"{name}.{its_name}", style.casts_late)

    dropout = sizes.share("resid_pdrop") if style.joined else 0.0
    normed = norm(x, "input_layernorm")
    out = _attention(setting, style, index, normed, shared, kind)
    tape.hold(normed)
    if style.closing_norms:
        out = norm(out, "post_attention_layernorm")
    x = tape.add(x, tape.dropout(out, dropout))
    normed = norm(x, "pre_feedforward_layernorm" if style.closing_norms else "post_attention_layernorm")
    if style.is_oss:
        out = oss_experts(setting, f"{name}.mlp", normed)
    elif style.expert_width and style.is_sparse(sizes, index):
        out = experts(setting, f"{name}.mlp", normed, style.expert_width, style.act)
    else:
        out = _mlp(setting, style, f"{name}.mlp", normed)
    tape.hold(normed)
    if style.closing_norms:
        out = norm(out, "post_feedforward_layernorm")
    return tape.add(x, tape.dropout(out, dropout))


def _attention(setting: Setting, style: Style, index: int, x: Value, shared: _Shared, layer_kind: str) -> Value:
    tape, sizes, tokens, mask = setting.tape, setting.sizes, setting.batch.tokens, shared.masks[layer_kind]
    name, rotates = f"model.layers.{index}.self_attn", style.rotates(sizes, index)
    count, width = sizes("num_attention_heads"), style.head_width(sizes)
    heads = Heads(setting.batch, count, width, sizes("num_key_value_heads", default=count),
                  sizes.share("attention_dropout"),
                  softcap=_caps(sizes, "attn_logit_softcapping", style.attention_softcap),
                  sinks=f"{name}.sinks" if style.is_oss else "")  # fmt: skip
    kind = kind_of(tape, heads, bool(mask))
    if style.joined:
        joined = tape.linear(x, f"{name}.qkv_proj")
        positions = setting.batch.positions
        parts = [tape.alias(joined, positions * many * width, "slice") for many in (count, heads.pairs, heads.pairs)]
    else:
        parts = []
        for part in "qkv":
            made = tape.linear(x, f"{name}.{part}_proj")
            if style.head_norms and part != "v":
                made = split_heads(tape, made, kind, rotated=True) if kind != FUSED else made
                made = rms_norm(tape, made, f"{name}.{part}_norm", style.casts_late)
            parts.append(made)
    query, key, value = (split_heads(tape, part, kind, rotates and at < 2) for at, part in enumerate(parts))
    turns, given = shared.rotations[layer_kind], (query, key)
    if style.joined:
        query, key = (partly_turned(tape, part, width, *turns, tokens)[0] for part in given)
    elif rotates:
        turn = rotary_halves if style.is_oss else rotary
        query, key = (turn(tape, part, *turns) for part in given)
    tape.hold(*given)
    mixed = attend(setting, heads, query, key, value, *mask, joined=style.joined)
    return tape.linear(mixed, f"{name}.o_proj")


def _mlp(setting: Setting, style: Style, name: str, x: Value) -> Value:
    tape, act = setting.tape, setting.sizes.word("hidden_activation", "") or setting.sizes.word("hidden_act", style.act)
    if style.joined:
        joined = tape.linear(x, f"{name}.gate_up_proj")
        gate, up = tape.chunk(joined, *[joined.elements // 2] * 2)
        both = tape.multiply(up, activation(tape, act, gate))
    else:
        gate = activation(tape, act, tape.linear(x, f"{name}.gate_proj"))
        both = tape.multiply(gate, tape.linear(x, f"{name}.up_proj"))
    return tape.linear(both, f"{name}.down_proj")
