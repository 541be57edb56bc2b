"""What a model says of itself to be trained as a pipeline; `finetune.training.pipeline` asks for nothing more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec  # once imported, DeepSpeed has chosen its device; `start` says which first

SEEDS_APART = 1_000_003  # more than any model has layers, so that runs with neighbouring seeds share none


@dataclass(frozen=True)
class PipelineLayer:
    """`spec` builds the layer where its stage is, or is the layer; its weights are called `name` + "." + their name in
    the layer, in the whole model."""

    spec: LayerSpec | nn.Module
    name: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.spec).__name__ if isinstance(self.spec, nn.Module) else str(self.spec.typename.__name__)

    def look(self) -> nn.Module:
        """The layer to be looked at, not run: the one that is there, or one of the meta device without memory."""
        if isinstance(self.spec, nn.Module):
            return self.spec
        with torch.device("meta"):
            built: nn.Module = self.spec.build()
        return built

    def build(self) -> nn.Module:
        """A layer apart, to measure."""
        built: nn.Module = copy.deepcopy(self.spec) if isinstance(self.spec, nn.Module) else self.spec.build()
        return built

    def weight_name(self, inside: str) -> str:
        """Of the layer's weight `inside`, the name in the whole model."""
        return f"{self.name}.{inside}" if self.name else inside


@dataclass(frozen=True)
class PipelineModel:
    """A model as a list of layers, of which each takes what the one before it gives: a tensor, or a tuple of them.

    `split` makes of a collated batch what the first layer reads and what the last stage compares with. `loss` is the
    sum over the items of a micro-batch, `items` their number: the trainer divides by the items of the whole global
    batch, so that micro-batches of uneven size add up right. `figures` are (rows, k), or (1, k) that sum the rows
    up already; an evaluation sums them.
    """

    layers: Sequence[PipelineLayer]
    split: Callable[[dict[str, torch.Tensor]], tuple[Any, Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    items: Callable[[Any], torch.Tensor]
    figures: Callable[[Any, Any], torch.Tensor]
    checkpointed: Sequence[str] | None = None  # classes of layers that may be computed again; None for any with weights
    multiplied_parameters: int = 0  # those that a token is multiplied with, to count FLOPs by; 0 where nobody does
    config: Any = None  # as the model's class has it
    save: Callable[[Path], None] | None = None  # writes beside the weights what `from_pretrained` needs


def layer_seed(seed: int, place: int) -> int:
    """What the layer at `place` in the list draws its first weights by: a seed of its own, so that they are the same
    whichever rank builds it, and whichever layers it builds before."""
    return seed * SEEDS_APART + place


def draw_layer(layer: nn.Module, draw: Callable[[nn.Module], None], seed: int, place: int) -> None:
    """Draw the weights of the layer at `place`, module by module. torch's random state on the CPU stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layer_seed(seed, place))
        for module in layer.modules():
            draw(module)


def layer_spec(kind: type[nn.Module], *args: Any, **kwargs: Any) -> LayerSpec:
    """A layer that is built as `kind(*args, **kwargs)`, and only on its stage."""
    from deepspeed.pipe import LayerSpec

    return LayerSpec(kind, *args, **kwargs)


def sequential_layers(layers: Sequence[LayerSpec | nn.Module]) -> list[PipelineLayer]:
    """The layers of a list, with the names that `nn.Sequential` would give their weights."""
    return [PipelineLayer(layer, str(index)) for index, layer in enumerate(layers)]
