"""GPT-lite (finetune/models/gptlite.py) and the benchmark MLPs (finetune/models/mlp.py): models built as flat lists
of layers, run whole or as a pipeline stage (gptlite_pipeline.py)."""

from __future__ import annotations

from collections.abc import Callable

from finetune.plan.families.gptlite import DOWN, EMBEDDINGS, NORM, PARTS, ROUTER, UP
from finetune.plan.forward.attention import FUSED, Heads, attend, causal_mask, kind_of
from finetune.plan.forward.expert_parallel import grouped
from finetune.plan.forward.losses import chunked_loss, cross_entropy, decoder_head, label_loss
from finetune.plan.forward.parts import Part, Setting, activation, stack
from finetune.plan.values import FP32_BYTES, INT64_BYTES, Value

# Per family, the number of entries before and after its blocks; the last one contains the loss.
LISTED = {"gptlite": (2, 2), "mlp": (0, 1)}


# The names of all entries in order, a stage's input, and the function that runs an entry.
Listed = tuple[list[str], Value, Callable[[int, Value], Value]]


def stage(setting: Setting, part: Part) -> Value:
    """DeepSpeed runs a stage's layers in groups of `activation_checkpoint_interval`, and recomputes the groups
    whose layers all support it (deepspeed 0.19.8, runtime/pipe/module.py, forward and _is_checkpointable)."""
    names, x, run = (_listed_gptlite if setting.family == "gptlite" else _listed_mlp)(setting, part)
    before, behind = LISTED[setting.family]
    end = len(names) - behind
    assert 0 <= part.first < part.last <= len(names), part
    step = setting.checkpoint_interval or 1
    for first in range(part.first, part.last, step):
        group = range(first, min(first + step, part.last))
        again = bool(setting.checkpoint_interval) and group[-1] < end
        layer = first - before if before <= first < end else None
        with setting.tape.segment(names[first], x, layer=layer, recomputed=again):
            for place in group:
                x = run(place, x)
    return x


# GPT-lite


def gptlite(setting: Setting) -> Value:
    tape = setting.tape
    with tape.segment("embeddings"):
        tokens = _tokens(setting)
        mask = causal_mask(setting)
        x = _positions(setting, tokens)
        tape.hold(tokens)
    x = stack(setting, x, range(setting.sizes("num_hidden_layers")), _block_name,
              lambda i, x: _block(setting, i, x, mask), mask)  # fmt: skip
    with tape.segment("head"):
        normed = tape.layer_norm(x, NORM)
        tape.hold(x, *mask)
        return decoder_head(setting, normed, f"{EMBEDDINGS}.tokens.weight")


def _listed_gptlite(setting: Setting, part: Part) -> Listed:
    tape, layers, rows = setting.tape, setting.sizes("num_hidden_layers"), setting.batch.positions
    names = ["tokens", "positions", *map(_block_name, range(layers)), "norm", "head"]

    def run(place: int, x: Value) -> Value:
        if place == 0:
            return _tokens(setting)
        if place == 1:
            return _positions(setting, x)
        if place < layers + 2:
            mask = causal_mask(setting)
            x = _block(setting, place - 2, x, mask)
            tape.hold(*mask)
            return x
        if place == layers + 2:
            return tape.layer_norm(x, NORM)
        if setting.loss_chunk_tokens:
            return chunked_loss(setting, x, f"{EMBEDDINGS}.tokens.weight")
        logits = tape.linear(x, "lm_head", f"{EMBEDDINGS}.tokens.weight")
        loss = cross_entropy(tape, tape.cast(logits, FP32_BYTES), rows)
        tape.hold(logits)
        return loss

    return names, tape.given(rows * setting.sizes("hidden_size"), needs_grad=True), run


def _block_name(index: int) -> str:
    return f"transformer.blocks.{index}"


def _tokens(setting: Setting) -> Value:
    return setting.tape.embedding(f"{EMBEDDINGS}.tokens", setting.batch.positions)


def _positions(setting: Setting, tokens: Value) -> Value:
    positions = setting.tape.embedding(f"{EMBEDDINGS}.positions", setting.batch.tokens)
    return setting.tape.dropout(setting.tape.add(tokens, positions), setting.sizes.share("dropout"))


