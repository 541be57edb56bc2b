"""Which modules FSDP gathers together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from finetune.errors import RequestError
from finetune.training.runtime import settle_fsdp

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
MODELS = {
    "BertLayer": (BertForSequenceClassification, BertConfig(**SMALL, vocab_size=20)),
    "ViTLayer": (ViTForImageClassification, ViTConfig(**SMALL, image_size=8, patch_size=4)),
    "LlamaDecoderLayer": (LlamaForCausalLM, LlamaConfig(**SMALL, vocab_size=20)),
    "TransformerBlock": (
        DistilBertForSequenceClassification,
        DistilBertConfig(dim=16, n_layers=3, n_heads=2, hidden_dim=16, vocab_size=20),
    ),
}


def settled(model: Any, **plugin: Any) -> list[str] | None:
    made = FullyShardedDataParallelPlugin(
        **({"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"} | plugin)
    )
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=made))
    args = SimpleNamespace(fsdp=True)
    trainer = SimpleNamespace(model=model, args=args, accelerator=accelerator, is_fsdp_enabled=True)
    settle_fsdp(trainer)
    return made.transformer_cls_names_to_wrap


def built(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        return kind(config)


@pytest.mark.parametrize("layer", MODELS)
def test_layers_are_groups_and_what_holds_the_embeddings_is_none(layer: str) -> None:
    assert settled(built(*MODELS[layer])) == [layer]


def test_what_a_user_names_stays() -> None:
    model = built(*MODELS["BertLayer"])
    assert settled(model, transformer_cls_names_to_wrap=["BertAttention"]) == ["BertAttention"]


def test_a_model_without_embeddings_is_refused() -> None:
    model = built(ResNetForImageClassification, ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    with pytest.raises(RequestError, match=r"a ResNetForImageClassification has none. Drop --fsdp"):
        settled(model)
