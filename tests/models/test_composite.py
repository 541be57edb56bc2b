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
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
)

from finetune.errors import RequestError
from finetune.models.composite import class_for, freeze_unread, unread
from finetune.models.probes import small_copy
from finetune.models.source import positions_of

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
    message = r"that of a llava, for which transformers \S+ has no AutoModelForSequenceClassification\. Give a model"
    with pytest.raises(RequestError, match=message):
        loaded(tmp_path, AutoModelForSequenceClassification, llava(), has_new_head=True)


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


def test_a_small_copy_is_small_in_all_its_parts() -> None:
    twin = small_copy(llava(), 8)
    assert twin.get_input_embeddings().num_embeddings == 8
    assert twin.config.text_config.num_hidden_layers == twin.config.vision_config.num_hidden_layers == 1
