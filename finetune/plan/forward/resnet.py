"""ResNets, written down: their tensors and forward pass (transformers, models/resnet/modeling_resnet.py). A convolution
counts as a product of unfolded images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finetune.errors import RequestError
from finetune.plan.families.parts import Shape, Sizes
from finetune.plan.forward.losses import label_loss
from finetune.plan.forward.parts import Setting
from finetune.plan.values import FP32_BYTES, INT64_BYTES, Gemm, Value

HEAD = "classifier.1"
STEM = "resnet.embedder.embedder"
BOTTLENECK, REDUCTION = "bottleneck", 4
LAYER_TYPES = ("basic", BOTTLENECK)
Picture = tuple[Value, int]  # (rows, channels, side, side) and its side


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
    widths, depths = _widths(sizes), _list(sizes, "depths", [3, 4, 6, 3])
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
    fan_in, made = stem(sizes).fan_out, []
    for stage, (fan_out, depth) in enumerate(zip(widths, depths, strict=True)):
        for number in range(depth):
            halves = number == 0 and (stage > 0 or sizes.is_on("downsample_in_first_stage", False))
            name = f"resnet.encoder.stages.{stage}.layers.{number}"
            made.append(_layer(sizes, name, fan_in, fan_out, 2 if halves else 1))
            fan_in = fan_out
    return made


def width(sizes: Sizes) -> int:
    """Channels of the pictures that the head reads."""
    return _widths(sizes)[-1]


def _widths(sizes: Sizes) -> list[int]:
    return _list(sizes, "hidden_sizes", [256, 512, 1024, 2048])


def _list(sizes: Sizes, name: str, default: list[int]) -> list[int]:
    found = sizes.config.get(name, default)
    if not isinstance(found, list) or not found or not all(isinstance(one, int) and one > 0 for one in found):
        raise RequestError(f"{sizes.where}: {name} is {found!r}, but it must be a list of whole numbers of 1 or more.")
    return found


def _layer(sizes: Sizes, name: str, fan_in: int, fan_out: int, stride: int) -> Layer:
    changes = fan_in != fan_out or stride != 1
    shortcut = Conv(f"{name}.shortcut", fan_in, fan_out, 1, stride) if changes else None
    if sizes.word("layer_type", BOTTLENECK) == BOTTLENECK:
        inner = fan_out // REDUCTION
        first, second = (stride, 1) if sizes.is_on("downsample_in_bottleneck", False) else (1, stride)
        convs = [(fan_in, inner, 1, first), (inner, inner, 3, second), (inner, fan_out, 1, 1)]
    else:
        convs = [(fan_in, fan_out, 3, stride), (fan_out, fan_out, 3, 1)]
    return Layer(name, tuple(Conv(f"{name}.layer.{at}", *conv) for at, conv in enumerate(convs)), shortcut)


def _convs(sizes: Sizes) -> Iterator[tuple[Conv, int | None]]:
    """All in order, each with the number of its layer."""
    yield stem(sizes), None
    for number, layer in enumerate(layers(sizes)):
        yield from ((conv, number) for conv in (layer.shortcut, *layer.convs) if conv)


def tensors(sizes: Sizes) -> Iterator[tuple[str, Shape, int | None]]:
    """Name, shape and layer of each parameter."""
    for conv, layer in _convs(sizes):
        yield f"{conv.name}.convolution.weight", (conv.fan_out, conv.fan_in, conv.kernel, conv.kernel), layer
        yield f"{conv.name}.normalization.weight", (conv.fan_out,), layer
        yield f"{conv.name}.normalization.bias", (conv.fan_out,), layer
    yield f"{HEAD}.weight", (sizes.labels, width(sizes)), None
    yield f"{HEAD}.bias", (sizes.labels,), None


def buffers(sizes: Sizes) -> Iterator[tuple[str, Shape, int]]:
    """Name, shape and bytes per element of each."""
    for conv, _ in _convs(sizes):
        for part in ("running_mean", "running_var"):
            yield f"{conv.name}.normalization.{part}", (conv.fan_out,), 4
        yield f"{conv.name}.normalization.num_batches_tracked", (), 8


def resnet(setting: Setting) -> Value:
    """Records the forward pass on the setting's tape; returns the loss."""
    tape, sizes, rows, side = setting.tape, setting.sizes, setting.batch.rows, setting.batch.image_size
    with tape.segment("stem"):
        pixels = tape.given(0)  # the batch is already allocated
        pixels.elements = rows * stem(sizes).fan_in * side**2
        x, side = _conv(setting, (pixels, side), stem(sizes))
        x = tape.unary("relu", x)
        side = (side - 1) // 2 + 1
        pooled = rows * stem(sizes).fan_out * side * side
        x = tape.op("max_pool", (x,), pooled, saves=(x,), extra_saved=INT64_BYTES * pooled)
    for layer in layers(sizes):
        with tape.segment(layer.name, x):
            x, side = _residual(setting, (x, side), layer)
    with tape.segment("head"):
        mean = tape.op("mean", (x,), rows * width(sizes))
        tape.keep(x)
        return label_loss(setting, tape.linear(mean, HEAD))


def _residual(setting: Setting, picture: Picture, layer: Layer) -> Picture:
    """The residual is added in place (`hidden_state += residual`)."""
    tape, made = setting.tape, picture
    for conv in layer.convs:
        value, side = _conv(setting, made, conv)
        made = (tape.unary("relu", value) if conv is not layer.convs[-1] else value), side
    beside = picture[0] if layer.shortcut is None else _conv(setting, picture, layer.shortcut)[0]
    return tape.unary("relu", tape.add_in_place(made[0], beside)), made[1]


def _conv(setting: Setting, picture: Picture, conv: Conv) -> Picture:
    tape, rows = setting.tape, setting.batch.rows
    x, side = picture
    out = (side - 1) // conv.stride + 1  # padded by half the kernel
    gemm = Gemm(rows * out * out, conv.fan_out, conv.kernel**2 * conv.fan_in)
    made = tape.product("convolution", x, f"{conv.name}.convolution", gemm)
    names = tuple(f"{conv.name}.normalization.{part}" for part in ("weight", "bias"))
    # A GPU reads its input twice, for the means and to normalize, and both it and the gradient twice on the way back.
    passes = (3, 5) if tape.numbers.device == "cuda" else (2, 4)
    moved, back = (count * made.bytes for count in passes)
    return tape.op("batch_norm", (made,), made.elements, saves=(made,), extra_saved=2 * FP32_BYTES * conv.fan_out,
                   weights=names, module=f"{conv.name}.normalization", moved=moved, moved_back=back), out  # fmt: skip
