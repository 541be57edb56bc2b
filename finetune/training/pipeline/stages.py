"""Which layers form which stage: where the list is cut, and the resulting PipelineModule."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from finetune.errors import RequestError
from finetune.models.pipeline import PipelineLayer, PipelineModel, layer_seed
from finetune.plan.partition import balanced_bounds
from finetune.plan.schedule import Schedule, simulate
from finetune.training.pipeline.costs import LayerCost


@dataclass(frozen=True)
class Cut:
    """A model's layers divided into stages: stage s has layers `bounds[s]` up to, not including, `bounds[s + 1]`."""

    layers: Sequence[PipelineLayer]
    costs: Sequence[LayerCost]
    bounds: Sequence[int]
    micro_batches: int
    transfer_seconds: float
    method: str  # --partition_method, which determined the bounds

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def sums(self, of: Callable[[LayerCost], float]) -> list[float]:
        """For each stage, the sum over its layers."""
        pairs = pairwise(self.bounds)
        return [sum(of(cost) for cost in self.costs[first:last]) for first, last in pairs]

    def plan(self) -> Schedule:
        """The predicted schedule of a training step."""
        forward, backward = (self.sums(of) for of in (lambda c: c.forward_seconds, lambda c: c.backward_seconds))
        return simulate(self.micro_batches, forward, backward, self.transfer_seconds)

    @property
    def balance(self) -> float:
        """The mean stage time divided by the slowest: 1 if all are equal."""
        times = self.sums(lambda cost: cost.seconds)
        return sum(times) / (len(times) * max(times))

    def table(self) -> list[str]:
        """One line per stage: layers, parameters, share of the time."""
        times = self.sums(lambda cost: cost.seconds)
        parameters = self.sums(lambda cost: cost.parameters)
        lines = ["stage  layers  parameters    time  what"]
        for stage, (first, last) in enumerate(pairwise(self.bounds)):
            names = _grouped(layer.kind for layer in self.layers[first:last])
            share = times[stage] / sum(times)
            places = f"{first}-{last - 1}" if last - first > 1 else str(first)
            what = textwrap.shorten(names, 80, placeholder=" ...")
            lines.append(f"{stage:>5}  {places:>6}  {int(parameters[stage]):>10,}  {share:>6.1%}  {what}")
        return lines


def _grouped(names: Iterable[str]) -> str:
    groups = [(name, len(list(some))) for name, some in groupby(names)]
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in groups)


def check_cut(layers: Sequence[PipelineLayer], method: str, stages: int) -> None:
    """Raises RequestError for errors that do not depend on costs: more stages than layers, a class without layers."""
    if stages > len(layers):
        raise RequestError(
            f"--pipeline_parallel_size is {stages}, but the model has only {len(layers)} layers. Give at most "
            f"{len(layers)}."
        )
    if method.startswith("type:"):
        _of_type(layers, method)


def cut(
    layers: Sequence[PipelineLayer],
    costs: Sequence[LayerCost],
    method: str,
    stages: int,
    micro_batches: int,
    memory: MemoryRule,
) -> list[int]:
    """The bounds of the stages by `method`. Three methods are DeepSpeed's own functions; `balanced` is ours. Raises
    RequestError if a stage has no weights, because DeepSpeed cannot train it."""
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    if method == "balanced":
        bounds = balanced_bounds(
            [cost.seconds for cost in costs],
            stages,
            parameters=[cost.parameters for cost in costs],
            state_bytes=[cost.held * memory.state_bytes_per_parameter for cost in costs],
            activation_bytes=[cost.activation_bytes for cost in costs],
            in_flight=[min(stages - stage, micro_batches) for stage in range(stages)],
            limit_bytes=memory.limit_bytes,
        )
    elif method == "uniform":
        bounds = partition_uniform(num_items=len(layers), num_parts=stages)
    elif method == "parameters":
        bounds = partition_balanced(weights=[cost.parameters for cost in costs], num_parts=stages)
    else:
        bounds = partition_balanced(weights=_of_type(layers, method), num_parts=stages)
    bounds = [int(bound) for bound in bounds]
    for stage, (first, last) in enumerate(pairwise(bounds)):
        if not sum(cost.parameters for cost in costs[first:last]):
            what = "layers" if first == last else "weights of its own"
            raise RequestError(
                f"--partition_method {method} leaves stage {stage} of {stages} without {what}. Use balanced, or fewer "
                "stages."
            )
    return bounds


@dataclass(frozen=True)
class MemoryRule:
    """The memory that weights take on a stage, and the limit; None for no limit."""

    state_bytes_per_parameter: int
    limit_bytes: int | None


def _of_type(layers: Sequence[PipelineLayer], method: str) -> list[int]:
    pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
    names = [layer.kind for layer in layers]
    marks = [int(bool(pattern.search(name))) for name in names]
    if not any(marks):
        raise RequestError(f"--partition_method {method}: no layer class matches. The layers are {_grouped(names)}.")
    return marks


