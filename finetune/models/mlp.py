"""The benchmark MLPs: layers of one width, wide (3 of 8,192) or deep (2,048 of 256), as a Hugging Face model and as a
pipeline.

    model = MLPForClassification(MLPConfig(width=256, layers=2048))
    model(inputs=torch.randn(4, 256), labels=torch.zeros(4, dtype=torch.long)).loss
    MLPForClassification.pipeline(config, seed=42)     # the same layers; each stage builds only its own
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput

from finetune.models.pipeline import LayeredClassifier, draw_layer


class MLPConfig(PreTrainedConfig):
    """`layers` linear layers from `width` to `width`, each followed by a ReLU, and a head of `num_labels` classes."""

    model_type = "mlp"
    attribute_map: ClassVar = {"hidden_size": "width"}  # sizes the "auto" buckets

    width: int = 256
    layers: int = 4
    bias: bool = True


@torch.no_grad()  # type: ignore[untyped-decorator]
def draw(module: nn.Module) -> None:
    """He initialization, which keeps the scale through any number of ReLUs (arXiv 1502.01852, eq. 10); biases start at
    zero."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def row_figures(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each sample's loss, and 1 if the predicted class is correct: (B, 2)."""
    losses = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    return torch.stack([losses, (logits.argmax(-1) == labels).float()], dim=-1)


class MLPLayer(GradientCheckpointingLayer):
    def __init__(self, config: MLPConfig, place: int, seed: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(config.width, config.width, bias=config.bias)
        if seed is not None:
            draw_layer(self, draw, seed, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(x))  # (B, width)


class MLPHead(nn.Linear):
    """Features (B, width) to logits (B, classes)."""

    def __init__(self, config: MLPConfig, place: int, seed: int | None = None) -> None:
        super().__init__(config.width, config.num_labels)
        if seed is not None:
            draw_layer(self, draw, seed, place)


class MLPForClassification(LayeredClassifier):
    config_class = MLPConfig
    base_model_prefix = "mlp"
    main_input_name = "inputs"
    draw = staticmethod(draw)
    figures = staticmethod(row_figures)

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(MLPLayer(config, place) for place in range(config.layers))
        self.head = MLPHead(config, config.layers)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def ordered(self) -> list[nn.Module]:
        return [*self.layers, self.head]

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> SequenceClassifierOutput:
        """`inputs` (B, width), `labels` (B), to `logits` (B, classes)."""
        logits = self.logits(inputs)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(MLPConfig.model_type, MLPConfig, exist_ok=True)
AutoModelForSequenceClassification.register(MLPConfig, MLPForClassification, exist_ok=True)
