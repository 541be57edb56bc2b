"""What --model_size names: the shapes of models from scratch. `plan` counts them, `finetune.models` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What a size names, without the vocabulary, which is the tokenizer's. `tiny` suits two CPU cores; `char` is nanoGPT's
# character model (config/train_shakespeare_char.py there), `small` the shape of GPT-2's smallest, `post` that of the
# GPT-lite study.
GPTLITE_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 128},
    "char": {
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "max_position_embeddings": 256,
        "dropout": 0.2,
        "bias": False,
    },
    "small": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
    },
    "post": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 2048},
}


@dataclass(frozen=True)
class Size:
    """The shape of a DistilBERT. `base` is that of distilbert-base-uncased (arXiv 1910.01108)."""

    layers: int
    width: int
    heads: int
    vocab_size: int


DISTILBERT_SIZES = {
    "tiny": Size(layers=2, width=128, heads=2, vocab_size=8_000),
    "small": Size(layers=4, width=256, heads=4, vocab_size=16_000),
    "base": Size(layers=6, width=768, heads=12, vocab_size=30_522),
}

# What a size names. `tiny` suits two CPU cores, `small` pictures of 32 x 32 (CIFAR-10); `original` is the paper's, for
# 224 x 224. `pooled_size` is the side of what the last convolution's maps are averaged to before the linear layers.
ALEXNET_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_sizes": [16, 48, 96, 64, 64], "classifier_size": 256, "pooled_size": 1},
    "small": {"stem_stride": 2, "pooled_size": 2, "classifier_size": 1024},
    "original": {"image_size": 224, "stem_kernel_size": 11, "stem_stride": 4, "pool_kernel_size": 3, "pooled_size": 6},
}

# The width of the first stage; each later one doubles it. All have the layout of ResNet-18: four stages of two basic
# blocks (arXiv 1512.03385, table 1). `resnet18` is that network, 11.7M parameters with 1,000 classes.
RESNET_WIDTHS = {"tiny": 16, "small": 32, "resnet18": 64}
IMAGE_SIZES = {"resnet": tuple(RESNET_WIDTHS), "alexnet": tuple(ALEXNET_SIZES)}
