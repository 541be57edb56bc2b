"""T5: an encoder and a decoder, with relative position biases (models/t5/modeling_t5.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from finetune.plan.forward.attention import EAGER, Heads, attend, cat, eager_mask, kind_of, split_heads
from finetune.plan.forward.losses import cross_entropy, output_in_fp32
from finetune.plan.forward.parts import Setting, activation, inverse_root, stack
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES, INT64_BYTES, Value

DROPOUT = 0.1


def t5(setting: Setting) -> Value:
    """The decoder's tokens are the targets."""
    tape, sizes = setting.tape, setting.sizes
    encoders = sizes("num_layers")
    decoders = sizes("num_decoder_layers", default=encoders)
    states = _side(setting, "encoder", range(encoders), None)
    batch = setting.batch
    written = replace(setting, batch=replace(batch, tokens=batch.targets or batch.tokens))
    out = _side(written, "decoder", range(encoders, encoders + decoders), states, batch.tokens)
    with tape.segment("head"):
        tape.keep(states, out)
        if sizes.is_on("tie_word_embeddings", True):
            out = tape.scale(out)
        logits = tape.linear(out, "lm_head", "shared.weight")
        loss = cross_entropy(tape, logits, written.batch.positions)
        tape.hold(out)
        output_in_fp32(tape, logits)
    return loss


def _side(setting: Setting, side: str, layers: range, states: Value | None, read: int | None = None) -> Value:
    """Embedding, blocks, final norm. `states`: the encoder output that the decoder attends to, of `read` tokens."""
    tape, dropout = setting.tape, setting.sizes.share("dropout_rate", DROPOUT)
    with tape.segment(f"{side} embeddings"):
        embedded = tape.embedding("shared", setting.batch.positions)
        x = tape.dropout(embedded, dropout)
        masks = eager_mask(setting) if states else ()
    bias: list[Value] = []  # the first block makes it, all others use it
    cross: list[Value] = []

    def name(layer: int) -> str:
        return f"{side}.block.{layer - layers.start}"

    def block(layer: int, x: Value) -> Value:
        return _block(setting, name(layer), x, bias, cross, states, next(iter(masks), None), read)

    def held(layer: int) -> tuple[Value, ...]:
        return (*bias, *cross, *masks, *((states,) if states else ()))

    last = stack(setting, x, layers, name, block, lambda layer: layer == layers.start, held)
    with tape.segment(f"{side} end"):
        normed = _norm(tape, last, f"{side}.final_layer_norm")
        out = tape.dropout(normed, dropout)
        tape.hold(embedded, last, *bias, *cross, *masks)
    return out


def _norm(tape: Tape, x: Value, module: str) -> Value:
    """The mean of squares in fp32, the product with the input as it is."""
    normed = tape.multiply(x, inverse_root(tape, tape.cast(x, FP32_BYTES), module))
    return tape.weigh(tape.cast(normed, tape.numbers.bytes_each) if tape.numbers.is_half else normed, module)


def _block(setting: Setting, name: str, x: Value, bias: list[Value], cross: list[Value], states: Value | None,
           mask: Value | None = None, read: int | None = None) -> Value:  # fmt: skip
    tape, dropout = setting.tape, setting.sizes.share("dropout_rate", DROPOUT)

    def added(x: Value, place: int, part: Callable[[Value], Value]) -> Value:
        normed = _norm(tape, x, f"{name}.layer.{place}.layer_norm")
        out = part(normed)
        x = tape.add(x, tape.dropout(out, dropout))
        tape.hold(normed, out)
        return x

    own, other = f"{name}.layer.0.SelfAttention", f"{name}.layer.1.EncDecAttention"
    x = added(x, 0, lambda y: _attention(setting, own, y, y, bias, states is not None, mask=mask))
    if states is not None:
        x = added(x, 1, lambda y: _attention(setting, other, y, states, cross, True, read))
    last = 1 if states is None else 2
    return added(x, last, lambda y: _feed_forward(setting, f"{name}.layer.{last}.DenseReluDense", y))


def _attention(setting: Setting, name: str, x: Value, states: Value, bias: list[Value], decodes: bool,
               read: int | None = None, mask: Value | None = None) -> Value:  # fmt: skip
    """`read`: cross-attention to that many tokens of the encoder's states, with zeros for a bias. The decoder caches
    keys and values in training too, because its config is a copy that the Trainer does not change; but not when it is
    checkpointed."""
    tape, sizes, count = setting.tape, setting.sizes, setting.sizes("num_heads")
    is_cached = decodes and not tape.segments[-1].recomputed
    heads = Heads(setting.batch, count, sizes("d_kv"), count, sizes.share("dropout_rate", DROPOUT), causal=False,
                  fp32_softmax=False, casts_weights=False, keys=read, by_head="kv" if is_cached else "")  # fmt: skip
    kind = kind_of(tape, heads, mask_trains=read is None or bool(setting.checkpoint_interval))
    query = split_heads(tape, tape.linear(x, f"{name}.q"), kind)
    key, value = (split_heads(tape, tape.linear(states, f"{name}.{part}"), kind) for part in "kv")
    if is_cached:
        made = key, value
        key, value = cat(tape, key), cat(tape, value)
        tape.hold(*made)
        tape.keep_to_end(key, value)
    biased = _bias(setting, name, bias, decodes, read)
    mixed = attend(setting, heads, query, key, value, mask=biased, also=mask)
    tape.hold(biased)
    return tape.linear(mixed, f"{name}.o")


def _bias(setting: Setting, name: str, bias: list[Value], decodes: bool, read: int | None) -> Value:
    """(1, heads, tokens, tokens): sdpa gets a contiguous copy in each block, and the decoder's has the causal mask
    applied (integrations/sdpa_attention.py, create_position_bias_mask)."""
    tape, tokens, count = setting.tape, setting.batch.tokens, setting.sizes("num_heads")
    elements = tokens * (tokens if read is None else read) * count
    if read is not None:
        if not bias:  # when checkpointed, they get a gradient
            bias.append(tape.op("zeros", (), elements, needs_grad=bool(setting.checkpoint_interval),
                                bytes_each=tape.numbers.product_bytes))  # fmt: skip
        return bias[0]
    if not bias:
        module = f"{name}.relative_attention_bias"
        bias.append(tape.op("embedding", (), elements, weights=(f"{module}.weight",), module=module,
                            extra_saved=tokens * tokens * INT64_BYTES))  # fmt: skip
    if tape.numbers.attention == EAGER:
        return bias[0]
    if not decodes:
        return tape.copy(bias[0])
    seen = tape.op("mask", (), tokens * tokens, bytes_each=1, needs_grad=False)
    masked = tape.op("where", (bias[0],), elements, saves=(seen,))
    copied = tape.copy(masked)
    tape.hold(seen)
    return copied


def _feed_forward(setting: Setting, name: str, x: Value) -> Value:
    tape, sizes = setting.tape, setting.sizes
    gated, _, act = sizes.word("feed_forward_proj", "relu").rpartition("-")
    if gated and act == "gelu":
        act = "gelu_new"  # models/t5/configuration_t5.py
    bent = activation(tape, act, tape.linear(x, f"{name}.wi_0" if gated else f"{name}.wi"))
    if gated:
        bent = tape.multiply(bent, tape.linear(x, f"{name}.wi_1"))
    bent = tape.cast(tape.dropout(bent, sizes.share("dropout_rate", DROPOUT)), tape.numbers.bytes_each)
    return tape.linear(bent, f"{name}.wo")
