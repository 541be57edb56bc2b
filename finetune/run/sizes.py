"""The sizes of models from scratch, by --model_size. `plan` counts them, `finetune.models` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.errors import RequestError

# The tokenizer sets the vocabulary. `tiny` suits two CPU cores; `char` is nanoGPT's character model
# (config/train_shakespeare_char.py there), `small` the shape of the smallest GPT-2, `post` that of the GPT-lite study.
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


# Everything that --config_overrides may set, with GPTLiteConfig's defaults; a test checks that they match.
GPTLITE_SETTINGS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": None,
    "max_position_embeddings": 128,
    "hidden_act": "gelu",
    "dropout": 0.0,
    "bias": True,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "num_experts": None,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
COUNTS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "intermediate_size"),
    *("num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
)
SHARES = ("dropout", "attention_dropout")

# Mixtures of experts, in the architecture of Qwen3-MoE (transformers, models/qwen3_moe/): all layers have experts, and
# the routers' loss is on. `moe-tiny` has the width and depth of GPT-lite's `tiny`, and the 2 experts that a token gets
# have the inner width of its feed-forward part.
MOE_TYPE = "qwen3_moe"
MOE_SIZES: dict[str, dict[str, Any]] = {
    "moe-tiny": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    },
}
CAUSAL_SIZES = (*GPTLITE_SIZES, *MOE_SIZES)


def causal_shape(size: str, overrides: str | None, said: str = "--config_overrides") -> dict[str, Any]:
    """The config of a causal language model from scratch, except its vocabulary, with its `model_type`. Raises
    RequestError as `gptlite_shape` does."""
    if size in GPTLITE_SIZES:
        return {"model_type": "gptlite", **gptlite_shape(size, overrides, said)}
    shape = _changed(MOE_SIZES[size], MOE_SIZES[size], overrides, said, "mixture of experts")
    _check_experts(shape, said)
    if shape["num_attention_heads"] % shape["num_key_value_heads"]:
        raise RequestError(
            f"{said} num_key_value_heads={shape['num_key_value_heads']}: must divide the "
            f"{shape['num_attention_heads']} of num_attention_heads."
        )
    if shape["head_dim"] % 2:
        raise RequestError(f"{said} head_dim={shape['head_dim']}: must be even, for rotary positions.")
    return {"model_type": MOE_TYPE, **shape}


def gptlite_shape(size: str, overrides: str | None, said: str = "--config_overrides") -> dict[str, Any]:
    """The settings of a GPT-lite from scratch, except its vocabulary: those of a size, changed by --config_overrides.
    Raises RequestError for unknown or invalid settings."""
    shape = _changed(GPTLITE_SIZES[size], GPTLITE_SETTINGS, overrides, said, "GPT-lite")
    settled = GPTLITE_SETTINGS | shape
    if settled["hidden_size"] % settled["num_attention_heads"]:
        raise RequestError(
            f"hidden_size {settled['hidden_size']} cannot be shared by {settled['num_attention_heads']} heads: "
            f"it must be a multiple of num_attention_heads. Change one with {said}."
        )
    if settled["num_experts"] is not None:
        _check_experts(settled, said)
    return shape


def _check_experts(shape: dict[str, Any], said: str) -> None:
    if shape["num_experts_per_tok"] > shape["num_experts"]:
        raise RequestError(
            f"{said} num_experts_per_tok={shape['num_experts_per_tok']}: there are {shape['num_experts']} experts. "
            "Give at most as many."
        )


def _changed(
    shape: dict[str, Any], settings: dict[str, Any], overrides: str | None, said: str, what: str
) -> dict[str, Any]:
    """`shape` with --config_overrides, which may name what `settings` have."""
    shape = dict(shape)
    for part in filter(None, (overrides or "").split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if not value:
            raise RequestError(f"{said} {part}: write name=value, separated by commas.")
        if name not in settings:
            raise RequestError(f"{said} {part}: a {what} has no such setting. It has: {', '.join(settings)}.")
        try:
            shape[name] = _as_kind_of(settings[name], value)
        except ValueError as error:
            raise RequestError(f"{said} {part}: {error}") from error
    settled = settings | shape
    for name in (one for one in COUNTS if one in settled):
        value = settled[name]
        if value is not None and (value < 1 or value != int(value)):
            raise RequestError(f"{said} {name}={value}: must be a whole number of 1 or more.")
    for name in (one for one in SHARES if one in settled):
        if not 0 <= settled[name] < 1:
            raise RequestError(f"{said} {name}={settled[name]}: must be 0 or more, and less than 1.")
    return shape


def _as_kind_of(old: Any, text: str) -> Any:
    if isinstance(old, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false.")
        return text.lower() == "true"
    if isinstance(old, str):
        return text
    number = float(text)
    return int(number) if number.is_integer() and not (isinstance(old, float)) else number


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
DISTILBERT_POSITIONS = 512  # for a model from scratch, unless its samples are longer


def distilbert_shape(size: str, dropout: float | None, tokens: int | None) -> dict[str, Any]:
    """The settings of a DistilBERT from scratch that reads at least that many `tokens`, except its vocabulary and
    labels."""
    chosen, share = DISTILBERT_SIZES[size], 0.1 if dropout is None else dropout
    return {
        "n_layers": chosen.layers,
        "dim": chosen.width,
        "n_heads": chosen.heads,
        "hidden_dim": 4 * chosen.width,
        "max_position_embeddings": max(DISTILBERT_POSITIONS, tokens or 0),
        **dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), share),
    }


# `tiny` suits two CPU cores, `small` images of 32 x 32 (CIFAR-10); `original` is the paper's, for 224 x 224.
# `pooled_size` is the side length that the last convolution's maps are averaged to before the linear layers.
ALEXNET_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_sizes": [16, 48, 96, 64, 64], "classifier_size": 256, "pooled_size": 1},
    "small": {"stem_stride": 2, "pooled_size": 2, "classifier_size": 1024},
    "original": {"image_size": 224, "stem_kernel_size": 11, "stem_stride": 4, "pool_kernel_size": 3, "pooled_size": 6},
}

# The width of the first stage; each later stage doubles it. All have ResNet-18's layout: four stages of two basic
# blocks (arXiv 1512.03385, table 1). `resnet18` is that network, with 11.7M parameters for 1,000 classes.
RESNET_WIDTHS = {"tiny": 16, "small": 32, "resnet18": 64}
IMAGE_SIZES = {"resnet": tuple(RESNET_WIDTHS), "alexnet": tuple(ALEXNET_SIZES)}


def resnet_shape(size: str) -> dict[str, Any]:
    """The settings of a ResNet from scratch, except its classes."""
    width = RESNET_WIDTHS[size]
    return {
        "num_channels": 3,
        "embedding_size": width,
        "hidden_sizes": [width, 2 * width, 4 * width, 8 * width],
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
    }
