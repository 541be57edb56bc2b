"""Attention: eager, torch's math fallback, or fused."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune.plan.forward.parts import Batch, Setting
from finetune.plan.tape import Tape
from finetune.plan.values import ATTENTION, FLASH_ATTENTION_2, FP32_BYTES, HALF_BYTES, INT64_BYTES, Gemm, Value

EAGER, MATH, FUSED = "eager", "math", "fused"


@dataclass(frozen=True)
class Heads:
    """Attention's sizes. `pairs`: key/value heads."""

    batch: Batch
    heads: int
    width: int
    pairs: int
    dropout: float = 0.0
    causal: bool = True
    softcap: bool = False
    fp32_softmax: bool = True
    casts_weights: bool = True  # to the precision of the values
    by_head: str = ""  # which of "qkv" are laid out head by head, as those from a cache are: no product copies them
    names_scores: bool = False  # a variable keeps them alive to the end of eager attention
    keys: int | None = None  # tokens attended to; None: as many as attend
    value_width: int | None = None  # None: as wide as queries
    sinks: str = ""  # the parameter that adds one more token to each head's scores

    @property
    def repeats(self) -> bool:
        """Each key/value head serves several query heads."""
        return self.pairs != self.heads

    @property
    def elements(self) -> int:
        """Elements of the queries, and of the output."""
        return self.count * self.tokens * self.width

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    @property
    def count(self) -> int:
        return self.batch.rows * self.heads

    @property
    def looked_at(self) -> int:
        return self.tokens if self.keys is None else self.keys

    @property
    def scores(self) -> Gemm:
        return Gemm(self.tokens, self.looked_at, self.width, self.count)

    @property
    def mix(self) -> Gemm:
        return Gemm(self.tokens, self.value_width or self.width, self.looked_at, self.count)


def kind_of(tape: Tape, heads: Heads, has_mask: bool = False, mask_trains: bool = False) -> str:
    """Which implementation runs. On a CPU the fused kernel takes no dropout; on a GPU fp32 has only the
    memory-efficient kernel, which needs as many key heads as query heads
    (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, cuda/sdp_utils.cpp)."""
    numbers = tape.numbers
    if numbers.attention == "eager":
        return EAGER
    if numbers.device == "cpu":
        return MATH if heads.dropout or mask_trains or heads.value_width not in (None, heads.width) else FUSED
    half = numbers.product_bytes == HALF_BYTES
    return MATH if heads.repeats and not half and not has_mask else FUSED


def split_heads(tape: Tape, x: Value, kind: str, rotated: bool = False) -> Value:
    """(rows, tokens, heads x width) as (rows, heads, tokens, width). Fused attention's gradients have the layout of its
    inputs; other gradients, and those of rotated values, are copied in the backward pass."""
    return x if kind == FUSED and not rotated else tape.alias(x)


