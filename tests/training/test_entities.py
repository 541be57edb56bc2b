"""Entities from tags, counted by hand and by seqeval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from seqeval.metrics import f1_score

from finetune.data.columns import TOKENS, Labels
from finetune.training.entities import entity_counts, entity_table, kept_of_tokens, write_spans
from finetune.training.metrics import metrics_for

LABELS = Labels(TOKENS, ("O", "B-LOC", "I-LOC", "B-PER", "I-PER"))
IDS = np.array([[-100, 3, -100, 4, 0, 1, -100], [-100, 0, 1, -100, -100, -100, -100]])  # Ada Lovelace in Paris; in Rome


def logits_for(guess: Any, sure: float = 4.0) -> torch.Tensor:
    return sure * torch.nn.functional.one_hot(torch.as_tensor(guess), 5).float()


def evaluated(guess: Any) -> SimpleNamespace:
    kept = kept_of_tokens(logits_for(guess), torch.as_tensor(IDS)).numpy()
    return SimpleNamespace(predictions=kept, label_ids=IDS)


def test_words_alone_are_judged_and_entities_as_a_whole() -> None:
    """Lovelace is taken for no name, so that Ada alone is one; all else is right."""
    guess = np.where(IDS < 0, 4, IDS)  # nonsense where nothing is judged
    guess[0, 3] = 0
    found = metrics_for(LABELS)(evaluated(guess))
    assert found["accuracy"] == pytest.approx(5 / 6)
    assert [found[name] for name in ("precision", "recall", "f1")] == pytest.approx([2 / 3] * 3)
    right, wrong = math.log(1 + 4 * math.exp(-4)), math.log(math.exp(4) + 4)
    assert found["loss"] == pytest.approx((5 * right + wrong) / 6, rel=1e-5)


def test_the_table_and_the_confusion_count_what_seqeval_counts() -> None:
    random = np.random.default_rng(0)
    names = np.array(LABELS.names)
    true, guess = (names[random.integers(0, 5, (40, 9))].tolist() for _ in range(2))
    counts = entity_counts({"predictions": guess, "references": true}, ("LOC", "PER"))
    rows = entity_table(counts, ("LOC", "PER"))
    right, support, guessed = np.trace(counts), counts[:2].sum(), counts[:, :2].sum()
    assert 2 * right / (support + guessed) == pytest.approx(f1_score(true, guess))
    assert np.mean([row["f1"] for row in rows]) == pytest.approx(f1_score(true, guess, average="macro"))
    assert counts[2, 2] == 0


@pytest.mark.parametrize("is_labelled", [True, False])
def test_spans_name_words_characters_and_how_sure(is_labelled: bool, tmp_path: Path) -> None:
    words = [["Ada", "Lovelace", "in", "Paris"], ["in", "Rome", "cut"]]
    test = Dataset.from_dict({"row": [0, 7], "words": words, "first": [[1, 3, 4, 5], [1, 2, -1]]})
    guess = logits_for(np.where(IDS < 0, 0, IDS))
    predicted = SimpleNamespace(predictions=kept_of_tokens(guess, None).numpy(), label_ids=None)
    if is_labelled:
        predicted = evaluated(np.where(IDS < 0, 0, IDS))
    write_spans(tmp_path / "predictions.jsonl", test, LABELS, predicted)
    first, second = map(json.loads, (tmp_path / "predictions.jsonl").read_text().splitlines())
    assert first["tags"] == ["B-PER", "I-PER", "O", "B-LOC"]
    sure = pytest.approx(math.exp(4) / (math.exp(4) + 4), abs=1e-5)
    person = {"type": "PER", "start": 0, "end": 2, "start_char": 0, "end_char": 12, "text": "Ada Lovelace"}
    assert first["spans"][0] == {**person, "score": sure}
    span = first["spans"][1]
    assert " ".join(words[0])[span["start_char"] : span["end_char"]] == span["text"] == "Paris"
    assert (second["index"], second["tags"], second["words_without_prediction"]) == (7, ["O", "B-LOC", "O"], 1)
    assert ("labels" in first) is is_labelled
    if is_labelled:
        assert second["labels"] == ["O", "B-LOC", None]
