"""The benchmark MLPs: layers of one width, wide (3 of 8,192) or deep (2,048 of 256), as a Hugging Face model and as a
pipeline.

    model = MLPForClassification(MLPConfig(width=256, layers=2048))
    model(inputs=torch.randn(4, 256), labels=torch.zeros(4, dtype=torch.long)).loss
    layers = mlp_pipeline(config, seed=42)     # the same layers; each stage builds only its own
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput

from finetune.models.pipeline import PipelineLayer, PipelineModel, classifier_pipeline, draw_layer, layer_spec


class MLPConfig(PreTrainedConfig):
    """`layers` linear layers from `width` to `width`, each followed by a ReLU, and a head of `num_labels` classes."""

    model_type = "mlp"
    attribute_map: ClassVar = {"hidden_size": "width"}  # sizes the "auto" buckets

    width: int = 256
    layers: int = 4
    bias: bool = True


class MLPLayer(GradientCheckpointingLayer):
    """With `seed`, its weights are initialized as those of the layer at `place`."""

    def __init__(self, config: MLPConfig, place: int = 0, seed: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(config.width, config.width, bias=config.bias)
        if seed is not None:
            draw_layer(self, _draw, seed, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(x))  # (B, width)


class MLPHead(nn.Linear):
    """Features (B, width) to logits (B, classes)."""

    def __init__(self, config: MLPConfig, seed: int | None = None) -> None:
        super().__init__(config.width, config.num_labels)
        if seed is not None:
            draw_layer(self, _draw, seed, place=config.layers)


class MLPForClassification(PreTrainedModel):
    config_class = MLPConfig
    base_model_prefix = "mlp"
    main_input_name = "inputs"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # it has no attention, but transformers requests the default all the same

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(MLPLayer(config) for _ in range(config.layers))
        self.head = MLPHead(config)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _init_weights(self, module: nn.Module) -> None:
        _draw(module)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> SequenceClassifierOutput:
        """`inputs` (B, width), `labels` (B), to `logits` (B, classes)."""
        x = inputs
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _draw(module: nn.Module) -> None:
    """He initialization, which keeps the scale through any number of ReLUs (arXiv 1502.01852, eq. 10); biases start at
    zero."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def draw_weights(model: MLPForClassification, seed: int) -> None:
    """Initialize all of a model's weights exactly as the stages of a pipeline do."""
    for place, layer in enumerate([*model.layers, model.head]):
        draw_layer(layer, _draw, seed, place)


def mlp_pipeline(config: MLPConfig, seed: int | None) -> PipelineModel:
    """An MLP for `finetune.training.pipeline`. With `seed` None, weights are not initialized: they will be loaded."""
    layers = [PipelineLayer(layer_spec(MLPLayer, config, i, seed), f"layers.{i}") for i in range(config.layers)]
    head = PipelineLayer(layer_spec(MLPHead, config, seed), "head")
    return classifier_pipeline(MLPForClassification, config, [*layers, head], row_figures)


def row_figures(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each sample's loss, and 1 if the predicted class is correct: (B, 2)."""
    losses = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    return torch.stack([losses, (logits.argmax(-1) == labels).float()], dim=-1)


AutoConfig.register(MLPConfig.model_type, MLPConfig, exist_ok=True)
AutoModelForSequenceClassification.register(MLPConfig, MLPForClassification, exist_ok=True)