def _block(setting: Setting, index: int, x: Value, mask: tuple[Value, ...]) -> Value:
    """Attention and MLP, a norm before each."""
    tape, sizes, count = setting.tape, setting.sizes, setting.sizes("num_attention_heads")
    dropout = sizes.share("dropout")
    width = sizes("hidden_size") // count
    heads = Heads(setting.batch, count, width, count, setting.batch.tokens, width, dropout)
    norm_1, qkv, out_of, norm_2, up, down_to = (f"{_block_name(index)}.{part}" for part in PARTS)
    normed = tape.layer_norm(x, norm_1)
    joined = tape.linear(normed, qkv)
    parts = tape.chunk(joined, *[x.elements] * 3)
    if kind_of(tape, heads) != FUSED:  # whose gradients have the layout of its inputs; others are copied back
        parts = [tape.alias(part) for part in parts]
    out = tape.linear(attend(setting, heads, *parts, *mask), out_of)
    tape.hold(normed)
    x = tape.add(x, tape.dropout(out, dropout))
    normed = tape.layer_norm(x, norm_2)
    if sizes.config.get("num_experts"):
        down = _mixture(setting, _block_name(index), normed)
    else:
        down = tape.linear(activation(tape, sizes.word("hidden_act", "gelu"), tape.linear(normed, up)), down_to)
    tape.hold(normed)
    return tape.add(x, tape.dropout(down, dropout))


def _mixture(setting: Setting, block: str, x: Value) -> Value:
    """A router, and experts by grouped products (finetune/models/gptlite_mlp.py, GPTLiteMixture; transformers 5.23,
    integrations/moe.py, grouped_mm_experts_forward). What experts hold of the tokens does not depend on their load."""
    tape, sizes = setting.tape, setting.sizes
    up, down = f"{block}.{UP}", f"{block}.{DOWN}"
    chosen = sizes("num_experts_per_tok", default=2)
    pairs, hidden = setting.batch.positions * chosen, x.elements // setting.batch.positions

    def numbers(name: str) -> Value:
        return tape.op(name, (), pairs, bytes_each=INT64_BYTES, needs_grad=False)

    chances = tape.softmax(tape.cast(tape.linear(x, f"{block}.{ROUTER}"), FP32_BYTES))
    shares = tape.op("topk", (chances,), pairs, extra_saved=INT64_BYTES * pairs)
    if chosen > 1:
        total = tape.op("sum", (shares,), setting.batch.positions)
        shares = tape.op("div", (shares, total), pairs, saves=(shares, total), scratch_back=2 * shares.bytes)
    shares = tape.cast(shares, x.bytes_each)
    experts, order = numbers("sort"), numbers("sort")
    given = tape.op("index", (x,), pairs * hidden, saves=(numbers("div"),))
    shares_by_expert = tape.op("index", (shares,), pairs, saves=(order,))
    counted = tape.op("cast", (), pairs, bytes_each=FP32_BYTES, needs_grad=False)
    size = FP32_BYTES if tape.casts(up) else tape.numbers.product_bytes
    inner = grouped(tape, tape.cast(given, size), up, pairs)
    bent = activation(tape, sizes.word("hidden_act", "gelu"), inner)
    out = grouped(tape, tape.cast(bent, size), down, pairs)
    weighed = tape.multiply(out, shares_by_expert)
    back = numbers("index_put")
    placed = tape.op("index", (weighed,), pairs * hidden, saves=(back,))
    summed = tape.op("sum", (placed,), x.elements, narrows=True)
    tape.hold(shares, experts, order, given, counted, out, shares_by_expert, back, placed)
    return tape.cast(summed, x.bytes_each)


# MLPs


def mlp(setting: Setting) -> Value:
    x = stack(setting, _inputs(setting), range(setting.sizes("layers")), _layer_name,
              lambda index, x: _layer(setting, index, x))  # fmt: skip
    with setting.tape.segment("head"):
        return label_loss(setting, setting.tape.linear(x, "head"))


def _listed_mlp(setting: Setting, part: Part) -> Listed:
    layers = setting.sizes("layers")

    def run(place: int, x: Value) -> Value:
        return _layer(setting, place, x) if place < layers else label_loss(setting, setting.tape.linear(x, "head"))

    x = _inputs(setting)
    given = setting.tape.given(x.elements, needs_grad=True) if part.first else x
    return [*map(_layer_name, range(layers)), "head"], given, run


def _layer_name(index: int) -> str:
    return f"layers.{index}"


def _inputs(setting: Setting) -> Value:
    x = setting.tape.given(0)  # already allocated
    x.elements = setting.batch.rows * setting.sizes("width")
    return x


def _layer(setting: Setting, index: int, x: Value) -> Value:
    return setting.tape.unary("relu", setting.tape.linear(x, f"{_layer_name(index)}.linear"))
