"""ResNets (transformers, models/resnet/modeling_resnet.py). A convolution counts as a product of unfolded images."""

from __future__ import annotations

from finetune.plan.families.resnet import HEAD, Conv, Layer, layers, stem
from finetune.plan.forward.losses import label_loss
from finetune.plan.forward.parts import Setting
from finetune.plan.values import FP32_BYTES, INT64_BYTES, Gemm, Value

Picture = tuple[Value, int]  # (rows, channels, side, side) and its side


def resnet(setting: Setting) -> Value:
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.rows
    with tape.segment("stem"):
        pixels = tape.given(0)  # the batch is already allocated
        pixels.elements = rows * stem(sizes).fan_in * setting.batch.image_size**2
        x, side = _conv(setting, (pixels, setting.batch.image_size), stem(sizes))
        x = tape.unary("relu", x)
        side = (side - 1) // 2 + 1
        pooled = rows * stem(sizes).fan_out * side * side
        x = tape.op("max_pool", (x,), pooled, saves=(x,), extra_saved=INT64_BYTES * pooled)
    for number, layer in enumerate(layers(sizes)):
        with tape.segment(layer.name, x, layer=number):
            x, side = _layer(setting, (x, side), layer)
    with tape.segment("head"):
        mean = tape.op("mean", (x,), rows * layers(sizes)[-1].convs[-1].fan_out)
        tape.keep(x)
        return label_loss(setting, tape.linear(mean, HEAD))


def _layer(setting: Setting, picture: Picture, layer: Layer) -> Picture:
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
    name = f"{conv.name}.convolution"
    casts = [tape.cast_weight(f"{name}.weight", name)] if tape.numbers.autocast else []
    x = tape.cast(x, tape.numbers.product_bytes)
    gemm = Gemm(rows * out * out, conv.fan_out, conv.kernel**2 * conv.fan_in)
    saves = (x, *(casts if x.needs_grad else ()))
    made = tape.op("convolution", (x, *casts), rows * conv.fan_out * out * out, saves=saves,
                   weights=() if casts else (f"{name}.weight",), module="" if casts else name,
                   gemms=(gemm,), gemms_back=gemm.back if x.needs_grad else gemm.back[1:])  # fmt: skip
    names = tuple(f"{conv.name}.normalization.{part}" for part in ("weight", "bias"))
    return tape.op("batch_norm", (made,), made.elements, saves=(made,), extra_saved=2 * FP32_BYTES * conv.fan_out,
                   weights=names, module=f"{conv.name}.normalization"), out  # fmt: skip
