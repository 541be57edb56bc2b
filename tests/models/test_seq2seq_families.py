"""Tiny models of the families that people fine-tune, with tokenizers of their classes, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from seq2seq_families import FAMILIES, PIECES, mbart, save
from transformers import MT5Config, MT5ForConditionalGeneration, T5Tokenizer

from finetune.data.columns import IGNORED
from finetune.data.tokenizer import ready, train_bpe
from finetune.errors import RequestError
from finetune.models.seq2seq import PairCollator, build_seq2seq, find_seq2seq_source
from finetune.run.recipes.seq2seq import PairArguments, Seq2SeqModelArguments


def opened(folder: Path, **flags: str) -> tuple[Any, Any]:
    asked = Seq2SeqModelArguments(model_name_or_path=str(folder))
    source = find_seq2seq_source(asked, PairArguments(**flags))
    return build_seq2seq(asked, source, source.tokenizer), source.tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_reads_and_learns_targets_as_its_own_forward_does(family: str, tmp_path: Path) -> None:
    make, flags = FAMILIES[family]
    make(tmp_path)
    model, words = opened(tmp_path, **flags)
    model.eval()
    rows = [
        {"input_ids": words(source)["input_ids"], "labels": words(text_target=target)["input_ids"]}
        for source, target in (("a text", "another text"), ("another one", "one"))
    ]
    batch = PairCollator(words, model)(rows)
    assert (batch["labels"][1] == IGNORED).any()
    with torch.no_grad():
        theirs = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).logits
        ours = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    learnt = batch["labels"] != IGNORED
    torch.testing.assert_close(ours[learnt], theirs[learnt])


@pytest.mark.parametrize("family", ["mbart", "mbart50", "nllb"])
def test_a_text_that_is_written_begins_as_the_targets_do(family: str, tmp_path: Path) -> None:
    """The decoder reads the language at the place where it read it in training, and once."""
    make, flags = FAMILIES[family]
    make(tmp_path)
    model, words = opened(tmp_path, **flags)
    row = {"input_ids": words("a text")["input_ids"], "labels": words(text_target="one")["input_ids"]}
    read = PairCollator(words, model)([row])["decoder_input_ids"][0].tolist()
    language = words.convert_tokens_to_ids(flags["target_lang"])
    made = model.generate(torch.tensor([row["input_ids"]]), max_new_tokens=4, num_beams=1)[0].tolist()
    begins = read.index(language) + 1
    assert made[:begins] == read[:begins]
    words.save_pretrained(tmp_path / "saved")
    again = type(words).from_pretrained(tmp_path / "saved")
    assert again("a text")["input_ids"] == row["input_ids"], "a saved tokenizer marks the source as it was trained"


def test_languages_are_asked_for_where_a_tokenizer_has_many(tmp_path: Path) -> None:
    mbart(tmp_path)
    with pytest.raises(RequestError, match="Give the language to read"):
        opened(tmp_path, source_lang="de_DE")
    with pytest.raises(RequestError, match="--source_lang de: the model's tokenizer has no such language"):
        opened(tmp_path, source_lang="de", target_lang="ro_RO")
    with pytest.raises(RequestError, match="--target_lang ro: the model's tokenizer has no such language"):
        opened(tmp_path, source_lang="de_DE", target_lang="ro")


def test_a_config_that_does_not_say_how_a_text_begins_is_refused(tmp_path: Path) -> None:
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES], extra_ids=0)
    config = MT5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = None
    save(tmp_path, MT5ForConditionalGeneration(config), tokenizer)
    with pytest.raises(RequestError, match="Add decoder_start_token_id"):
        opened(tmp_path)


def test_a_tokenizer_that_cannot_pad_is_refused(tmp_path: Path) -> None:
    FAMILIES["mbart"][0](tmp_path)
    ready(train_bpe(["some words"], 300, []), 64).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="neither a padding token nor an end of text"):
        opened(tmp_path)


def test_a_tokenizer_whose_package_is_missing_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    FAMILIES["mbart"][0](tmp_path)

    def lacks(*args: Any, **kwargs: Any) -> None:
        raise ImportError(
            "\nMarianTokenizer requires the SentencePiece library but it was not found in your environment. See"
        )

    monkeypatch.setattr("finetune.models.source.AutoTokenizer.from_pretrained", lacks)
    with pytest.raises(RequestError, match=r"requires the SentencePiece library.*environment\. Install it; the extra"):
        opened(tmp_path)