def rotary(tape: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """x * cos + rotate_half(x) * sin (models/llama/modeling_llama.py, apply_rotary_pos_emb)."""
    straight = tape.multiply(x, cos)
    half = x.elements // 2
    one, two = tape.alias(x, half, "slice"), tape.alias(x, half, "slice")
    turned = cat(tape, tape.scale(two, "neg"), one)
    return tape.add(straight, tape.multiply(turned, sin))


def rotary_halves(tape: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """The same rotation, half by half (models/gpt_oss/modeling_gpt_oss.py, _apply_rotary_emb)."""
    first, second = tape.chunk(x, x.elements // 2, x.elements // 2)
    turned = (
        tape.add(tape.multiply(one, cos), tape.multiply(other, sin))
        for one, other in ((first, second), (second, first))
    )
    return cat(tape, *turned)


def partly_turned(tape: Tape, x: Value, width: int, cos: Value, sin: Value, tokens: int) -> tuple[Value, Value]:
    """Rotary positions on the first part of each head; the rest, even if empty, is concatenated to it
    again (models/phi3/modeling_phi3.py, apply_rotary_pos_emb). Returns the whole and the rotated part."""
    many = x.elements // width * (cos.elements // tokens)
    first, rest = tape.alias(x, many, "slice"), tape.alias(x, x.elements - many, "slice")
    turned = rotary(tape, first, cos, sin)
    return cat(tape, turned, rest), turned


def cat(tape: Tape, *parts: Value) -> Value:
    return tape.op("cat", parts, sum(part.elements for part in parts), narrows=True)


def rotations(tape: Tape, tokens: int, width: int) -> tuple[Value, Value]:
    """cos and sin of each position, the same for all rows."""
    cos, sin = (tape.op(name, (), tokens * width, needs_grad=False) for name in ("cos", "sin"))
    return cos, sin


def eager_mask(setting: Setting) -> tuple[Value, ...]:
    """(rows, 1, tokens, tokens), zero or a huge negative number (transformers, masking_utils.py, eager_mask), for a
    causal model with eager attention; other kinds need none."""
    tape, batch = setting.tape, setting.batch
    is_eager = tape.numbers.attention == EAGER
    return (tape.op("mask", (), batch.positions * batch.tokens, needs_grad=False),) if is_eager else ()


def bool_mask(setting: Setting) -> Value:
    """(1, 1, tokens, tokens), expanded over rows (masking_utils.py, sdpa_mask)."""
    return setting.tape.op("mask", (), setting.batch.tokens**2, bytes_each=1, needs_grad=False)


def attend(setting: Setting, heads: Heads, query: Value, key: Value, value: Value, mask: Value | None = None, *,
           joined: bool = False, also: Value | None = None) -> Value:  # fmt: skip
    """The attention output (rows, tokens, heads x width). `joined`: queries come from a cat, so they are laid out head
    by head. `also`: a second mask, which eager attention adds."""
    tape = setting.tape
    kind = kind_of(tape, heads, mask is not None, mask is not None and mask.needs_grad)
    if kind == EAGER:
        mixed = _eager(tape, query, key, value, heads, (mask, also))
    elif kind == MATH:
        mixed = _math(tape, query, key, value, heads, mask)
    else:
        mixed = _fused(tape, query, key, value, heads, mask)
        return tape.copy(mixed) if joined else mixed  # laid out like the queries, so transpose(1, 2) must copy
    tape.hold(query, key, value)
    return mixed


def _repeated(tape: Tape, x: Value, heads: Heads) -> Value:
    """repeat_kv: one copy per query head; the gradients of copies are summed."""
    return tape.op("repeat", (x,), heads.elements) if heads.repeats else x


def _eager(tape: Tape, query: Value, key: Value, value: Value, heads: Heads, masks: tuple[Value | None, ...]) -> Value:
    """eager_attention_forward of models/llama/modeling_llama.py and similar. matmul copies what it cannot flatten."""
    repeats = heads.repeats or bool(heads.by_head)
    wide_key, wide_value = _repeated(tape, key, heads), _repeated(tape, value, heads)
    scores = tape.matmul(tape.copy(query), wide_key if repeats else tape.copy(wide_key), heads.scores)
    scores = tape.scale(scores)
    if heads.softcap:
        scores = tape.scale(tape.unary("tanh", tape.scale(scores)))
    for mask in masks:
        scores = scores if mask is None else tape.add(scores, mask)
    weights = _shares_with_sinks(tape, scores, heads) if heads.sinks else _shares(tape, scores, heads)
    if heads.fp32_softmax:
        weights = tape.cast(weights, query.bytes_each)
        tape.hold(scores)  # softmax(scores).to(dtype): the variable is rebound only when the result exists
    elif heads.casts_weights:
        weights = tape.cast(weights, value.bytes_each)
    weights = tape.dropout(weights, heads.dropout)
    mixed = tape.matmul(weights, wide_value if repeats else tape.copy(wide_value), heads.mix)
    out = tape.op("copy", (mixed,), mixed.elements)  # transpose(1, 2).contiguous(), whose gradient is copied back
    tape.hold(mixed, wide_key, wide_value, *((scores,) if heads.names_scores else ()))
    tape.keep(weights)  # attention returns them, and its caller keeps them in a variable
    return out


def _shares(tape: Tape, scores: Value, heads: Heads) -> Value:
    """softmax. On a GPU one kernel reads fp16 and writes fp32; bf16 is converted first
    (aten/src/ATen/native/SoftMax.cpp, softmax with a dtype), and autocast runs it in fp32 (autocast_mode.h)."""
    is_gpu = tape.numbers.device == "cuda"
    if heads.fp32_softmax and is_gpu and tape.numbers.is_fp16:
        return tape.softmax(scores, FP32_BYTES)
    if heads.fp32_softmax or (is_gpu and tape.numbers.autocast):
        scores = tape.cast(scores, FP32_BYTES)
    return tape.softmax(scores)


def _shares_with_sinks(tape: Tape, scores: Value, heads: Heads) -> Value:
    """softmax over the scores and the sink, in the precision of the scores, less each row's maximum; the sink's weight
    is dropped (models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward)."""
    rows = heads.count * heads.tokens
    joined = tape.op("cat", (scores,), scores.elements + rows, narrows=True, weights=(heads.sinks,),
                     module=heads.sinks.rpartition(".")[0])  # fmt: skip
    top = tape.op("max", (joined,), rows, extra_saved=INT64_BYTES * rows)
    lowered = tape.add(joined, top)
    shares = tape.softmax(lowered)
    tape.hold(scores, lowered)
    return tape.alias(shares, scores.elements, "slice")


def _math(tape: Tape, query: Value, key: Value, value: Value, heads: Heads, mask: Value | None) -> Value:
    """aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math: in fp32."""
    size = query.bytes_each
    query, key, value = (tape.cast(part, FP32_BYTES) for part in (query, key, value))
    key, value = _repeated(tape, key, heads), _repeated(tape, value, heads)
    scaled, scaled_key = tape.scale(query), tape.scale(key)
    turned_key = scaled_key if "k" in heads.by_head else tape.copy(scaled_key)
    turned = scaled if "q" in heads.by_head else tape.copy(scaled)
    scores = tape.matmul(turned, turned_key, heads.scores, casts=False)
    if mask is not None and mask.bytes_each > 1:
        scores = tape.add(scores, mask)
    elif heads.causal or mask is not None:
        made = tape.op("mask", (), heads.tokens * heads.looked_at, bytes_each=FP32_BYTES, needs_grad=False)
        scores = tape.add(scores, made)
        tape.hold(made)
    weights = tape.dropout(tape.softmax(scores), heads.dropout)
    low = tape.cast(weights, size)
    mixed = tape.matmul(weights, value if "v" in heads.by_head else tape.copy(value), heads.mix, casts=False)
    out = tape.cast(mixed, size)
    tape.hold(scaled, low, query, key, value)
    return tape.op("copy", (out,), out.elements)  # as in `_eager`


def _fused(tape: Tape, query: Value, key: Value, value: Value, heads: Heads, mask: Value | None) -> Value:
    """Flash or memory-efficient: saves its inputs, its output, and one log-sum-exp per row. Causal attention computes
    half of the products; the backward pass computes five (Dao et al., arXiv 2205.14135, algorithm 4)."""
    numbers = tape.numbers
    query, key, value = (tape.cast(part, numbers.product_bytes) for part in (query, key, value))
    if mask is not None:
        if numbers.attention == "sdpa":
            key, value = _repeated(tape, key, heads), _repeated(tape, value, heads)
        if mask.bytes_each == 1:  # made floats, and expanded to each row (attention.cpp, convert_boolean_attn_mask)
            many = heads.batch.rows * heads.tokens * heads.looked_at
            mask = tape.op("mask", (mask,), many, bytes_each=numbers.product_bytes, needs_grad=False)
    length = heads.tokens // 2 if heads.causal and mask is None else heads.looked_at
    first = Gemm(heads.tokens, max(length, 1), heads.width, heads.count)
    second = replace(heads.mix, k=max(length, 1))
    masks = () if mask is None else (mask,)
    return tape.op(
        FLASH_ATTENTION_2 if numbers.attention == FLASH_ATTENTION_2 else ATTENTION,
        (query, key, value, *masks), second.m * second.n * second.many,
        saves=(query, key, value, *masks), saves_output=True, extra_saved=FP32_BYTES * heads.count * heads.tokens,
        gemms=(first, second), gemms_back=(first, first, first, second, second),
        scratch_back=_flash_scratch(heads, query.bytes_each) if numbers.device == "cuda" and not masks else 0,
    )  # fmt: skip


def _flash_scratch(heads: Heads, bytes_each: int) -> int:
    """Scratch bytes of flash attention's backward pass on a GPU, in half precision: the fp32 gradient of queries, one
    sum per row, and gradients of keys and values for every query head
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    if bytes_each == FP32_BYTES:
        return 0  # fp32 runs the memory-efficient kernel
    rows = heads.batch.rows * -(-heads.tokens // 128) * 128
    width = -(-heads.width // 32) * 32
    expanded = 2 * heads.elements * bytes_each if heads.repeats else 0
    return rows * heads.heads * (width + 1) * FP32_BYTES + expanded