def stage_begins(x: Any) -> Any:
    """A no-op layer that marks where a stage begins. `type:NAME`, which cuts before each layer with that name, is the
    only public way to set the bounds; the alternative overrides DeepSpeed's `_partition_layers` and `_set_bounds`
    (runtime/pipe/module.py). Remove this once PipelineModule accepts bounds."""
    return x


def checkpoint_on_host(function: Callable[..., Any], *inputs: Any) -> Any:
    """Activation checkpointing that keeps `inputs` in pinned host memory, as the Trainer does it (transformers 5.23,
    modeling_utils.py, _activation_checkpointing_enable)."""
    with save_on_cpu(pin_memory=True):
        return checkpoint(function, *inputs, use_reentrant=False)


def build_module(
    model: PipelineModel,
    parts: Cut,
    loss: Any,
    checkpoint_interval: int,
    dynamic: bool,
    seed: int,
    offloads: bool = False,
) -> Any:
    """DeepSpeed's PipelineModule, which builds only the layers of this rank's stage. `dynamic` is for micro-batches of
    different shapes. Initial weights depend only on `seed` and the layer's index. `offloads`: activation checkpoints
    lie in host memory."""
    from deepspeed import checkpointing
    from deepspeed.pipe import PipelineModule

    marked, places = _marked(parts)
    built: list[Any] = []

    def seed_layer(index: int) -> None:
        # DeepSpeed also calls it before each layer in a forward pass, where dropout would draw the same mask each time.
        if not built and index in places:
            torch.manual_seed(layer_seed(seed, places[index]))

    with contextlib.redirect_stdout(io.StringIO()):  # it prints the layers, which `table` shows better
        module = PipelineModule(
            marked,
            num_stages=parts.stages,
            loss_fn=loss,
            seed_layers=True,
            seed_fn=seed_layer,
            base_seed=0,
            partition_method=f"type:{stage_begins.__name__}",
            activation_checkpoint_interval=checkpoint_interval,
            # The reentrant default fails if no input of a stage requires a gradient, as with token ids: "element 0 of
            # tensors does not require grad" (_is_checkpointable in runtime/pipe/module.py handles it for known models).
            activation_checkpoint_func=checkpoint_on_host if offloads else checkpointing.non_reentrant_checkpoint,
            # DeepSpeed does not checkpoint a group of layers if one of them is not in the list (_is_checkpointable).
            checkpointable_layers=[*model.checkpointed] if model.checkpointed and checkpoint_interval == 1 else None,
            dynamic_shape=dynamic,
        )
    built.append(module)
    made = [int(bound) for bound in module.partitions()]
    assert [bound - stage for stage, bound in enumerate(made)] == list(parts.bounds), "DeepSpeed cut elsewhere"
    return module


def _marked(parts: Cut) -> tuple[list[Any], dict[int, int]]:
    """The layers, with a mark where a stage begins, and by the index of a layer there its index in `parts.layers`."""
    marked: list[Any] = []
    places: dict[int, int] = {}
    for first, last in pairwise(parts.bounds):
        marked.append(stage_begins)
        for place in range(first, last):
            places[len(marked)] = place
            marked.append(parts.layers[place].spec)
    return marked, places


def weight_names(parts: Cut, module: Any) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
    """The parameters and saved buffers of this rank's stage, by their names in the whole model. Includes tied weights
    that an earlier stage owns: see `owned`."""
    places: dict[str, PipelineLayer] = {}
    ties: dict[str, PipelineLayer] = {}
    for stage, (first, last) in enumerate(pairwise(parts.bounds)):
        for index in range(first, last):
            layer = parts.layers[index]
            places[str(index + stage + 1)] = layer  # after the marks of this stage and of those before it
            if key := getattr(layer.spec, "key", None):
                ties.setdefault(key, layer)
    parameters = dict(module.named_parameters())
    named: dict[str, torch.nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        place, _, inside = name.partition(".")
        if place == "tied_modules":
            place, _, inside = inside.partition(".")
            layer = ties[place]
        else:
            layer = places[place]
        if name in parameters:
            named[layer.weight_name(inside)] = parameters[name]
        else:
            buffers[layer.weight_name(inside)] = tensor
    return named, buffers


def owned(parts: Cut, stage: int) -> set[str]:
    """The names of the weights that `stage` saves: tied ones belong to the first stage that has them."""
    seen: set[str] = set()
    mine: set[str] = set()
    for index, layer in enumerate(parts.layers):
        names = {layer.weight_name(name) for name in layer.look().state_dict()}
        if parts.bounds[stage] <= index < parts.bounds[stage + 1]:
            mine |= names - seen
        seen |= names
    return mine
