"""A model's source: how long, which labels, which tokens; and its weights in the precision that training wants."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, DistilBertConfig, GPT2Config, LlamaConfig, RobertaConfig
from transformers.core_model_loading import WeightRenaming

from finetune.data.columns import MULTI_LABEL, Labels
from finetune.data.tokenizer import ready, train_bpe, train_wordpiece
from finetune.errors import RequestError
from finetune.models.classifier import build_classifier, find_source, fit_to
from finetune.models.source import forget_unused_renamings
from finetune.run.flags.text import ModelArguments

DISTILBERT = DistilBertConfig(vocab_size=60, n_layers=1, dim=16, n_heads=2, hidden_dim=32, max_position_embeddings=40)
GPT2 = GPT2Config(vocab_size=60, n_layer=1, n_embd=16, n_head=2, n_positions=24)
LABELS = Labels("classification", ("bad", "good"))


def saved(folder: Path, config: Any, dtype: torch.dtype = torch.float32, pad: bool = True, **changes: Any) -> str:
    for name, value in changes.items():
        setattr(config, name, value)
    AutoModelForSequenceClassification.from_config(config).to(dtype).save_pretrained(folder)
    tokenizer = train_wordpiece(["some words to learn", "more words"], 60, 64)
    if not pad:
        tokenizer.eos_token = "[SEP]"
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_weights_are_loaded_in_fp32_whatever_the_file_has(tmp_path: Path) -> None:
    arguments = ModelArguments(model_name_or_path=saved(tmp_path, DISTILBERT, torch.bfloat16))
    source = find_source(arguments, None)
    model = build_classifier(arguments, source, LABELS, source.tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_folder_in_the_home_folder_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands ~ in a flag, but nothing does in a YAML."""
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "model", DISTILBERT)
    arguments = ModelArguments(model_name_or_path="~/model")
    source = find_source(arguments, None)
    assert build_classifier(arguments, source, LABELS, source.tokenizer).config.vocab_size == 60


def test_thresholds_of_the_weights_that_were_are_dropped_when_they_are_trained_on(tmp_path: Path) -> None:
    many = Labels(MULTI_LABEL, ("bad", "good"))
    config = DistilBertConfig(**{**DISTILBERT.to_dict(), "problem_type": MULTI_LABEL, "thresholds": [0.3, 0.7]})
    config.id2label = dict(enumerate(many.names))
    arguments = ModelArguments(model_name_or_path=saved(tmp_path, config))
    for trains in (False, True):
        source = find_source(arguments, None)
        model = build_classifier(arguments, source, many, source.tokenizer, will_train=trains)
        assert hasattr(model.config, "thresholds") is not trains


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    arguments = ModelArguments(model_name_or_path=saved(tmp_path, GPT2, pad=False))
    source = find_source(arguments, None)
    batch = source.tokenizer(["some words", "more words to learn"], padding=True, return_tensors="pt")
    model = build_classifier(arguments, source, LABELS, source.tokenizer).eval()
    alone = source.tokenizer(["some words"], return_tensors="pt")
    assert torch.allclose(model(**batch).logits[:1], model(**alone).logits, atol=1e-5)


def test_a_decoder_is_judged_at_its_last_token_whatever_its_config_takes_for_padding(tmp_path: Path) -> None:
    """As in folders of the first Llamas, whose tokenizers have no padding."""
    shape = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, intermediate_size=32, pad_token_id=0, initializer_range=0.5)
    arguments = ModelArguments(model_name_or_path=saved(tmp_path, config, pad=False))
    source = find_source(arguments, None)
    model = build_classifier(arguments, source, LABELS, source.tokenizer, will_train=False).eval()
    batch = source.tokenizer(["some", "more words to learn"], padding=True, return_tensors="pt")
    alone = source.tokenizer(["some"], return_tensors="pt")
    assert torch.allclose(model(**batch).logits[:1], model(**alone).logits, atol=1e-5)


def test_padding_from_which_positions_are_counted_stays() -> None:
    tokenizer = train_wordpiece(["some words"], 60, 64)
    config = RobertaConfig(vocab_size=60, pad_token_id=1)
    fit_to(tokenizer, config)
    assert (config.pad_token_id, tokenizer.pad_token_id) == (1, 0)


def test_a_tokenizer_that_cannot_pad_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, DISTILBERT)
    train_bpe_alone().save_pretrained(path)
    with pytest.raises(RequestError, match=r"neither a padding token nor an end of text.*Add \"pad_token\""):
        find_source(ModelArguments(model_name_or_path=path), None)


def train_bpe_alone() -> Any:
    return ready(train_bpe(["some words"], 300, []), 64)


def test_a_trained_models_labels_are_known_and_a_fresh_ones_are_not(tmp_path: Path) -> None:
    named = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    path = saved(tmp_path / "named", DistilBertConfig(**{**DISTILBERT.to_dict(), **named}))
    assert find_source(ModelArguments(model_name_or_path=path), None).labels == LABELS
    fresh = saved(tmp_path / "fresh", DistilBertConfig(**DISTILBERT.to_dict()))
    assert find_source(ModelArguments(model_name_or_path=fresh), None).labels is None
    number = DistilBertConfig(**{**DISTILBERT.to_dict(), "num_labels": 1, "problem_type": "regression"})
    trained = find_source(ModelArguments(model_name_or_path=saved(tmp_path / "number", number)), None)
    assert trained.labels == Labels("regression", ())


@pytest.mark.parametrize(("asked", "wanted", "positions"), [(None, 512, 512), (16, 16, 512), (1100, 1100, 1100)])
def test_a_model_from_scratch_reads_as_many_tokens_as_are_asked_for(
    asked: int | None, wanted: int, positions: int
) -> None:
    arguments = ModelArguments()
    source = find_source(arguments, asked)
    model = build_classifier(arguments, source, LABELS, train_wordpiece(["some words"], 60, source.max_seq_length))
    assert (source.max_seq_length, model.config.max_position_embeddings) == (wanted, positions)
    assert model(torch.zeros((1, wanted), dtype=torch.int64)).logits.shape == (1, 2)


@pytest.mark.parametrize(("asked", "wanted"), [(None, 40), (16, 16)])
def test_a_sequence_is_as_long_as_the_model_reads_or_as_asked(asked: int | None, wanted: int, tmp_path: Path) -> None:
    arguments = ModelArguments(model_name_or_path=saved(tmp_path, DISTILBERT))
    assert find_source(arguments, asked).max_seq_length == wanted
    with pytest.raises(RequestError, match="is 41, but the model has 40 positions"):
        find_source(arguments, 41)


def test_a_renaming_that_no_file_needed_is_not_undone_when_the_model_is_saved() -> None:
    """Under ZeRO-3 a BERT would be saved with LayerNorm.gamma; test_readme.py starts such a run."""
    needed = WeightRenaming(source_patterns="old.weight", target_patterns="new.weight")
    unused = WeightRenaming(source_patterns="LayerNorm.gamma", target_patterns="LayerNorm.weight")
    assert needed.rename_source_key("layer.old.weight")[0] == "layer.new.weight"
    model = SimpleNamespace(_weight_conversions=[needed, unused])
    forget_unused_renamings(model)
    assert model._weight_conversions == [needed]
