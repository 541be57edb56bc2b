"""GPT-lite (finetune/models/gptlite.py), whole or a stage of its pipeline (gptlite_pipeline.py)."""

from __future__ import annotations

from finetune.plan.forward.attention import Heads, attend, eager_mask, kind_of, split_heads
from finetune.plan.forward.losses import causal_head, cross_entropy
from finetune.plan.forward.parts import Part, Setting, activation, stack
from finetune.plan.forward.stages import Listed
from finetune.plan.values import FP32_BYTES, Value

EMBEDDINGS = "transformer.embeddings"


def gptlite(setting: Setting) -> Value:
    tape, sizes = setting.tape, setting.sizes
    layers, width = sizes("num_hidden_layers"), sizes("hidden_size")
    with tape.segment("embeddings"):
        tokens = _tokens(setting)
        mask = eager_mask(setting)
        x = _positions(setting, tokens)
        tape.hold(tokens)
    held = () if mask is None else (mask,)
    x = stack(setting, x, range(layers), _name, lambda index, x: _block(setting, index, x, mask),
              held=lambda index: held)  # fmt: skip
    with tape.segment("head"):
        normed = tape.layer_norm(x, "transformer.norm", setting.batch.positions, sizes.is_on("bias", True))
        tape.hold(x, *held)
        return causal_head(setting, normed, _tied(setting), width)


def listed(setting: Setting, part: Part) -> Listed:
    layers, batch = setting.sizes("num_hidden_layers"), setting.batch
    names = ["tokens", "positions", *map(_name, range(layers)), "norm", "head"]
    given = setting.tape.given(batch.positions * setting.sizes("hidden_size"), needs_grad=True)
    return Listed(names, given, lambda place, x: _entry(setting, place, layers, x))


def _entry(setting: Setting, place: int, layers: int, x: Value) -> Value:
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    if place == 0:
        return _tokens(setting)
    if place == 1:
        return _positions(setting, x)
    if place < layers + 2:
        return _block(setting, place - 2, x, eager_mask(setting))
    if place == layers + 2:
        return tape.layer_norm(x, "transformer.norm", rows, sizes.is_on("bias", True))
    logits = tape.linear(x, "lm_head", rows, sizes("hidden_size"), sizes("vocab_size"), False, _tied(setting))
    loss = cross_entropy(tape, tape.cast(logits, FP32_BYTES), rows)
    tape.hold(logits)
    return loss


def _name(index: int) -> str:
    return f"transformer.blocks.{index}"


def _tied(setting: Setting) -> str | None:
    return f"{EMBEDDINGS}.tokens.weight" if setting.sizes.is_on("tie_word_embeddings", False) else None


def _tokens(setting: Setting) -> Value:
    return setting.tape.embedding(setting.batch.positions, f"{EMBEDDINGS}.tokens", setting.sizes("hidden_size"))


def _positions(setting: Setting, tokens: Value) -> Value:
    tape, sizes = setting.tape, setting.sizes
    positions = tape.embedding(setting.batch.tokens, f"{EMBEDDINGS}.positions", sizes("hidden_size"))
    return tape.dropout(tape.add(tokens, positions), sizes.share("dropout"))


def _block(setting: Setting, index: int, x: Value, mask: Value | None) -> Value:
    tape, sizes, batch, name = setting.tape, setting.sizes, setting.batch, _name(index)
    width, rows, count = sizes("hidden_size"), batch.positions, sizes("num_attention_heads")
    bias, dropout = sizes.is_on("bias", True), sizes.share("dropout")
    inner = sizes("intermediate_size", default=4 * width)
    heads = Heads(batch.rows, batch.tokens, count, width // count, count, batch.tokens, dropout,
                  names_scores=True)  # fmt: skip
    kind = kind_of(tape, heads)
    normed = tape.layer_norm(x, f"{name}.norm_1", rows, bias)
    joined = tape.linear(normed, f"{name}.attention.qkv", rows, width, 3 * width, bias)
    query, key, value = (split_heads(tape, part, kind) for part in tape.chunk(joined, *[rows * width] * 3))
    mixed = attend(setting, heads, query, key, value, mask)
    out = tape.linear(mixed, f"{name}.attention.out", rows, width, width, bias)
    tape.hold(normed)
    x = tape.add(x, tape.dropout(out, dropout))
    normed = tape.layer_norm(x, f"{name}.norm_2", rows, bias)
    up = tape.linear(normed, f"{name}.mlp.up", rows, width, inner, bias)
    bent = activation(tape, sizes.word("hidden_act", "gelu"), up)
    down = tape.linear(bent, f"{name}.mlp.down", rows, inner, width, bias)
    tape.hold(normed)
    return tape.add(x, tape.dropout(down, dropout))
