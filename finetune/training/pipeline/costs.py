"""Measures what each layer of a pipeline costs on this machine, and how long a transfer between stages takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import distributed

from finetune.models.pipeline import PipelineLayer, PipelineModel

REPEATS = 5  # after one warm-up; the median counts
ENOUGH_SECONDS = 0.5  # a layer this slow is measured only once after the warm-up


@dataclass(frozen=True)
class LayerCost:
    """One layer's cost per micro-batch: seconds, and the bytes that it keeps for its backward pass. If it is
    recomputed, backward includes a second forward pass and only its input is kept. `held` counts all parameters,
    `parameters` only those not tied to an earlier layer."""

    parameters: int
    held: int
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class _Look:
    """A layer on the meta device, where nothing is allocated or initialized."""

    own: int
    held: int
    modules: tuple[str, ...]  # its leaf modules: layers with the same modules cost the same


def _look(layers: Sequence[PipelineLayer]) -> list[_Look]:
    seen: set[str] = set()
    looks = []
    for layer in layers:
        module = layer.look()
        named = {layer.weight_name(name): p.numel() for name, p in module.named_parameters()}
        leaves = tuple(repr(part) for part in module.modules() if not list(part.children()))
        own = sum(size for name, size in named.items() if name not in seen)
        looks.append(_Look(own, sum(named.values()), leaves))
        seen |= named.keys()
    return looks


def measure_layers(
    model: PipelineModel,
    batch: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    recomputes: bool,
    offloads: bool = False,
) -> tuple[list[LayerCost], torch.Tensor]:
    """The cost of each layer on this machine, measured by passing a micro-batch through one layer after another,
    forward and backward; and the tensor that the middle layer passes to the next.

    Only one layer exists at a time, and among layers with the same modules and input shapes only one is built and
    measured. The loss belongs to the last layer. `recomputes`: activation checkpointing is on, for the layers that
    support it; `offloads`: it keeps their inputs on the host. torch's random state is preserved.
    """
    inputs, labels = model.split(batch)
    x, labels = send_to_device(inputs, device), send_to_device(labels, device)
    known: dict[Any, tuple[LayerCost, Any]] = {}
    costs: list[LayerCost] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for index, (layer, look) in enumerate(zip(model.layers, _look(model.layers), strict=True)):
            is_last = index == len(model.layers) - 1
            forward_fn = getattr(layer.spec, "forward_fn", None)
            key = (layer.kind, forward_fn, look.modules, look.own, is_last, _shapes(x))
            if key not in known:
                module = layer.build().to(device=device)
                if dtype != torch.float32:
                    module.to(dtype)
                run = module if forward_fn is None else lambda given, m=module, f=forward_fn: f(m, given)
                loss = (lambda out: model.loss(out, labels)) if is_last else None
                again = recomputes and (model.checkpointed is None or layer.kind in model.checkpointed)
                cost = _measure(run, x, loss, list(module.parameters()), look, again)
                cost = replace(cost, activation_bytes=0) if again and offloads else cost
                with torch.no_grad():
                    known[key] = cost, run(x)
                del module, run
            cost, x = known[key]
            costs.append(cost)
            if index == (len(model.layers) - 1) // 2:
                handed_on = x[0] if isinstance(x, tuple) else x
    return costs, handed_on


def _measure(run: Any, x: Any, loss: Any, parameters: list[torch.Tensor], look: _Look, recomputed: bool) -> LayerCost:
    forward: list[float] = []
    backward: list[float] = []
    kept = 0
    own = {p.untyped_storage().data_ptr() for p in parameters}
    halves = [p for p in parameters if p.dtype != torch.float32]
    totals = [torch.zeros_like(p, dtype=torch.float32) for p in halves]
    repeats = REPEATS + 1
    while len(forward) < repeats:
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        given = _leaves(x)
        start = now()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made = run(given)
            out = made if loss is None else loss(made)
        forward.append(now() - start)
        kept = sum(saved.values())
        first = out[0] if isinstance(out, tuple) else out
        if first.requires_grad:
            start = now()
            first.backward(torch.ones_like(first))
            for parameter, total in zip(halves, totals, strict=True):
                total += parameter.grad  # in half precision, DeepSpeed accumulates micro-batches in fp32
                parameter.grad = None
            backward.append(now() - start)
        else:
            backward.append(0.0)
        if forward[-1] + backward[-1] > ENOUGH_SECONDS:
            repeats = 2
    ahead, back = median(forward[1:]), median(backward[1:])
    if recomputed:
        back, kept = back + ahead, sum(t.numel() * t.element_size() for t in (x if isinstance(x, tuple) else (x,)))
    return LayerCost(look.own, look.held, ahead, back, kept)


def now() -> float:
    """Seconds on the host's clock, after the GPU has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _leaves(given: Any) -> Any:
    """Fresh graph leaves, as a stage receives its inputs."""
    if isinstance(given, tuple):
        return tuple(_leaves(t) for t in given)
    return given.detach().clone().requires_grad_(given.is_floating_point())


def _shapes(given: Any) -> Any:
    return tuple((t.shape, t.dtype) for t in (given if isinstance(given, tuple) else (given,)))


def agreed(costs: Sequence[LayerCost], device: torch.device) -> list[LayerCost]:
    """The costs with their times averaged over ranks."""
    rows = [[cost.forward_seconds, cost.backward_seconds] for cost in costs]
    figures = torch.tensor(rows, dtype=torch.float64, device=device)
    distributed.all_reduce(figures)
    figures /= distributed.get_world_size()
    return [
        replace(cost, forward_seconds=forward, backward_seconds=backward)
        for cost, (forward, backward) in zip(costs, figures.tolist(), strict=True)
    ]


def measure_transfer(like: torch.Tensor, peer: int, device: torch.device) -> float:
    """Seconds to send a tensor of this shape from rank 0 to rank `peer`. All ranks call it and get the result."""
    rank, seconds = distributed.get_rank(), []
    tensor = torch.zeros_like(like, device=device)
    for _ in range(REPEATS + 1):
        start = now()
        if rank == 0:
            distributed.send(tensor, peer)
            distributed.recv(tensor, peer)
        elif rank == peer:
            distributed.recv(tensor, 0)
            distributed.send(tensor, 0)
        seconds.append((now() - start) / 2)
    found = torch.tensor([median(seconds[1:])], dtype=torch.float64, device=device)
    distributed.broadcast(found, src=0)
    return float(found)
