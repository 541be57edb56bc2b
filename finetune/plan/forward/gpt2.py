"""GPT-2, and Phi: attention and MLP beside one another."""

from __future__ import annotations

from finetune.plan.families.parts import CAUSAL
from finetune.plan.forward.attention import (
    Heads,
    attend,
    eager_mask,
    kind_of,
    partly_turned,
    rotations,
    split_heads,
)
from finetune.plan.forward.llama import class_head
from finetune.plan.forward.losses import causal_head
from finetune.plan.forward.parts import Setting, activation, stack
from finetune.plan.values import Value


def gpt2(setting: Setting) -> Value:
    """models/gpt2/modeling_gpt2.py."""
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    hidden, name = sizes("n_embd"), "transformer"
    with tape.segment("embeddings"):
        tokens = tape.embedding(batch.positions, f"{name}.wte", hidden)
        positions = tape.embedding(batch.tokens, f"{name}.wpe", hidden)
        mask = eager_mask(setting)
        x = tape.dropout(tape.add(tokens, positions), sizes.share("embd_pdrop", 0.1))
        tape.hold(positions)
    held = () if mask is None else (mask,)
    layers = range(sizes("n_layer"))
    x = stack(setting, x, layers, lambda i: f"{name}.h.{i}", lambda i, x: _gpt2_block(setting, i, x, mask),
              held=lambda index: held)  # fmt: skip
    with tape.segment("head"):
        normed = tape.layer_norm(x, f"{name}.ln_f", batch.positions)
        tape.hold(tokens, positions, x, *held)
        if setting.head != CAUSAL:
            return class_head(setting, normed, hidden)
        tied = f"{name}.wte.weight" if sizes.is_on("tie_word_embeddings", True) else None
        return causal_head(setting, normed, tied, hidden)


def _gpt2_block(setting: Setting, index: int, x: Value, mask: Value | None) -> Value:
    tape, sizes, batch, name = setting.tape, setting.sizes, setting.batch, f"transformer.h.{index}"
    hidden, rows, count = sizes("n_embd"), batch.positions, sizes("n_head")
    inner, dropout = sizes("n_inner", default=4 * hidden), sizes.share("resid_pdrop", 0.1)
    heads = Heads(batch.rows, batch.tokens, count, hidden // count, count, batch.tokens,
                  sizes.share("attn_pdrop", 0.1), fp32_softmax=False)  # fmt: skip
    kind = kind_of(tape, heads)
    normed = tape.layer_norm(x, f"{name}.ln_1", rows)
    joined = tape.linear(normed, f"{name}.attn.c_attn", rows, hidden, 3 * hidden)
    query, key, value = (split_heads(tape, part, kind) for part in tape.chunk(joined, *[rows * hidden] * 3))
    mixed = attend(setting, heads, query, key, value, mask)
    out = tape.linear(mixed, f"{name}.attn.c_proj", rows, hidden, hidden)
    tape.hold(normed)
    out = tape.dropout(out, dropout)
    tape.keep(out)
    x = tape.add(x, out)
    normed = tape.layer_norm(x, f"{name}.ln_2", rows)
    up = tape.linear(normed, f"{name}.mlp.c_fc", rows, hidden, inner)
    bent = activation(tape, sizes.word("activation_function", "gelu_new"), up)
    down = tape.linear(bent, f"{name}.mlp.c_proj", rows, inner, hidden)
    tape.hold(normed)
    return tape.add(x, tape.dropout(down, dropout))


def phi(setting: Setting) -> Value:
    """models/phi/modeling_phi.py."""
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    hidden, rows = sizes("hidden_size"), batch.positions
    width = int(
        sizes("head_dim", default=hidden // sizes("num_attention_heads")) * sizes.share("partial_rotary_factor", 0.5)
    )
    with tape.segment("embeddings"):
        embedded = tape.embedding(rows, "model.embed_tokens", hidden)
        mask = eager_mask(setting)
        x = tape.dropout(embedded, sizes.share("embd_pdrop"))
        turns = rotations(tape, batch.tokens, width)
    held = turns if mask is None else (mask, *turns)
    layers, started = range(sizes("num_hidden_layers")), x
    x = stack(setting, x, layers, lambda i: f"model.layers.{i}",
              lambda i, x: _phi_block(setting, i, x, mask, turns), held=lambda index: held)  # fmt: skip
    with tape.segment("head"):
        normed = tape.layer_norm(x, "model.final_layernorm", rows)
        tape.hold(started, x, *held)
        if setting.head != CAUSAL:
            return class_head(setting, normed, hidden)
        tied = "model.embed_tokens.weight" if sizes.is_on("tie_word_embeddings", False) else None
        return causal_head(setting, normed, tied, hidden, bias=True)


def _phi_block(setting: Setting, index: int, x: Value, mask: Value | None, turns: tuple[Value, Value]) -> Value:
    tape, sizes, batch, name = setting.tape, setting.sizes, setting.batch, f"model.layers.{index}"
    hidden, rows, count = sizes("hidden_size"), batch.positions, sizes("num_attention_heads")
    pairs, inner, dropout = (
        sizes("num_key_value_heads", default=count),
        sizes("intermediate_size"),
        sizes.share("resid_pdrop"),
    )
    heads = Heads(
        batch.rows,
        batch.tokens,
        count,
        sizes("head_dim", default=hidden // count),
        pairs,
        batch.tokens,
        sizes.share("attention_dropout"),
    )
    kind = kind_of(tape, heads)
    normed = tape.layer_norm(x, f"{name}.input_layernorm", rows)
    parts = []
    for part, wide in (("q", heads.query_width), ("k", heads.pair_width), ("v", heads.pair_width)):
        made = tape.linear(normed, f"{name}.self_attn.{part}_proj", rows, hidden, wide)
        parts.append(split_heads(tape, made, kind, part != "v"))
    if sizes.is_on("qk_layernorm", False):
        for at, part in enumerate("qk"):
            many = parts[at].elements // heads.width
            parts[at] = tape.layer_norm(parts[at], f"{name}.self_attn.{part}_layernorm", many)
    turned = [partly_turned(tape, part, heads.width, *turns, batch.tokens) for part in parts[:2]]
    mixed = attend(setting, heads, turned[0][0], turned[1][0], parts[2], mask, joined=True)
    tape.hold(*parts, *(part for _, part in turned))  # the block has names for both parts of each
    out = tape.dropout(tape.linear(mixed, f"{name}.self_attn.dense", rows, heads.query_width, hidden), dropout)
    up = tape.linear(normed, f"{name}.mlp.fc1", rows, hidden, inner)
    bent = activation(tape, sizes.word("hidden_act", "gelu_new"), up)
    down = tape.dropout(tape.linear(bent, f"{name}.mlp.fc2", rows, inner, hidden), dropout)
    tape.hold(out, normed)
    return tape.add(tape.add(out, down), x)
