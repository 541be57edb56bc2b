"""A model that cannot learn to write is refused by its config.json, before torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.decoders import CLASSIFYING, ENCODERS, look_at_model
from finetune.run.launch import Launch
from finetune.run.resolve import resolve


def model(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def is_refused_or_taken(
    recipe: str, folder: Path, message: str, *words: str, flag: str = "--model_name_or_path"
) -> None:
    """With that message, or taken where it is ""."""
    run = resolve(recipes()[recipe], [flag, str(folder), *words], Launch(), is_here=False)
    if not message:
        look_at_model(run)
        return
    with pytest.raises(RequestError, match=message):
        look_at_model(run)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, r"of an encoder \(bert\).*recipes/seq_cls.py"),  # MiniLM's, too
        ({"model_type": "distilbert"}, "of an encoder"),
        ({"model_type": "roberta", "is_decoder": False}, "of an encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, r"an encoder with a decoder \(t5\).*recipes/seq2seq.py"),
        ({"model_type": "bert", "is_decoder": True}, ""),
        ({"model_type": "llama"}, ""),
    ],
    ids=["BERT", "DistilBERT", "RoBERTa", "T5", "BERT as a decoder", "Llama"],
)
def test_an_encoder_is_no_causal_language_model(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    is_refused_or_taken("causal_lm", model(tmp_path, **config), message)


@pytest.mark.parametrize(
    ("recipe", "config", "message"),
    [
        ("seq2seq", {"model_type": "llama"}, r"of a decoder.*\(llama\).*is for recipes/causal_lm.py"),
        ("seq2seq", {"model_type": "bert"}, r"of an encoder \(bert\).*is for recipes/seq_cls.py"),
        ("seq2seq", {"model_type": "t5", "is_encoder_decoder": True}, ""),
        ("seq_cls", {"model_type": "pegasus", "is_encoder_decoder": True}, r"\(pegasus\).*is for .*seq2seq.py"),
        ("token_cls", {"model_type": "marian", "is_encoder_decoder": True}, "it is for recipes/seq2seq.py"),
        ("seq_cls", {"model_type": "bart", "is_encoder_decoder": True}, ""),
        ("seq_cls", {"model_type": "llama"}, ""),
    ],
)
def test_one_text_is_made_of_another_by_an_encoder_with_a_decoder(
    recipe: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    is_refused_or_taken(recipe, model(tmp_path, **config), message)


LLAMA = {"model_type": "llama"}
BERT = {"model_type": "bert"}


@pytest.mark.parametrize(
    ("recipe", "words", "config", "message"),
    [
        (
            "causal_lm",
            [],
            {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
            "no language-model head.*--loss",
        ),
        ("preference", [], {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "no language-model head"),
        ("preference", ["--loss", "reward"], {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, ""),
        ("causal_lm", [], {**LLAMA, "architectures": ["LlamaModel"]}, ""),  # its head may be tied
        (
            "seq2seq",
            [],
            {"is_encoder_decoder": True, "architectures": ["BartForSequenceClassification"]},
            "no language",
        ),
        ("seq2seq", [], {"is_encoder_decoder": True, "architectures": ["BartModel"]}, ""),
    ],
)
def test_a_classifier_is_no_language_model(
    recipe: str, words: list[str], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    is_refused_or_taken(recipe, model(tmp_path, **config), message, *words)


@pytest.mark.parametrize(
    ("recipe", "config", "message"),
    [
        ("causal_lm", BERT, r"^--teacher is .*of an encoder \(bert\)"),
        ("causal_lm", {"model_type": "bart", "is_encoder_decoder": True}, "^--teacher is .*encoder with a decoder"),
        (
            "causal_lm",
            {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
            "^--teacher is .*no language-model",
        ),
        ("causal_lm", LLAMA, ""),
        ("seq_cls", {**BERT, "architectures": ["BertForMaskedLM"]}, "^--teacher is .*no classification head"),
        ("seq_cls", {"model_type": "marian", "is_encoder_decoder": True}, "^--teacher is .*is for recipes/seq2seq.py"),
        ("seq_cls", {**BERT, "architectures": ["BertForSequenceClassification"]}, ""),
    ],
)
def test_a_teacher_is_of_its_students_kind(recipe: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    is_refused_or_taken(recipe, model(tmp_path, **config), message, flag="--teacher")


def test_it_is_said_before_the_run_starts_and_other_recipes_take_it(tmp_path: Path) -> None:
    words = ["--model_name_or_path", str(model(tmp_path, model_type="bert")), "--output_dir", str(tmp_path / "run")]
    with pytest.raises(RequestError, match="of an encoder"):
        resolve_here(recipes()["causal_lm"], words, Launch())
    look_at_model(resolve(recipes()["seq_cls"], words, Launch(), is_here=False))


def test_every_model_that_fills_in_masks_is_known() -> None:
    from transformers.models.auto import modeling_auto as auto

    text_to_text = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    assert set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) - set(text_to_text) <= ENCODERS
    classifiers = set(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    assert {kind for kind in text_to_text if kind in classifiers} <= CLASSIFYING


def test_a_hub_models_config_is_looked_at_as_well(tmp_path: Path) -> None:
    from finetune.models.causal import find_causal_source
    from finetune.run.flags.language import CausalModelArguments

    config = model(tmp_path, model_type="bert", vocab_size=8, hidden_size=8, num_attention_heads=1)
    with pytest.raises(RequestError, match="of an encoder"):
        find_causal_source(CausalModelArguments(model_name_or_path=str(config)), None)


def test_a_vocabulary_with_gaps_needs_rows_up_to_its_highest_id() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from finetune.data.packing import dtype_of
    from finetune.data.tokenizer import rows_of
    from finetune.models.causal import CausalSource, settled_config
    from finetune.models.gptlite import GPTLiteConfig
    from finetune.run.flags.language import CausalModelArguments

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")))
    assert (len(made), rows_of(made), dtype_of(rows_of(made))) == (2, 70_001, "uint32")
    source = CausalSource(
        config=GPTLiteConfig(vocab_size=300),
        tokenizer=made,
        block_size=8,
        pretrained="somewhere",
        description="a model",
    )
    with pytest.raises(RequestError, match=r"70,001 tokens, but the model embeds 300"):
        settled_config(CausalModelArguments(), source, made)
