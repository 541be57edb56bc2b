"""Tiny models of the families that people fine-tune to make one text of another, with tokenizers of their classes: the
letters, and the families' own marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    MT5Config,
    MT5ForConditionalGeneration,
    NllbTokenizer,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PegasusTokenizer,
    T5Tokenizer,
)

PIECES = [("▁", -3.0), *((letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz")]
FAIRSEQ = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES]
OF_BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
LANGUAGES = {"source_lang": "de_DE", "target_lang": "ro_RO"}
NLLB = {name: i for i, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in PIECES)])}


def mt5(folder: Path) -> None:
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES], extra_ids=0)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    save(folder, MT5ForConditionalGeneration(MT5Config(vocab_size=len(tokenizer), **shape)), tokenizer)


def pegasus(folder: Path) -> None:
    tokenizer = PegasusTokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES], offset=0)
    own = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    save(folder, PegasusForConditionalGeneration(PegasusConfig(vocab_size=len(tokenizer), **OF_BART, **own)), tokenizer)


def mbart(folder: Path, kind: Any = MBartTokenizer) -> None:
    tokenizer = kind(vocab=FAIRSEQ)
    own = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2}
    save(folder, MBartForConditionalGeneration(MBartConfig(vocab_size=len(tokenizer), **OF_BART, **own)), tokenizer)


def mbart50(folder: Path) -> None:
    mbart(folder, MBart50Tokenizer)


def nllb(folder: Path) -> None:
    tokenizer = NllbTokenizer(vocab=NLLB, merges=[])
    own = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2}
    save(folder, M2M100ForConditionalGeneration(M2M100Config(vocab_size=len(tokenizer), **OF_BART, **own)), tokenizer)


def marian(folder: Path) -> None:
    """It has a model of pieces for each side, and one list of both's pieces."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece (extra sentencepiece) is not installed")
    vocab, pad = {"</s>": 0, "<unk>": 1}, "<pad>"
    folder.mkdir(exist_ok=True)
    for side, letters in (("source", "abcdefghijklm"), ("target", "nopqrstuvwxyz")):
        with (folder / f"{side}.spm").open("wb") as out:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter([*"abcdefghijklmnopqrstuvwxyz", letters]), model_writer=out, vocab_size=99,
                hard_vocab_limit=False, bos_id=-1, pad_id=-1, eos_id=0, unk_id=1, minloglevel=2,
            )  # fmt: skip
        pieces = sentencepiece.SentencePieceProcessor(str(folder / f"{side}.spm"))
        for piece in map(pieces.id_to_piece, range(pieces.get_piece_size())):
            vocab.setdefault(piece, len(vocab))
    (folder / "vocab.json").write_text(json.dumps(vocab | {pad: len(vocab)}))
    files = {"source_spm": folder / "source.spm", "target_spm": folder / "target.spm", "vocab": folder / "vocab.json"}
    tokenizer = MarianTokenizer(**{name: str(file) for name, file in files.items()})
    own = {"pad_token_id": len(vocab), "eos_token_id": 0, "decoder_start_token_id": len(vocab)}
    save(folder, MarianMTModel(MarianConfig(vocab_size=len(vocab) + 1, **OF_BART, **own)), tokenizer)


def blenderbot(folder: Path) -> None:
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES], extra_ids=0)
    own = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 1}
    model = BlenderbotForConditionalGeneration(BlenderbotConfig(vocab_size=len(tokenizer), **OF_BART, **own))
    save(folder, model, tokenizer)


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


FAMILIES: dict[str, tuple[Callable[[Path], None], dict[str, str]]] = {
    "mt5": (mt5, {}),
    "pegasus": (pegasus, {}),
    "blenderbot": (blenderbot, {}),
    "marian": (marian, {}),
    "mbart": (mbart, LANGUAGES),
    "mbart50": (mbart50, LANGUAGES),
    "nllb": (nllb, {"source_lang": "deu_Latn", "target_lang": "ron_Latn"}),
}
