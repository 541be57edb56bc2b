"""GPT-2; and Phi, which runs attention and MLP in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.plan.families.decoders import GPT2_PARTS
from finetune.plan.forward.attention import Heads, attend, eager_mask, kind_of, partly_turned, rotations, split_heads
from finetune.plan.forward.losses import decoder_head
from finetune.plan.forward.parts import Setting, activation, stack
from finetune.plan.values import Value


def gpt2(setting: Setting) -> Value:
    """models/gpt2/modeling_gpt2.py."""
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    with tape.segment("embeddings"):
        tokens = tape.embedding("transformer.wte", batch.positions)
        positions = tape.embedding("transformer.wpe", batch.tokens)
        mask = eager_mask(setting)
        x = tape.dropout(tape.add(tokens, positions), sizes.share("embd_pdrop", 0.1))
        tape.hold(positions)
    x = stack(setting, x, range(sizes("n_layer")), lambda i: f"transformer.h.{i}",
              lambda i, x: _gpt2_block(setting, i, x, mask), held=lambda index: mask)  # fmt: skip
    with tape.segment("head"):
        normed = tape.layer_norm(x, "transformer.ln_f")
        tape.hold(tokens, positions, x, *mask)
        return decoder_head(setting, normed, "transformer.wte.weight")


def _gpt2_block(setting: Setting, index: int, x: Value, mask: tuple[Value, ...]) -> Value:
    sizes, count = setting.sizes, setting.sizes("n_head")
    heads = Heads(setting.batch, count, sizes("n_embd") // count, count, sizes.share("attn_pdrop", 0.1),
                  fp32_softmax=False)  # fmt: skip
    act, dropout = sizes.word("activation_function", "gelu_new"), sizes.share("resid_pdrop", 0.1)
    return gpt_block(setting, f"transformer.h.{index}", GPT2_PARTS, heads, act, dropout, x, mask)


def gpt_block(setting: Setting, name: str, parts: Sequence[str], heads: Heads, act: str, dropout: float, x: Value,
              mask: tuple[Value, ...], keeps: bool = True) -> Value:  # fmt: skip
    """Attention and MLP, a norm before each. `keeps`: a variable keeps attention's output to the block's end."""
    tape, kind = setting.tape, kind_of(setting.tape, heads)
    norm_1, qkv, out_of, norm_2, up, down_to = (f"{name}.{part}" for part in parts)
    normed = tape.layer_norm(x, norm_1)
    joined = tape.linear(normed, qkv)
    query, key, value = (split_heads(tape, part, kind) for part in tape.chunk(joined, *[x.elements] * 3))
    out = tape.linear(attend(setting, heads, query, key, value, *mask), out_of)
    tape.hold(normed)
    out = tape.dropout(out, dropout)
    if keeps:
        tape.keep(out)
    x = tape.add(x, out)
    normed = tape.layer_norm(x, norm_2)
    down = tape.linear(activation(tape, act, tape.linear(normed, up)), down_to)
    tape.hold(normed)
    return tape.add(x, tape.dropout(down, dropout))


def phi(setting: Setting) -> Value:
    """models/phi/modeling_phi.py."""
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    width = sizes("head_dim", default=sizes("hidden_size") // sizes("num_attention_heads"))
    with tape.segment("embeddings"):
        embedded = tape.embedding("model.embed_tokens", batch.positions)
        mask = eager_mask(setting)
        x = started = tape.dropout(embedded, sizes.share("embd_pdrop"))
        turns = rotations(tape, batch.tokens, int(width * sizes.share("partial_rotary_factor", 0.5)))
    x = stack(setting, x, range(sizes("num_hidden_layers")), lambda i: f"model.layers.{i}",
              lambda i, x: _phi_block(setting, i, x, mask, turns), held=lambda index: (*mask, *turns))  # fmt: skip
    with tape.segment("head"):
        normed = tape.layer_norm(x, "model.final_layernorm")
        tape.hold(started, x, *mask, *turns)
        return decoder_head(setting, normed, "model.embed_tokens.weight")


def _phi_block(setting: Setting, index: int, x: Value, mask: tuple[Value, ...], turns: tuple[Value, Value]) -> Value:
    tape, sizes, batch, name = setting.tape, setting.sizes, setting.batch, f"model.layers.{index}"
    count, dropout = sizes("num_attention_heads"), sizes.share("resid_pdrop")
    width = sizes("head_dim", default=sizes("hidden_size") // count)
    pairs = sizes("num_key_value_heads", default=count)
    heads = Heads(batch, count, width, pairs, sizes.share("attention_dropout"))
    kind = kind_of(tape, heads)
    normed = tape.layer_norm(x, f"{name}.input_layernorm")
    parts = []
    for part in "qkv":
        parts.append(split_heads(tape, tape.linear(normed, f"{name}.self_attn.{part}_proj"), kind, part != "v"))
    if sizes.is_on("qk_layernorm", False):
        for at, part in enumerate("qk"):
            parts[at] = tape.layer_norm(parts[at], f"{name}.self_attn.{part}_layernorm")
    turned = [partly_turned(tape, part, width, *turns, batch.tokens) for part in parts[:2]]
    mixed = attend(setting, heads, turned[0][0], turned[1][0], parts[2], *mask, joined=True)
    tape.hold(*parts, *(part for _, part in turned))  # variables of the block keep both parts
    out = tape.dropout(tape.linear(mixed, f"{name}.self_attn.dense"), dropout)
    bent = activation(tape, sizes.word("hidden_act", "gelu_new"), tape.linear(normed, f"{name}.mlp.fc1"))
    down = tape.dropout(tape.linear(bent, f"{name}.mlp.fc2"), dropout)
    tape.hold(out, normed)
    return tape.add(tape.add(out, down), x)
