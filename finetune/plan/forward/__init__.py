"""The forward pass of each family of models, written down on a tape as its modules run it in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from finetune.plan.families.decoders import STYLES
from finetune.plan.forward import gptlite as lite
from finetune.plan.forward import mlp as perceptron
from finetune.plan.forward.encoders import bert, distilbert, roberta
from finetune.plan.forward.gpt2 import gpt2, phi
from finetune.plan.forward.llama import llama_like
from finetune.plan.forward.parts import Batch, Part, Setting
from finetune.plan.forward.resnet import resnet
from finetune.plan.forward.stages import Listed, stage
from finetune.plan.forward.t5 import t5
from finetune.plan.model import Model
from finetune.plan.tape import Tape
from finetune.plan.values import Lora, Numbers, Value

FORWARDS: dict[str, Callable[[Setting], Value]] = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "gptlite": lite.gptlite,
    "phi": phi,
    "mlp": perceptron.mlp,
    "t5": t5,
    "resnet": resnet,
    **{family: llama_like(family) for family in STYLES},
}

LISTED: dict[str, Callable[[Setting, Part], Listed]] = {"gptlite": lite.listed, "mlp": perceptron.listed}
EAGER_ALONE = ("gemma2",)  # no sdpa: it caps attention's scores (models/gemma2/modeling_gemma2.py, _supports_sdpa)


def build_tape(
    model: Model,
    batch: Batch,
    numbers: Numbers,
    *,
    checkpoint_interval: int = 0,
    part: Part | None = None,
    loss_chunk_tokens: int = 0,
    lora: Lora | None = None,
) -> Tape:
    """One micro-batch of one rank. `part`: a stage of a pipeline, of a family that has one."""
    if model.family in EAGER_ALONE and numbers.attention == "sdpa":
        numbers = replace(numbers, attention="eager")
    tape = Tape(numbers, lora, inputs_need_grad=bool(checkpoint_interval))
    setting = Setting(tape, model.sizes, batch, model.head, checkpoint_interval, loss_chunk_tokens)
    if part is not None:
        tape.result = stage(setting, model.family, part, LISTED[model.family](setting, part))
    else:
        tape.result = FORWARDS[model.family](setting)
    return tape
