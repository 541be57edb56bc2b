"""The benchmark MLPs (finetune/models/mlp.py), whole or a stage of a pipeline."""

from __future__ import annotations

from finetune.plan.forward.losses import label_loss
from finetune.plan.forward.parts import Part, Setting, stack
from finetune.plan.forward.stages import Listed
from finetune.plan.values import Value


def mlp(setting: Setting) -> Value:
    layers = setting.sizes("layers")
    x = stack(setting, _batch(setting), range(layers), _name, lambda index, x: _layer(setting, index, x))
    with setting.tape.segment("head"):
        return _head(setting, x)


def listed(setting: Setting, part: Part) -> Listed:
    layers, width = setting.sizes("layers"), setting.sizes("width")
    given = setting.tape.given(setting.batch.rows * width, needs_grad=True) if part.first else _batch(setting)
    names = [*map(_name, range(layers)), "head"]
    return Listed(names, given, lambda at, x: _layer(setting, at, x) if at < layers else _head(setting, x))


def _name(index: int) -> str:
    return f"layers.{index}"


def _batch(setting: Setting) -> Value:
    x = setting.tape.given(0)  # it is there already
    x.elements = setting.batch.rows * setting.sizes("width")
    return x


def _layer(setting: Setting, index: int, x: Value) -> Value:
    tape, width, bias = setting.tape, setting.sizes("width"), setting.sizes.is_on("bias", True)
    made = tape.linear(x, f"{_name(index)}.linear", setting.batch.rows, width, width, bias)
    return tape.unary("relu", made, saves_output=True)


def _head(setting: Setting, x: Value) -> Value:
    sizes = setting.sizes
    return label_loss(setting, setting.tape.linear(x, "head", setting.batch.rows, sizes("width"), sizes.labels))
