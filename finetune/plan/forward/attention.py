"""Attention: eager, torch's math fallback, or fused."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune.plan.forward.parts import Setting
from finetune.plan.tape import Tape
from finetune.plan.values import ATTENTION, FLASH_ATTENTION_2, FP32_BYTES, HALF_BYTES, Gemm, Storage, Value

EAGER, MATH, FUSED = "eager", "math", "fused"


@dataclass(frozen=True)
class Heads:
    """Attention's products, one for each head of each sample: `scores` of (tokens, width) queries with keys, and `mix`
    of (tokens, keys) weights with values. `repeats`: each key/value head serves several query heads."""

    scores: Gemm
    mix: Gemm
    repeats: bool
    dropout: float = 0.0
    causal: bool = True
    by_head: str = ""  # which of "qkv" are laid out head by head, as those from a cache are: no product copies them
    broadcast: bool = False  # fewer key/value heads are given as they are: no fused kernel takes them


def kind_of(tape: Tape, heads: Heads, has_mask: bool = False, mask_trains: bool = False) -> str:
    """Which implementation runs. On a CPU the fused kernel takes no dropout; on a GPU fp32 has only the
    memory-efficient kernel, which needs as many key heads as query heads
    (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, cuda/sdp_utils.cpp)."""
    numbers = tape.numbers
    if numbers.attention == "eager":
        return EAGER
    if heads.broadcast and numbers.attention == "sdpa":
        return MATH
    if numbers.device == "cpu":
        return MATH if heads.dropout or mask_trains or heads.mix.n != heads.scores.k else FUSED
    half = numbers.product_bytes == HALF_BYTES
    return MATH if heads.repeats and not half and not has_mask else FUSED


def document_mask(setting: Setting) -> tuple[Value, ...]:
    """(rows, 1, tokens, tokens), a byte each, if the documents of a text are masked from one another in SDPA: two
    masks, and both in one (transformers, masking_utils.py, sdpa_mask). Ranks that share a text have made theirs before
    (finetune/training/sequence_parallel.py, document_mask); it is counted with the batch."""
    tape, batch = setting.tape, setting.batch
    if not batch.documents or tape.numbers.attention != "sdpa":
        return ()
    pairs = (batch.tokens * batch.sharing) ** 2
    if batch.sharing > 1:
        return (Value(batch.rows * pairs, 1, Storage(0), needs_grad=False),)
    scratch = (1 + batch.rows) * pairs
    return (tape.op("mask", (), batch.rows * pairs, bytes_each=1, needs_grad=False, scratch=scratch),)


def attend(setting: Setting, heads: Heads, query: Value, key: Value, value: Value, mask: Value | None = None) -> Value:
    """The attention output (rows, tokens, heads x width)."""
    kind = kind_of(setting.tape, heads, mask is not None, mask is not None and mask.needs_grad)
    if kind == FUSED:
        return _fused(setting, query, key, value, heads, mask)
    mixed = (_eager if kind == EAGER else _math)(setting, query, key, value, heads, mask)
    setting.tape.hold(query, key, value)
    return mixed


def _repeated(tape: Tape, x: Value, heads: Heads) -> Value:
    """repeat_kv: one copy per query head; the gradients of copies are summed."""
    scores = heads.scores
    return tape.op("repeat", (x,), scores.many * scores.m * scores.k) if heads.repeats else x


def _eager(setting: Setting, query: Value, key: Value, value: Value, heads: Heads, mask: Value | None) -> Value:
    """GPT-lite's, and that of short texts in bf16 on a CPU (finetune/models/gptlite.py, short_attention.py). matmul
    copies what it cannot flatten. The softmax is in fp32: on a GPU one kernel reads fp16 and writes fp32; bf16 is
    converted first (aten/src/ATen/native/SoftMax.cpp)."""
    tape, copies = setting.tape, not heads.repeats and not heads.by_head
    wide_key, wide_value = _repeated(tape, key, heads), _repeated(tape, value, heads)
    scores = tape.matmul(tape.copy(query), tape.copy(wide_key) if copies else wide_key, heads.scores)
    scores = tape.scale(scores)
    if mask is None and heads.causal:
        mask = tape.op("mask", (), heads.scores.m * heads.scores.n, bytes_each=1, needs_grad=False)
    scores = scores if mask is None else tape.add(scores, mask)
    joined = tape.numbers.device == "cuda" and tape.numbers.is_fp16
    shares = tape.softmax(scores, FP32_BYTES) if joined else tape.softmax(tape.cast(scores, FP32_BYTES))
    weights = tape.cast(shares, query.bytes_each)
    tape.hold(scores)  # softmax(scores).to(dtype): the variable is rebound only when the result exists
    weights = tape.dropout(weights, heads.dropout)
    mixed = tape.matmul(weights, tape.copy(wide_value) if copies else wide_value, heads.mix)
    out = tape.op("copy", (mixed,), mixed.elements)  # transpose(1, 2).contiguous(), whose gradient is copied back
    tape.hold(mixed, wide_key, wide_value, scores)
    tape.keep(weights)  # attention returns them, and its caller keeps them in a variable
    return out


def _math(setting: Setting, query: Value, key: Value, value: Value, heads: Heads, mask: Value | None) -> Value:
    """aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math: in fp32."""
    tape, batch, size = setting.tape, setting.batch, query.bytes_each
    query, key, value = (tape.cast(part, FP32_BYTES) for part in (query, key, value))
    key, value = _repeated(tape, key, heads), _repeated(tape, value, heads)
    scaled, scaled_key = tape.scale(query), tape.scale(key)
    turned_key = scaled_key if "k" in heads.by_head else tape.copy(scaled_key)
    turned = scaled if "q" in heads.by_head else tape.copy(scaled)
    if heads.causal if mask is None else mask.bytes_each == 1:  # made floats
        many = (batch.rows if batch.documents else 1) * heads.scores.m * heads.scores.n
        mask = tape.op("mask", (), many, bytes_each=FP32_BYTES, needs_grad=False)
    masks = () if mask is None else (mask,)
    scores = tape.matmul(turned, turned_key, heads.scores, casts=False)
    for one in masks:
        scores = tape.add_in_place(scores, one)
    weights = tape.dropout(tape.softmax(scores, is_safe=True), heads.dropout)
    low = tape.cast(weights, size)
    mixed = tape.matmul(weights, value if "v" in heads.by_head else tape.copy(value), heads.mix, casts=False)
    out = tape.cast(mixed, size)
    tape.hold(scaled, low, query, key, value, *masks)
    return tape.op("copy", (out,), out.elements)  # as in `_eager`


def _fused(setting: Setting, query: Value, key: Value, value: Value, heads: Heads, mask: Value | None) -> Value:
    """Flash or memory-efficient: saves its inputs, its output, and one log-sum-exp per row. Causal attention computes
    half of the products; the backward pass computes five (Dao et al., arXiv 2205.14135, algorithm 4)."""
    tape, numbers, scores = setting.tape, setting.tape.numbers, heads.scores
    query, key, value = (tape.cast(part, numbers.product_bytes) for part in (query, key, value))
    if mask is not None and setting.batch.sharing == 1:  # ranks that share a text exchange first: SharedTape
        if numbers.attention == "sdpa":
            key, value = _repeated(tape, key, heads), _repeated(tape, value, heads)
        if mask.bytes_each == 1:  # made floats, and expanded to each row (attention.cpp, convert_boolean_attn_mask)
            many = setting.batch.rows * scores.m * scores.n
            mask = tape.op("mask", (mask,), many, bytes_each=numbers.product_bytes, needs_grad=False)
    length = max(scores.m // 2 if heads.causal and mask is None else scores.n, 1)
    first, second = replace(scores, n=length), replace(heads.mix, k=length)
    masks = () if mask is None else (mask,)
    return tape.op(
        FLASH_ATTENTION_2 if numbers.attention == FLASH_ATTENTION_2 else ATTENTION,
        (query, key, value, *masks), second.m * second.n * second.many,
        saves=(query, key, value, *masks), saves_output=True, extra_saved=FP32_BYTES * scores.many * scores.m,
        gemms=(first, second), gemms_back=(first, first, first, second, second),
        scratch_back=_flash_scratch(heads, query.bytes_each) if numbers.device == "cuda" and not masks else 0,
    )  # fmt: skip


def _flash_scratch(heads: Heads, bytes_each: int) -> int:
    """Scratch bytes of flash attention's backward pass on a GPU, in half precision: the fp32 gradient of queries, one
    sum per row, and gradients of keys and values for every query head
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    if bytes_each == FP32_BYTES:
        return 0  # fp32 runs the memory-efficient kernel
    scores = heads.scores
    rows = scores.many * -(-scores.m // 128) * 128
    width = -(-scores.k // 32) * 32
    expanded = 2 * scores.many * scores.m * scores.k * bytes_each if heads.repeats else 0
    return rows * (width + 1) * FP32_BYTES + expanded
