"""The forward pass of a model, recorded on a tape as its modules run it in eager mode: from its trace, or as it is
written down for ResNets."""

from __future__ import annotations

from itertools import takewhile

from finetune.plan.exchange import SharedTape
from finetune.plan.forward.parts import Batch, Part, Setting
from finetune.plan.forward.resnet import resnet
from finetune.plan.forward.stages import stage
from finetune.plan.forward.traced import tape_of_trace
from finetune.plan.model import Model
from finetune.plan.tape import Tape
from finetune.plan.values import Numbers


def build_tape(model: Model, batch: Batch, numbers: Numbers, checkpoint_interval: int = 0, part: Part | None = None,
               loss_chunk_tokens: int = 0) -> Tape:  # fmt: skip
    """The tape of one micro-batch on one rank. `part`: a pipeline stage, for families that support it."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    packed = frozenset(tensor.name for tensor in model.tensors if tensor.is_packed)
    given = numbers, shapes, model.lora, packed, bool(checkpoint_interval)
    tape = Tape(*given) if batch.sharing == 1 else SharedTape(*given, sharing=batch.sharing, rows=batch.rows)
    ahead = {tensor.layer for tensor in takewhile(lambda tensor: tensor.layer != 0, model.tensors)} - {None}
    setting = Setting(
        tape, model.sizes, batch, model.family, model.head, checkpoint_interval, loss_chunk_tokens, len(ahead)
    )
    if model.trace is None:
        tape.result = resnet(setting)
    else:
        trace = model.trace.of(batch.tokens)
        tape.result = stage(trace, setting, part) if part else tape_of_trace(trace, setting)
    return tape
