"""Which modules FSDP gathers together, and what its wrappers leave in names and saved files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
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
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.training.fsdp import keep_class, named_weights
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


def test_a_compiled_model_with_activation_checkpointing_has_the_names_of_its_files() -> None:
    model = built(*MODELS["LlamaDecoderLayer"])
    model.lm_head.weight = model.model.embed_tokens.weight
    once, every = named_weights(model), named_weights(model, every=True)
    assert every.keys() - once.keys() == {"lm_head.weight"}
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    model.model.layers[2] = torch.compile(model.model.layers[2])
    wrapped = torch.compile(model)
    assert dict(wrapped.named_parameters()).keys().isdisjoint(once)
    assert [*named_weights(wrapped)] == [*once]
    assert [*named_weights(wrapped, every=True)] == [*every]


def test_a_sharded_model_is_saved_with_the_code_of_its_own_class(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = GPTLiteForCausalLM(GPTLiteConfig(**sizes, vocab_size=20))
    # As torch does it (2.13, distributed/_composable_state.py and fsdp/_fully_shard/_fsdp_init.py).
    sharded = type("FSDPGPTLiteForCausalLM", (FSDPModule, GPTLiteForCausalLM), {"__module__": FSDPModule.__module__})
    saved = []
    for name, kind in (("before", GPTLiteForCausalLM), ("sharded", sharded)):
        model.__class__ = kind
        keep_class(model)
        model.save_pretrained(tmp_path / name)
        files = sorted(path.name for path in (tmp_path / name).iterdir())
        saved.append((files, json.loads((tmp_path / name / "config.json").read_text())))
    assert saved[0] == saved[1]
    assert isinstance(model, FSDPModule)
    keep_class(model)  # of a run that saves again
    assert type(model).__name__ == "GPTLiteForCausalLM"
