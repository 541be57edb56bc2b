"""The forward pass of each model family, recorded on a tape as its modules run it in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from finetune.plan.exchange import SharedTape
from finetune.plan.families.decoders import STYLES
from finetune.plan.families.encoders import ENCODERS
from finetune.plan.forward.encoders import encoder
from finetune.plan.forward.gpt2 import gpt2, phi
from finetune.plan.forward.listed import gptlite, mlp, stage
from finetune.plan.forward.llama import llama_like
from finetune.plan.forward.parts import Batch, Part, Setting
from finetune.plan.forward.resnet import resnet
from finetune.plan.forward.t5 import t5
from finetune.plan.forward.traced import tape_of_trace
from finetune.plan.model import Model
from finetune.plan.tape import Tape
from finetune.plan.values import Numbers, Value

FORWARDS: dict[str, Callable[[Setting], Value]] = {
    "gpt2": gpt2,
    "gptlite": gptlite,
    "phi": phi,
    "mlp": mlp,
    "t5": t5,
    "resnet": resnet,
    **dict.fromkeys(ENCODERS, encoder),
    **dict.fromkeys(STYLES, llama_like),
}

# No sdpa: the first caps attention scores, the second has sinks (models/gpt_oss/modeling_gpt_oss.py, _supports_sdpa).
EAGER_ALONE = ("gemma2", "gpt_oss")


def build_tape(model: Model, batch: Batch, numbers: Numbers, checkpoint_interval: int = 0, part: Part | None = None,
               loss_chunk_tokens: int = 0) -> Tape:  # fmt: skip
    """The tape of one micro-batch on one rank. `part`: a pipeline stage, for families that support it."""
    if model.family in EAGER_ALONE and numbers.attention == "sdpa":
        numbers = replace(numbers, attention="eager")
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    packed = frozenset(tensor.name for tensor in model.tensors if tensor.is_packed)
    given = numbers, shapes, model.lora, packed, bool(checkpoint_interval)
    tape = Tape(*given) if batch.sharing == 1 else SharedTape(*given, sharing=batch.sharing, rows=batch.rows)
    setting = Setting(tape, model.sizes, batch, model.family, model.head, checkpoint_interval, loss_chunk_tokens)
    if model.trace is not None:
        tape.result = tape_of_trace(model.trace.of(batch.tokens), setting)
        return tape
    tape.result = stage(setting, part) if part else FORWARDS[model.family](setting)
    return tape
