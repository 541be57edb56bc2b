"""Finds the first tensor of a model that is not finite, in the forward or the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Found:
    """`what` is a tensor in words: "the output of encoder.layer.3 (Linear), float32 (16, 128): 7 NaN, 0 Inf"."""

    module: str
    what: str


class FoundLoss(Found):
    """A loss that is not finite. Rows of other micro-batches may be the cause, so what is found in a module comes
    first."""


class Finder:
    """Hooks every module under `root` while `looking`. A module's children run before it returns, so the first finding
    is the innermost. Tensors whose only non-finite values are -inf pass, because masks consist of them."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.first: Found | None = None
        self.outputs: list[tuple[str, str, torch.Tensor]] = []  # outputs that require a gradient, in order

    @contextmanager
    def looking(self) -> Iterator[Finder]:
        handles = [m.register_forward_hook(self._hook(name or "the model", m)) for name, m in self.root.named_modules()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, module: nn.Module) -> Callable[..., None]:
        kind = type(module).__name__

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    self.outputs.append((name, kind, tensor))
                odd = None if self.first else oddity(tensor)
                if odd:
                    self.first = Found(name, f"the output of {name} ({kind}), {odd}{_weights(module)}")

        return hook

    def backward(self, loss: torch.Tensor, parameters: bool) -> Found | None:
        """The first non-finite gradient of `loss` with respect to the recorded outputs and, with `parameters`, to the
        parameters. No gradient is accumulated in a parameter, so no hook of DDP or ZeRO communicates."""
        own = [(name, p) for name, p in self.root.named_parameters() if p.requires_grad] if parameters else []
        reached = [tensor for _, _, tensor in self.outputs]
        gradients = torch.autograd.grad(loss, [*reached, *(p for _, p in own)], allow_unused=True)
        for (name, kind, _), gradient in reversed(list(zip(self.outputs, gradients, strict=False))):
            if gradient is not None and (odd := oddity(gradient)):
                return Found(name, f"the gradient of the output of {name} ({kind}), {odd}")
        for (name, _), gradient in zip(own, gradients[len(reached) :], strict=True):
            if gradient is not None and (odd := oddity(gradient)):
                return Found(name.rpartition(".")[0], f"the gradient of {name}, {odd}")
        return None


def oddity(tensor: torch.Tensor) -> str:
    """ "float32 (16, 128): 7 NaN, 0 Inf"; "" for a tensor that is finite, or a mask."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return ""
    nan, positive = int(torch.isnan(tensor).sum()), int(torch.isposinf(tensor).sum())
    if not nan and not positive and tensor.numel() > 1:
        return ""
    shape = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return f"{shape}: {nan:,} NaN, {int(torch.isinf(tensor).sum()):,} Inf"


def odd_inputs(batch: dict[str, Any]) -> Found | None:
    """The first tensor of a batch that is not finite."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (odd := oddity(value)):
            return Found("", f"{name} of the batch itself, {odd}")
    return None


def _weights(module: nn.Module) -> str:
    """A description of the module's own weights if they are not finite themselves, else ""."""
    for name, parameter in module.named_parameters(recurse=False):
        if odd := oddity(parameter.detach()):
            return f"; its {name} is {odd}"
    return ""


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
