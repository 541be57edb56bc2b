"""AlexNet (Krizhevsky et al. 2012, as one column: arXiv 1404.5997), as a Hugging Face model and as a pipeline.

    config = AlexNetConfig(num_labels=10)
    model = AlexNetForImageClassification(config)
    AlexNetForImageClassification.pipeline(config, seed=42)     # the same layers; each stage builds only its own

It has no batch norm, and nothing else depends on the rest of the batch: the loss is the same however samples are spread
over ranks. Importing this module registers it with AutoConfig and AutoModelForImageClassification.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from finetune.models.pipeline import LayeredClassifier, draw_layer, summed_loss

CONVOLUTIONS, POOLED = 5, (0, 1, 4)  # how many, and which are followed by a max-pool
LAYERS = CONVOLUTIONS + 3
HEAD_STD = 0.01  # used for all weights in Krizhevsky et al. 2012, section 5


class AlexNetConfig(PreTrainedConfig):
    """The shape of an AlexNet. `dropout` acts before the first two linear layers."""

    model_type = "alexnet"
    attribute_map: ClassVar = {"hidden_size": "classifier_size"}  # sizes the "auto" buckets

    num_channels: int = 3
    image_size: int = 32
    hidden_sizes: list[int] | tuple[int, ...] = (64, 192, 384, 256, 256)
    stem_kernel_size: int = 3
    stem_stride: int = 1
    pool_kernel_size: int = 2
    pooled_size: int = 2
    classifier_size: int = 4096
    dropout: float | int = 0.5


class AlexNetConvolution(GradientCheckpointingLayer):
    """The convolution at `place` with its ReLU and, for three of the five, a max-pool."""

    def __init__(self, config: AlexNetConfig, place: int, seed: int | None = None) -> None:
        super().__init__()
        sizes = [config.num_channels, *config.hidden_sizes]
        kernel = (config.stem_kernel_size, 5, 3, 3, 3)[place]
        stride = config.stem_stride if place == 0 else 1
        padding = 2 if kernel > 3 else 1
        self.convolution = nn.Conv2d(sizes[place], sizes[place + 1], kernel, stride=stride, padding=padding)
        self.pool = nn.MaxPool2d(config.pool_kernel_size, 2) if place in POOLED else nn.Identity()
        if seed is not None:
            draw_layer(self, draw, seed, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.convolution.weight.dtype)  # pictures are fp32 even if a pipeline's weights are bf16
        return self.pool(nn.functional.relu(self.convolution(x)))  # (B, C, H, W)


class AlexNetHead(nn.Linear):
    """The linear map to logits."""


class AlexNetLinear(GradientCheckpointingLayer):
    """The linear layer at `place`: the first flattens its input, the last returns logits."""

    def __init__(self, config: AlexNetConfig, place: int, seed: int | None = None) -> None:
        super().__init__()
        self.is_first, self.is_last = place == CONVOLUTIONS, place == LAYERS - 1
        inputs = config.hidden_sizes[-1] * config.pooled_size**2 if self.is_first else config.classifier_size
        self.pool = nn.AdaptiveAvgPool2d(config.pooled_size) if self.is_first else nn.Identity()
        self.drop = nn.Dropout(0.0 if self.is_last else config.dropout)
        kind, outputs = (AlexNetHead, config.num_labels) if self.is_last else (nn.Linear, config.classifier_size)
        self.linear = kind(inputs, outputs)
        if seed is not None:
            draw_layer(self, draw, seed, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.drop(self.pool(x).flatten(1)))  # (B, features)
        return x if self.is_last else nn.functional.relu(x)


@torch.no_grad()  # type: ignore[untyped-decorator]
def draw(module: nn.Module) -> None:
    """He initialization, which keeps the scale through ReLUs (arXiv 1502.01852, eq. 10), and a small head, so that the
    initial loss is that of a uniform guess; biases start at zero."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        init.kaiming_normal_(module.weight, nonlinearity="relu")
        init.zeros_(module.bias)
    if isinstance(module, AlexNetHead):
        init.normal_(module.weight, std=HEAD_STD)


def summed_figures(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of all pictures, and their confusion matrix row by row, in float64: (1, 1 + classes^2)."""
    classes = logits.shape[-1]
    cells = torch.bincount(labels * classes + logits.argmax(-1), minlength=classes**2)
    return torch.cat([summed_loss(logits, labels).double()[None], cells.double()])[None]


class AlexNetForImageClassification(LayeredClassifier):
    """The loss is the mean over pictures, or with `num_items_in_batch` their sum divided by it, so that micro-batches
    add up correctly."""

    config_class = AlexNetConfig
    base_model_prefix = "alexnet"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules: ClassVar = ["AlexNetConvolution", "AlexNetLinear"]
    draw = staticmethod(draw)
    figures = staticmethod(summed_figures)

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__(config)
        kinds = [AlexNetConvolution] * CONVOLUTIONS + [AlexNetLinear] * (LAYERS - CONVOLUTIONS)
        self.layers = nn.ModuleList(kind(config, place) for place, kind in enumerate(kinds))
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **_: Any,
    ) -> ImageClassifierOutputWithNoAttention:
        """`pixel_values` (B, channels, H, W) and `labels` (B) -> `logits` (B, classes)."""
        logits, loss = self.logits(pixel_values), None
        if labels is not None:
            loss = summed_loss(logits, labels) / (len(labels) if num_items_in_batch is None else num_items_in_batch)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


AutoConfig.register(AlexNetConfig.model_type, AlexNetConfig, exist_ok=True)
AutoModelForImageClassification.register(AlexNetConfig, AlexNetForImageClassification, exist_ok=True)
