"""Checkpoints without weights that a model needs are refused: transformers would draw them at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartModel,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

from finetune.errors import RequestError
from finetune.models.source import load_weights
from finetune.run.flags.language import CausalModelArguments

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}
LLAMA = LlamaConfig(**SMALL, tie_word_embeddings=False)
GPT2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30)
BART = BartConfig(
    vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
)  # fmt: skip
BERT = BertConfig(**SMALL)


def loaded(folder: Path, auto: Any, model: Any = None, **how: Any) -> Any:
    if model is not None:
        model.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    return load_weights(auto, str(folder), config, CausalModelArguments(), **how)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            LlamaForSequenceClassification,
            r"a LlamaForSequenceClassification, and has no weights lm_head.*--loss reward",
        ),
        (LlamaModel, r"a LlamaModel, and has no weights lm_head\.weight that fit.*is for recipes/embedding\.py"),
    ],
)
def test_a_language_model_needs_its_head(made: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        loaded(tmp_path, AutoModelForCausalLM, made(LLAMA))


def test_a_tied_head_and_buffers_are_no_loss(tmp_path: Path) -> None:
    """The hub's BART base is a BartModel, which people train to summarise."""
    loaded(tmp_path / "gpt2", AutoModelForCausalLM, GPT2Model(GPT2))
    loaded(tmp_path / "bart", AutoModelForSeq2SeqLM, BartModel(BART))


def test_a_classifiers_head_may_be_new_and_a_teachers_may_not(tmp_path: Path) -> None:
    loaded(tmp_path, AutoModelForSequenceClassification, BertForMaskedLM(BERT), has_new_head=True)
    with pytest.raises(
        RequestError, match=r"--teacher .* a BertForMaskedLM, and has no weights bert\.pooler\.\S+ and 3"
    ):
        loaded(tmp_path, AutoModelForSequenceClassification, flag="teacher")
    loaded(tmp_path, AutoModel)
    many = BertForSequenceClassification(BertConfig(**SMALL, num_labels=5))
    many.config.num_labels = 2
    loaded(tmp_path / "many", AutoModelForSequenceClassification, many, has_new_head=True)


@pytest.mark.parametrize(
    "auto", [AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModel], ids=lambda auto: auto.__name__
)
def test_a_body_that_is_not_whole_is_refused_whatever_is_on_it(auto: Any, tmp_path: Path) -> None:
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"has no weights (model\.)?norm\.weight that fit"):
        loaded(tmp_path, auto, has_new_head=auto is AutoModelForSequenceClassification)
