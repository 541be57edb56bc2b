"""Losses (transformers, loss/loss_utils.py)."""

from __future__ import annotations

from finetune.plan.forward.parts import Setting
from finetune.plan.tape import Tape
from finetune.plan.values import CHUNKED_LOSS, FP32_BYTES, INT64_BYTES, Gemm, Value
from finetune.run.facts import SCORED_PARTS


def output_in_fp32(tape: Tape, logits: Value) -> None:
    """The model's output keeps the logits until the loss is read from it; with autocast accelerate converts them
    (accelerate/utils/operations.py, ConvertOutputsToFp32)."""
    tape.hold(logits)
    tape.release_casts()
    if tape.numbers.autocast and logits.bytes_each < FP32_BYTES:
        tape.op("outputs to fp32", (logits,), logits.elements, bytes_each=FP32_BYTES, needs_grad=False)


def cross_entropy(tape: Tape, logits: Value, rows: int) -> Value:
    """log_softmax, whose output is saved, and nll_loss; under autocast in fp32 (aten/src/ATen/autocast_mode.h)."""
    logits = tape.cast(logits, FP32_BYTES) if tape.numbers.autocast else logits
    scores = tape.op("log_softmax", (logits,), logits.elements, saves_output=True)
    return tape.op("nll_loss", (scores,), 1, saves=(scores,), moved=INT64_BYTES * rows)


def label_loss(setting: Setting, logits: Value) -> Value:
    """Cross-entropy with one label per sample, in the precision of the logits."""
    loss = cross_entropy(setting.tape, logits, setting.batch.rows)
    output_in_fp32(setting.tape, logits)
    return loss


def vector_loss(setting: Setting, x: Value) -> Value:
    """One vector per sample, the fp32 mean of its tokens (finetune.models.encoder, pooled), and a loss over these
    vectors, small by comparison."""
    tape, batch = setting.tape, setting.batch
    mask = tape.op("mask", (), batch.positions, bytes_each=FP32_BYTES, needs_grad=False)
    weighted = tape.multiply(tape.cast(x, FP32_BYTES), mask)
    hidden = x.elements // batch.positions
    return label_loss(setting, tape.op("sum", (weighted,), batch.rows * hidden, bytes_each=FP32_BYTES))


def chunked_loss(setting: Setting, x: Value, weight: str) -> Value:
    """A loss over a chunk of rows of logits at a time, and over parts of the chunk in fp32; its forward pass makes the
    gradients (finetune/models/chunked_loss.py, _SumAndLosses)."""
    tape, rows, size = setting.tape, setting.batch.positions, setting.tape.numbers.product_bytes
    names = (weight, *(name for name in ("lm_head.bias",) if name in tape.shapes))
    vocabulary, hidden = tape.shapes[weight]
    given, x = x, tape.cast(x, size)
    labels = tape.op("labels", (), rows, bytes_each=INT64_BYTES, needs_grad=False)  # a copy, shifted by one
    trains, casts, is_half = tape.trains(weight), tape.casts(weight), size < FP32_BYTES
    chunk, held = min(setting.loss_chunk_tokens, rows), vocabulary * hidden
    width = FP32_BYTES if casts or tape.numbers.is_fp16 else size  # of the weight's gradient
    added = held * size if trains and width != size else 0  # a chunk's part of that gradient
    scored = -(-chunk // SCORED_PARTS) * vocabulary * FP32_BYTES * (2 if is_half else 1)
    scratch = chunk * vocabulary * size + max(scored, chunk * hidden * size + max(added, chunk * hidden * size))
    logits, made = Gemm(rows, vocabulary, hidden), rows * hidden * size + (held * width if trains else 0)
    moved = rows * vocabulary * (4 * FP32_BYTES + (2 * size if is_half else 0)) + held * (size + width if casts else 0)
    loss = tape.op(CHUNKED_LOSS, (x, labels), 1, extra_saved=made, scratch=scratch + (held * size if casts else 0),
                   gemms=(logits, *logits.back(True, trains)), weights=names, module="lm_head",
                   bytes_each=FP32_BYTES, moved=moved + 2 * -(-rows // chunk) * (added + held * width if added else 0),
                   moved_back=2 * made)  # fmt: skip
    tape.hold(given, x)
    tape.release_casts()
    return loss
