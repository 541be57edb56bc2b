"""Dropout for CPUs on which torch draws masks one number at a time: all but Intel's (torch 2.13, aten/src/ATen/native/
cpu/DistributionKernels.cpp, bernoulli_scalar_kernel). Here each 64-bit draw makes two or four numbers of a mask."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from finetune.host.hardware import cpuinfo

INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes


def mask_like(x: torch.Tensor, p: float) -> torch.Tensor:
    """0 with probability `p`, else 1 / (1 - p), in the shape and precision of `x`, from torch's default generator. `p`
    is rounded to a multiple of 2^-31, or of 2^-15 for numbers of 16 bits, which have a precision of 2^-8 to 2^-11."""
    size, sign = x.element_size(), 8 * x.element_size() - 1
    kept, scale = _kept_and_scale(p, x.dtype)
    draws = torch.empty(-(-x.numel() * size // 8), dtype=torch.int64).random_().view(INTEGERS[size])
    # Below `kept`, the difference is negative: its sign, copied to all bits, selects the bits of `scale`.
    draws.bitwise_and_(2**sign - 1).sub_(kept).bitwise_right_shift_(sign).bitwise_and_(scale)
    return draws[: x.numel()].view(x.dtype).view(x.shape)


@cache
def _kept_and_scale(p: float, dtype: torch.dtype) -> tuple[int, int]:
    """How many of the values of a draw are kept, and the bits of 1 / (1 - p)."""
    integers = INTEGERS[dtype.itemsize]
    kept = min(round((1 - p) * 2 ** (8 * dtype.itemsize - 1)), torch.iinfo(integers).max)
    return kept, int(torch.tensor(1 / (1 - p), dtype=dtype).view(integers))


@cache
def draws_slowly() -> bool:
    """Whether torch draws masks one number at a time on this machine's CPU."""
    return cpuinfo("vendor_id") != "GenuineIntel"


def dropped(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout in training. torch.compile has its own way of drawing."""
    is_own = 0 < p < 1 and x.device.type == "cpu" and x.element_size() in INTEGERS and not torch.compiler.is_compiling()
    return x * mask_like(x, p) if is_own and draws_slowly() else nn.functional.dropout(x, p)


class Dropout(nn.Dropout):
    """Like torch's; it drops other numbers with the same seed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropped(x, self.p) if self.training else x


def use_fast_dropout(model: nn.Module) -> None:
    """Replace torch's dropout modules in `model`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout and not child.inplace:
                setattr(module, name, Dropout(child.p).train(child.training))


def use_fast_dropout_in_layers(pipeline: Any) -> None:
    """The same inside the layers of a DeepSpeed PipelineModule. A layer that is itself a dropout stays torch's:
    DeepSpeed runs layers from a list beside the registered children (deepspeed 0.19.8, runtime/pipe/module.py, _build),
    and `eval` would reach only a new child."""
    for layer in pipeline.forward_funcs:
        if isinstance(layer, nn.Module):
            use_fast_dropout(layer)
