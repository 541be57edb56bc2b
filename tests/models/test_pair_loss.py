"""The loss of pairs, beside a page of numpy; and what the collator gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from finetune.data.columns import IGNORED
from finetune.data.seq2seq import train_tokenizer
from finetune.models.seq2seq import PairCollator
from finetune.training.loss import token_loss

LENGTHS = (5, 1, 3, 7)
VOCABULARY = 11


def batch_of(lengths: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lengths), max(lengths), VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = IGNORED
    return logits, labels


def by_numpy(logits: Any, labels: Any, smoothing: float) -> float:
    """The sum over target tokens, and not their number."""
    total = 0.0
    for scores, label in zip(logits.reshape(-1, VOCABULARY), labels.reshape(-1), strict=True):
        if label != IGNORED:
            chances = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
            total -= (1 - smoothing) * chances[label] + smoothing * chances.mean()
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_numpy_however_rows_are_spread(smoothing: float) -> None:
    logits, labels = batch_of(LENGTHS)
    count, compute = sum(LENGTHS), partial(token_loss, label_smoothing=smoothing)
    expected = by_numpy(logits.double().numpy(), labels.numpy(), smoothing) / count
    assert compute({"logits": logits}, labels).item() == pytest.approx(expected, rel=1e-5)
    parts = [compute({"logits": logits[rows]}, labels[rows], torch.tensor(count)) for rows in ([0], [1, 2], [3])]
    assert sum(parts).item() == pytest.approx(expected, rel=1e-5)
    means = np.mean([compute({"logits": logits[rows]}, labels[rows]).item() for rows in ([0], [1, 2], [3])])
    assert abs(means - expected) > 1e-3, "a mean of means would be another, so the test can tell"


def tokenizer() -> Any:
    return train_tokenizer(iter(["one text", "another one"] * 4), 300, 32)


MODELS = {
    "t5": lambda words: T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=words, dropout_rate=0.0,
                 decoder_start_token_id=0)
    ),
    "bart": lambda words: BartForConditionalGeneration(
        BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                   encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=words, pad_token_id=0, eos_token_id=1,
                   bos_token_id=1, decoder_start_token_id=1, max_position_embeddings=32, dropout=0.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_the_decoder_reads_what_the_model_would_make_of_the_labels(kind: str) -> None:
    """The loss of one batch is then the model's own, a mean over its target tokens."""
    words = tokenizer()
    model = MODELS[kind](len(words)).eval()
    rows = [
        {"input_ids": words(source)["input_ids"], "labels": words(target)["input_ids"]}
        for source, target in (("one", "another one text"), ("another text one", "one"))
    ]
    batch = PairCollator(words, model)(rows)
    assert batch["labels"][1, -1] == IGNORED
    assert batch["input_ids"][0, -1] == words.pad_token_id
    assert batch["attention_mask"].sum() == sum(len(row["input_ids"]) for row in rows)
    with torch.no_grad():
        own = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss
        ours = token_loss(model(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"])
    assert ours.item() == pytest.approx(own.item(), rel=1e-5)
