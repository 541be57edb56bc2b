"""Losses (transformers, loss/loss_utils.py)."""

from __future__ import annotations

from finetune.plan.forward.parts import Setting
from finetune.plan.tape import Tape
from finetune.plan.values import CHUNKED_LOSS, FP32_BYTES, INT64_BYTES, Gemm, Value

# Passes of the chunked loss over its logits besides the products: amax, sub_, exp_ and sum; mul for the
# gradients (torch 2.13, nn/modules/linear_cross_entropy.py, _linear_cross_entropy_batch_chunked_accumulator).
LOSS_PASSES, GRADIENT_PASSES = 6, 2


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
    """torch.nn.functional.linear_cross_entropy with `acc_policy="compact"`, a chunk of rows of logits at a time, in the
    precision of the products (torch 2.13, nn/modules/linear_cross_entropy.py). In fp32 the summed loss is requested,
    whose gradients are made in the forward pass; in half precision per-token losses, whose gradients are made in the
    backward pass, from recomputed logits (finetune/models/chunked_loss.py)."""
    tape, rows, size = setting.tape, setting.batch.positions, setting.tape.numbers.product_bytes
    names = (weight, *(name for name in ("lm_head.bias",) if name in tape.shapes))
    vocabulary, hidden = tape.shapes[weight]
    taken = min(setting.loss_chunk_tokens, rows) * (vocabulary + (hidden if size == FP32_BYTES else 0)) * size
    casts = [tape.cast_weight(weight, "lm_head")] if tape.casts(weight) else []
    given, x = x, tape.cast(x, size)
    labels = tape.op("labels", (), rows, bytes_each=INT64_BYTES, needs_grad=False)  # a copy, shifted by one
    logits = Gemm(rows, vocabulary, hidden)
    trains = tape.trains(weight)
    gradients = logits.back if trains else logits.back[:1]
    used, module = (() if casts else names), ("" if casts else "lm_head")
    passes = LOSS_PASSES, LOSS_PASSES + GRADIENT_PASSES
    once, with_gradients = (count * rows * vocabulary * size for count in passes)
    if size < FP32_BYTES:
        loss = tape.op(CHUNKED_LOSS, (x, *casts), 1, saves=(x, labels, *casts), gemms=(logits,),
                       gemms_back=(logits, *gradients), scratch=taken, scratch_back=taken, weights=used, module=module,
                       bytes_each=FP32_BYTES, moved=once, moved_back=with_gradients)  # fmt: skip
    else:
        made = (rows + (vocabulary if trains else 0)) * hidden * size
        loss = tape.op(CHUNKED_LOSS, (x, *casts), 1, extra_saved=made, gemms=(logits, *gradients),
                       scratch=taken, weights=used, module=module, bytes_each=FP32_BYTES, moved=with_gradients,
                       moved_back=2 * made)  # fmt: skip
    tape.hold(given, x)
    tape.release_casts()
    return loss
