"""The tensors of ResNets (transformers, models/resnet/modeling_resnet.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finetune.errors import RequestError
from finetune.plan.families.parts import Shape, Sizes

HEAD = "classifier.1"
STEM = "resnet.embedder.embedder"
BOTTLENECK, REDUCTION = "bottleneck", 4
LAYER_TYPES = ("basic", BOTTLENECK)


@dataclass(frozen=True)
class Conv:
    """A convolution without bias, followed by a batch norm."""

    name: str
    fan_in: int
    fan_out: int
    kernel: int
    stride: int


@dataclass(frozen=True)
class Layer:
    """`convs` in sequence, and a parallel `shortcut` where the shape changes."""

    name: str
    convs: tuple[Conv, ...]
    shortcut: Conv | None


def stem(sizes: Sizes) -> Conv:
    return Conv(STEM, sizes("num_channels", default=3), sizes("embedding_size", default=64), 7, 2)


def layers(sizes: Sizes) -> list[Layer]:
    widths, depths = _list(sizes, "hidden_sizes", [256, 512, 1024, 2048]), _list(sizes, "depths", [3, 4, 6, 3])
    if len(widths) != len(depths):
        raise RequestError(
            f"{sizes.where}: hidden_sizes has {len(widths)} stages, depths {len(depths)}. Make them equal."
        )
    sizes.refuse_depth(sum(depths))
    kind = sizes.word("layer_type", BOTTLENECK)
    if kind not in LAYER_TYPES:
        raise RequestError(f"{sizes.where}: layer_type is {kind!r}, but it must be one of {', '.join(LAYER_TYPES)}.")
    if kind == BOTTLENECK and min(widths) < REDUCTION:
        raise RequestError(
            f"{sizes.where}: hidden_sizes has {min(widths)}, but a bottleneck needs {REDUCTION} or more."
        )
    fan_in, made = sizes("embedding_size", default=64), []
    for stage, (fan_out, depth) in enumerate(zip(widths, depths, strict=True)):
        for number in range(depth):
            halves = number == 0 and (stage > 0 or sizes.is_on("downsample_in_first_stage", False))
            name = f"resnet.encoder.stages.{stage}.layers.{number}"
            made.append(_layer(sizes, name, fan_in, fan_out, 2 if halves else 1))
            fan_in = fan_out
    return made


def _list(sizes: Sizes, name: str, default: list[int]) -> list[int]:
    found = sizes.config.get(name, default)
    if not isinstance(found, list) or not found or not all(isinstance(one, int) and one > 0 for one in found):
        raise RequestError(f"{sizes.where}: {name} is {found!r}, but it must be a list of whole numbers of 1 or more.")
    return found


def _layer(sizes: Sizes, name: str, fan_in: int, fan_out: int, stride: int) -> Layer:
    shortcut = None
    if fan_in != fan_out or stride != 1:
        shortcut = Conv(f"{name}.shortcut", fan_in, fan_out, 1, stride)
    if sizes.word("layer_type", BOTTLENECK) != BOTTLENECK:
        convs = Conv(f"{name}.layer.0", fan_in, fan_out, 3, stride), Conv(f"{name}.layer.1", fan_out, fan_out, 3, 1)
        return Layer(name, convs, shortcut)
    inner = fan_out // REDUCTION
    first, second = (stride, 1) if sizes.is_on("downsample_in_bottleneck", False) else (1, stride)
    parts = (
        Conv(f"{name}.layer.0", fan_in, inner, 1, first),
        Conv(f"{name}.layer.1", inner, inner, 3, second),
        Conv(f"{name}.layer.2", inner, fan_out, 1, 1),
    )
    return Layer(name, parts, shortcut)


def tensors(sizes: Sizes) -> Iterator[tuple[str, Shape, int | None]]:
    """Name, shape and layer of each parameter."""
    made, out = layers(sizes), layers(sizes)[-1].convs[-1].fan_out
    for layer, convs in [(None, (stem(sizes),)), *((at, _convs(one)) for at, one in enumerate(made))]:
        for conv in convs:
            yield f"{conv.name}.convolution.weight", (conv.fan_out, conv.fan_in, conv.kernel, conv.kernel), layer
            yield f"{conv.name}.normalization.weight", (conv.fan_out,), layer
            yield f"{conv.name}.normalization.bias", (conv.fan_out,), layer
    yield f"{HEAD}.weight", (sizes.labels, out), None
    yield f"{HEAD}.bias", (sizes.labels,), None


def buffers(sizes: Sizes) -> Iterator[tuple[str, Shape, int]]:
    """Name, shape and bytes per element of each."""
    for conv in (stem(sizes), *(conv for layer in layers(sizes) for conv in _convs(layer))):
        for part in ("running_mean", "running_var"):
            yield f"{conv.name}.normalization.{part}", (conv.fan_out,), 4
        yield f"{conv.name}.normalization.num_batches_tracked", (), 8


def _convs(layer: Layer) -> tuple[Conv, ...]:
    return ((layer.shortcut,) if layer.shortcut else ()) + layer.convs
