"""Models with a tower for pictures, trained on text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_whole import loaded
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Blip2Config,
    CLIPConfig,
    CLIPForImageClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
)

from finetune.data.columns import Labels
from finetune.data.tokenizer import train_wordpiece
from finetune.errors import RequestError
from finetune.models.adapters import with_adapter
from finetune.models.classifier import build_classifier, find_source
from finetune.models.composite import class_for, describe_frozen, freeze_unread, unread
from finetune.models.encoder import build_encoder, find_encoder_source
from finetune.models.multiplied import multiplied_parameters
from finetune.models.probes import small_copy
from finetune.models.source import positions_of
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments
from finetune.training.guards import replay

TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 16, "vocab_size": 30, "max_position_embeddings": 40}  # fmt: skip
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
          "image_size": 16, "patch_size": 8}  # fmt: skip
LLAVA = LlavaConfig(
    text_config={"model_type": "llama", **TEXT}, vision_config={"model_type": "clip_vision_model", **VISION}
)


def llava() -> Any:
    return LlavaForConditionalGeneration(copy.deepcopy(LLAVA))


def gemma() -> Any:
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION))


def test_a_language_model_with_a_tower_is_opened_whole(tmp_path: Path) -> None:
    made = llava().eval()
    opened = loaded(tmp_path, AutoModelForCausalLM, made).eval()
    ids = torch.arange(6)[None]
    assert isinstance(opened, LlavaForConditionalGeneration)
    assert torch.equal(opened(input_ids=ids).logits, made(input_ids=ids).logits)
    assert positions_of(opened.config) == TEXT["max_position_embeddings"]


@pytest.mark.parametrize("config", [Blip2Config(), ViTConfig()], ids=lambda config: config.model_type)
def test_what_reads_no_text_alone_is_no_language_model(config: Any) -> None:
    with pytest.raises(RequestError, match=rf"that of a {config.model_type}, .* has no AutoModelForCausalLM\."):
        class_for("AutoModelForCausalLM", config)


def test_a_class_that_transformers_lacks_for_a_model_is_named_with_what_to_do(tmp_path: Path) -> None:
    message = r"for which transformers \S+ has no AutoModelForSequenceClassification\. Give a model that has one\.$"
    with pytest.raises(RequestError, match=message):
        loaded(tmp_path, AutoModelForSequenceClassification, llava(), has_new_head=True)


def test_a_model_with_a_tower_classifies_and_embeds_texts(tmp_path: Path) -> None:
    gemma().save_pretrained(tmp_path)
    train_wordpiece(["some words"], TEXT["vocab_size"], 16).save_pretrained(tmp_path)
    arguments, labels = ModelArguments(model_name_or_path=str(tmp_path)), Labels("classification", ("bad", "good"))
    source = find_source(arguments, None)
    read = source.tokenizer(["some", "some words"], padding=True, return_tensors="pt", return_token_type_ids=False)
    classifier = build_classifier(arguments, source, labels, source.tokenizer).eval()
    assert classifier(**read).logits.shape == (2, 2)
    asked = find_encoder_source(arguments, None, None, {"query": None, "document": None})
    hidden = build_encoder(arguments, asked, source.tokenizer).eval()(**read).last_hidden_state
    assert hidden.shape == (*read["input_ids"].shape, TEXT["hidden_size"])
    assert asked.pooling == "last"


@pytest.mark.parametrize("made", [llava, gemma], ids=lambda made: made.__name__)
def test_what_no_text_reaches_is_what_gets_no_gradient(made: Any) -> None:
    model, ids = made(), torch.arange(6)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert unread(model).keys() == {name for name, weight in model.named_parameters() if weight.grad is None} != set()
    trained = {name for name, weight in freeze_unread(model).named_parameters() if weight.requires_grad}
    assert trained == {name for name, weight in model.named_parameters() if weight.grad is not None}


def test_all_of_a_model_without_towers_is_trained() -> None:
    model = freeze_unread(LlamaForCausalLM(LlamaConfig(**TEXT)))
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("made", [llava, gemma], ids=lambda made: made.__name__)
def test_what_stays_frozen_is_counted_and_said(made: Any) -> None:
    model, ids = made(), torch.arange(6)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    count = sum(weight.numel() for weight in model.parameters() if weight.grad is None)
    said = f"{count:,} parameters that no text reaches (such as a vision tower's) stay frozen"
    assert describe_frozen(freeze_unread(model)) == [said]


def test_nothing_is_said_of_a_model_without_towers_nor_with_an_adapter_beside_frozen_weights() -> None:
    assert describe_frozen(freeze_unread(LlamaForCausalLM(LlamaConfig(**TEXT)))) == []
    assert describe_frozen(with_adapter(llava(), AdapterArguments(use_peft=True), None, "CAUSAL_LM")) == []


@pytest.mark.parametrize("use_peft", [False, True])
def test_towers_are_no_work(use_peft: bool) -> None:
    arguments = AdapterArguments(use_peft=use_peft)
    both = (llava(), LlamaForCausalLM(LlamaConfig(**TEXT)))
    whole, text = (multiplied_parameters(with_adapter(one, arguments, None, "CAUSAL_LM")) for one in both)
    assert whole == text > 0


def test_a_classifier_of_pictures_has_no_part_that_text_should_reach() -> None:
    config = CLIPConfig(text_config={**TEXT, "eos_token_id": 1}, vision_config=VISION)
    model = CLIPForImageClassification(config)
    assert unread(model) == {}
    assert multiplied_parameters(model) >= sum(p.numel() for p in model.vision_model.encoder.parameters())


def test_a_batch_of_a_language_model_with_a_tower_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llava().save_pretrained(tmp_path / "checkpoint")
    ids = torch.arange(6)[None]
    replay.write_batch(tmp_path / "step-1", [{"input_ids": ids, "labels": ids.clone()}], {"cpu": torch.get_rng_state()})
    monkeypatch.setattr("sys.argv", ["replay", str(tmp_path / "step-1"), str(tmp_path / "checkpoint")])
    replay.main()
    assert "micro-batch 1: loss 3." in (said := capsys.readouterr().out)
    assert "all is finite" in said


def test_a_small_copy_is_small_in_all_its_parts() -> None:
    twin = small_copy(llava(), 8)
    assert twin.get_input_embeddings().num_embeddings == 8
    assert twin.config.text_config.num_hidden_layers == twin.config.vision_config.num_hidden_layers == 1
