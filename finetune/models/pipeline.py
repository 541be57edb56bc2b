"""The whole interface that a model implements to be trained as a pipeline by `finetune.training.pipeline`, and the base
class of the classifiers that implement it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.models.experts import Mixture

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec  # importing DeepSpeed fixes its device, which `start` must set first

SEEDS_APART = 1_000_003  # more than any model has layers, so that runs with adjacent seeds share no layer seed


@dataclass(frozen=True)
class PipelineLayer:
    """`spec` is the layer, or builds it on its stage. In the whole model, its weights are called `name` + "." + their
    name in the layer."""

    spec: LayerSpec | nn.Module
    name: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.spec).__name__ if isinstance(self.spec, nn.Module) else str(self.spec.typename.__name__)

    def look(self) -> nn.Module:
        """The layer for inspection, not to be run: the existing one, or one on the meta device that takes no memory."""
        if isinstance(self.spec, nn.Module):
            return self.spec
        with torch.device("meta"):
            built: nn.Module = self.spec.build()
        return built

    def build(self) -> nn.Module:
        """A separate copy of the layer, to measure."""
        built: nn.Module = copy.deepcopy(self.spec) if isinstance(self.spec, nn.Module) else self.spec.build()
        return built

    def weight_name(self, inside: str) -> str:
        """The name in the whole model of the layer's weight `inside`."""
        return f"{self.name}.{inside}" if self.name else inside


@dataclass(frozen=True)
class PipelineModel:
    """A model as a list of layers, each of which takes the output of the one before: a tensor or a tuple of tensors.

    `split` turns a collated batch into the first layer's input and the last stage's targets. `loss` is the sum over the
    items of a micro-batch, `items` their number: the trainer divides by the items of the whole global batch, so that
    micro-batches of uneven size add up correctly. `figures` returns (rows, k), or (1, k) already summed over rows; an
    evaluation sums them.
    """

    layers: Sequence[PipelineLayer]
    split: Callable[[dict[str, torch.Tensor]], tuple[Any, Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    items: Callable[[Any], torch.Tensor]
    figures: Callable[[Any, Any], torch.Tensor]
    checkpointed: Sequence[str] | None = None  # layer classes that may be recomputed; None for any with weights
    multiplied_parameters: int = 0  # parameters that multiply each token, for counting FLOPs; 0 if not counted
    config: Any = None  # the model class's config
    save: Callable[[Path], None] | None = None  # writes what `from_pretrained` needs beside the weights
    mixture: Mixture | None = None  # the experts of the whole model; None for a model without
    router_weight: float = 0.0  # of the routers' loss


def layer_seed(seed: int, place: int) -> int:
    """The seed for the initial weights of the layer at `place` in the list: they are the same whichever rank builds it,
    and whichever layers that rank builds before."""
    return seed * SEEDS_APART + place


def draw_layer(layer: nn.Module, draw: Callable[[nn.Module], None], seed: int, place: int) -> None:
    """Initialize the layer at `place`, calling `draw` on each module. torch's CPU random state is preserved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layer_seed(seed, place))
        for module in layer.modules():
            draw(module)


def layer_spec(kind: type[nn.Module], *args: Any, **kwargs: Any) -> LayerSpec:
    """A layer that is built as `kind(*args, **kwargs)`, on its stage only."""
    from deepspeed.pipe import LayerSpec

    return LayerSpec(kind, *args, **kwargs)


def sequential_layers(layers: Sequence[LayerSpec | nn.Module]) -> list[PipelineLayer]:
    """A list's layers, with the names that `nn.Sequential` would give their weights."""
    return [PipelineLayer(layer, str(index)) for index, layer in enumerate(layers)]


class LayeredClassifier(PreTrainedModel):
    """A classifier whose layers run one after another, so that a pipeline can cut it anywhere. Each layer is made as
    `kind(config, place, seed)`, where `place` is its place in `ordered`; without a seed, its weights are torch's.
    `draw` initializes the weights of a module, and `figures` is the `PipelineModel`'s."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True  # it has no attention, but transformers requests the default all the same
    draw: Callable[[nn.Module], None]
    figures: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def ordered(self) -> list[nn.Module]:
        return list(self.layers)

    def _init_weights(self, module: nn.Module) -> None:
        self.draw(module)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.ordered:
            x = layer(x)
        return x

    def draw_weights(self, seed: int) -> None:
        """Initialize all weights exactly as the stages of a pipeline do."""
        for place, layer in enumerate(self.ordered):
            draw_layer(layer, self.draw, seed, place)

    @classmethod
    def pipeline(cls, config: Any, seed: int | None) -> PipelineModel:
        """The same for `finetune.training.pipeline`. With `seed` None, weights are not initialized: they will be
        loaded."""
        with torch.device("meta"):
            whole = cls(config)
        names = {module: name for name, module in whole.named_modules()}
        specs = [(layer_spec(type(one), config, place, seed), names[one]) for place, one in enumerate(whole.ordered)]
        return PipelineModel(
            layers=[PipelineLayer(*one) for one in specs],
            split=partial(split_batch, str(cls.main_input_name)),
            loss=summed_loss,
            items=count_labels,
            figures=cls.figures,
            multiplied_parameters=whole.num_parameters(),
            config=config,
            save=partial(save_config, cls, config),
        )


def split_batch(first: str, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first stage's input and the last stage's targets."""
    return batch[first], batch["labels"]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats, summed over rows: logits (B, classes), labels (B)."""
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """The number of rows, as a 0-d tensor."""
    return torch.tensor(labels.numel())


def save_config(kind: type[PreTrainedModel], config: Any, folder: Path) -> None:
    """Write what `save_pretrained` writes beside the weights."""
    config.architectures, config.dtype = [kind.__name__], torch.float32
    config.save_pretrained(folder)
