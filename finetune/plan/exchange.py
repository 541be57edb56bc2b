"""Ranks that share a text (--sequence_parallel_size): each computes on its own tokens, but attention on all tokens for
its share of the heads. A tape of a rank's own tokens gets the exchange around each attention.

Follows DeepSpeed's Ulysses operator by operator (0.19.8, runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF;
sequence/layer.py, _dim_zero_all_to_all), as finetune/training/sequence_parallel.py calls it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finetune.errors import RequestError
from finetune.plan.tape import Tape
from finetune.plan.values import ALL_TO_ALL, ATTENTION, FLASH_ATTENTION_2, INT64_BYTES, SENT, Gemm, Op, Storage, Value

POSITIONS = 2  # copies of all tokens' positions: gathered from each rank, and joined
PROJECTED = ("linear", "chunk", "slice")  # operators whose views of heads need gradients in their own layout


class SharedTape(Tape):
    """A tape of `rows` texts that `sharing` ranks share."""

    def __init__(self, *args: Any, sharing: int, rows: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sharing, self.rows = sharing, rows

    def _add(self, op: Op) -> None:
        if op.name in (ATTENTION, FLASH_ATTENTION_2):
            self._attend(op)
        else:
            super()._add(op)

    def _attend(self, op: Op) -> None:
        """Attention of all tokens. A rank has as many elements of queries and of outputs as before, of keys and values
        more if they are copied: each rank needs a whole head. Raises RequestError for attention with a mask that is not
        of documents."""
        query, key, value, *masks = op.inputs
        if any(mask.bytes_each > 1 for mask in masks):
            raise RequestError("--sequence_parallel_size: attention with a mask is not planned. Drop it.")
        score = op.gemms[0]
        heads, tokens = score.many // self.rows, score.m * self.sharing
        pairs = heads * key.elements // query.elements
        copies = max(self.sharing // pairs, 1)
        local, local_pairs = heads // self.sharing, max(pairs // self.sharing, 1)
        positions = self.op("positions", (), POSITIONS * self.rows * tokens, bytes_each=INT64_BYTES, needs_grad=False)
        sent = [self._sent(part, many) for part, many in ((query, 1), (key, copies), (value, copies))]
        counts = (local, local_pairs, local_pairs)
        laid = [self._by_head(part, count) for part, count in zip(sent, counts, strict=True)]
        repeats = local // local_pairs if local_pairs > 1 else 1  # one head is viewed as several
        given = (*laid[:1], *self._masked(laid[1:], repeats, masks[0])) if masks else tuple(laid)
        out, *rest = op.outputs
        mixed = Value(out.elements, out.bytes_each, Storage(out.bytes), out.needs_grad)
        renamed = {old.storage: new.storage for old, new in zip((*op.inputs, out), (*given, mixed), strict=True)}
        grown = {gemm: self._grown(gemm, gemm == score) for gemm in op.gemms}
        evened = local == local_pairs and heads != pairs  # no head of keys serves several of queries any more
        super()._add(
            replace(
                op, inputs=given, outputs=(mixed, *rest), saved=tuple(renamed.get(one, one) for one in op.saved),
                gemms=tuple(grown[gemm] for gemm in op.gemms), gemms_back=tuple(grown[gemm] for gemm in op.gemms_back),
                moved=op.moved + sum(new.bytes - old.bytes for new, old in zip(given, op.inputs, strict=True)),
                scratch_back=max(op.scratch_back - 2 * query.bytes, 0) if evened else op.scratch_back,
            )
        )  # fmt: skip
        by_token = self._by_head(mixed, local)
        # A rank's own tokens lie together unless there are several texts; what arrives is laid out head by head.
        arrived = self._exchange(self.copy(by_token) if self.rows > 1 else by_token)
        # The rank's tokens with all heads, as the caller's value; several texts are transposed once more.
        last = self.copy(arrived) if self.rows > 1 else arrived
        moved = last.bytes + out.bytes
        super()._add(Op("copy", (last,), (out,), passes_on=True, moved=moved, moved_back=moved))
        self.hold(*op.inputs, *given, positions, by_token)  # variables of the exchange's forward function

    def _masked(self, pairs: list[Value], repeats: int, mask: Value) -> tuple[Value, ...]:
        """Keys and values for each query head, and the mask as floats: with a mask, attention takes only those
        (transformers, integrations/sdpa_attention.py; aten/src/ATen/native/transformers/attention.cpp)."""
        wide = [self.op("repeat", (part,), repeats * part.elements) for part in pairs] if repeats > 1 else pairs
        floats = self.op("mask", (mask,), mask.elements, bytes_each=self.numbers.product_bytes, needs_grad=False)
        return *wide, floats

    def _sent(self, part: Value, copies: int) -> Value:
        """One of queries, keys and values, exchanged: (tokens of the text, rows, heads of the rank, width)."""
        made_by = (op.name for op in reversed(self.segments[-1].ops) if part in op.outputs)
        if next(made_by, "") in PROJECTED:
            part = self.alias(part)
        if copies > 1:
            part = self.op("repeat", (part,), copies * part.elements)
        return self._exchange(self.copy(part))

    def _exchange(self, given: Value) -> Value:
        """The buffer to send and the one to receive. Gradients arrive in another layout, so are copied first."""
        made = self.op(ALL_TO_ALL, (given,), given.elements, kernels=0, kernels_back=0, moved=0, moved_back=0,
                       scratch_back=given.bytes)  # fmt: skip
        self.hold(given)
        return made

    def _by_head(self, part: Value, heads: int) -> Value:
        """Transposed for attention, or back; one head of one text has one layout."""
        return self.copy(part) if heads > 1 or self.rows > 1 else part

    def _grown(self, gemm: Gemm, is_score: bool) -> Gemm:
        """The same product for all tokens and this rank's heads: of queries and keys, or of weights and values."""
        length = {"n": gemm.n * self.sharing} if is_score else {"k": gemm.k * self.sharing}
        return replace(gemm, m=gemm.m * self.sharing, many=gemm.many // self.sharing, **length)


def exchanges_of(tape: Tape, *kinds: str) -> tuple[list[int], list[int]]:
    """Bytes that a rank sends, or receives if that is more, in each exchange of a micro-batch's forward pass, and of
    its backward pass with recomputation: of some `kinds` in SENT, or of all. Positions, gathered beside each attention,
    and numbers of tokens, sent before these, are too few to count."""
    made = [
        (max(op.inputs[0].bytes, op.outputs[0].bytes), part.recomputed)
        for part in tape.segments
        for op in part.ops
        if op.name in (kinds or SENT)
    ]
    ahead = [size for size, _ in made]
    return ahead, ahead + [size for size, is_again in made if is_again]
