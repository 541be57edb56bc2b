"""Losses of spans, the answers that scores say, and how they are judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DistilBertConfig, DistilBertForQuestionAnswering

from finetune.data.question_answering import CONTEXT, FIRST, ID, LAST, NULL, QUESTION, TEXTS
from finetune.data.tables import ROW
from finetune.run.recipes.question_answering import AnswerArguments
from finetune.training.answers import Answer, AnswerMetrics, answers_of, best_threshold, span_loss

SIZES = [5, 9, 7, 9]
LABELS = torch.tensor([[1, 3, 5], [0, 0, 9], [6, 6, 7], [2, 8, 9]])
SCORES = torch.randn(4, 9, 2, generator=torch.Generator().manual_seed(0))


def outputs(scores: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"start_logits": scores[..., 0], "end_logits": scores[..., 1]}


def by_hand(scores: Any, labels: Any, smoothing: float = 0.0) -> float:
    """The mean over windows and over both ends, each window without its padding."""
    losses = []
    for row, (first, last, size) in zip(np.asarray(scores, dtype=np.float64), labels.tolist(), strict=True):
        for side, place in ((0, first), (1, last)):
            own = row[:size, side]
            chances = own - np.log(np.exp(own).sum())
            losses.append(-(1 - smoothing) * chances[place] - smoothing * chances.mean())
    return float(np.mean(losses))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_the_formula_whatever_stands_in_the_padding(smoothing: float) -> None:
    found = span_loss(outputs(SCORES), LABELS, label_smoothing=smoothing)
    assert float(found) == pytest.approx(by_hand(SCORES, LABELS, smoothing), rel=1e-5)
    noisy = SCORES.clone()
    for row, size in enumerate(SIZES):
        noisy[row, size:] = 50.0
    assert float(span_loss(outputs(noisy), LABELS, label_smoothing=smoothing)) == pytest.approx(float(found), rel=1e-6)


def test_the_losses_of_parts_of_a_batch_add_up_to_the_whole_ones() -> None:
    parts = [span_loss(outputs(SCORES[rows]), LABELS[rows], LABELS.numel()) for rows in (slice(0, 1), slice(1, 4))]
    assert float(sum(parts)) == pytest.approx(float(span_loss(outputs(SCORES), LABELS)), rel=1e-6)


def test_without_padding_the_loss_is_the_models_own() -> None:
    config = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    model = DistilBertForQuestionAnswering(config).requires_grad_(False)
    ids = torch.arange(27).reshape(3, 9)
    labels = torch.tensor([[1, 3, 9], [0, 0, 9], [6, 8, 9]])
    found = model.eval()(ids, start_positions=labels[:, 0], end_positions=labels[:, 1])
    assert float(span_loss(found, labels)) == pytest.approx(float(found.loss), rel=1e-6)


def test_the_loss_of_an_evaluation_is_that_of_the_formula() -> None:
    padded = SCORES.numpy().copy()
    for row, size in enumerate(SIZES):
        padded[row, size:] = -100.0
    found = AnswerMetrics(["squad"])(SimpleNamespace(predictions=padded, label_ids=LABELS.numpy()))
    assert found["loss"] == pytest.approx(by_hand(SCORES, LABELS), rel=1e-6)


class Windows(list[Any]):
    """Rows of which a column can be taken, as of a data set."""

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def two_windows(words: list[str]) -> tuple[Windows, list[list[tuple[int, int]]]]:
    """A question of two tokens behind the null one, and words 0 to 5 and 3 to 8 of a context."""
    context = " ".join(words)
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    places = [(int(end) - len(word), int(end)) for word, end in zip(words, ends, strict=True)]
    rows, own = Windows(), []
    for part in (places[:6], places[3:9]):
        characters = [(-1, -1)] * 3 + part
        own.append(characters)
        rows.append({ROW: 7, ID: "seven", QUESTION: "What?", CONTEXT: context, TEXTS: ["w4 w5"], NULL: 0,
                     FIRST: [a for a, _ in characters], LAST: [b for _, b in characters]})  # fmt: skip
    return rows, own


def test_answers_are_the_best_of_all_spans_of_all_windows() -> None:
    rows, own = two_windows([f"w{i}" for i in range(9)])
    scores = np.random.default_rng(0).normal(size=(2, 9, 2))
    (found,) = answers_of(rows, scores, AnswerArguments(max_answer_length=3, n_best_size=9))
    every: dict[tuple[int, int], float] = {}
    for window, characters in zip(scores, own, strict=True):
        for begin in range(3, 9):
            for end in range(begin, min(begin + 3, 9)):
                span = characters[begin][0], characters[end][1]
                every[span] = max(every.get(span, -np.inf), window[begin, 0] + window[end, 1])
    ordered = sorted(every.items(), key=lambda one: -one[1])[:9]
    assert [span[:2] for span in found.spans] == [span for span, _ in ordered]
    assert [span[2] for span in found.spans] == pytest.approx([value for _, value in ordered])
    null = min(window[0].sum() for window in scores)
    assert found.null_difference == pytest.approx(null - ordered[0][1])
    assert (found.row, found.id, found.truth) == (7, "seven", ("w4 w5",))


def answer(difference: float, text: str, *truth: str) -> Answer:
    return Answer(0, "a", "?", text, ((0, len(text), 1.0),), difference, truth)


def test_the_threshold_is_where_most_is_right() -> None:
    answers = [answer(-3, "a", "a"), answer(-2, "b", "b"), answer(1, "d", "d"), answer(2, "e"),
               answer(3, "f"), answer(4, "wrong", "g")]  # fmt: skip

    def right(threshold: float) -> int:
        return sum(one.text(threshold) in (one.truth or ("",)) for one in answers)

    found = best_threshold(answers)
    assert right(found) == max(right(cut) for cut in np.arange(-5, 5, 0.25)) == 5
    assert found == pytest.approx(1.5)


def test_no_threshold_parts_questions_that_score_alike() -> None:
    """As of a model that has learnt nothing: of these either all are answered or none is."""
    found = best_threshold([answer(0, "a", "a"), answer(0, "b"), answer(0, "c"), answer(0, "d", "e")])
    assert found < 0


def test_the_threshold_counts_as_the_metric_does() -> None:
    assert best_threshold([answer(1, "The cat.", "cat"), answer(2, "e")]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("guess", "truth", "exact", "f1"),
    [
        ("The Cat.", ["cat"], 1, 1),
        ("a black cat", ["the cat", "black dog"], 0, 2 / 3),
        ("cat cat", ["cat"], 0, 2 / 3),
        ("", [], 1, 1),
        ("cat", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("the", ["a"], 1, 1),
    ],
)
def test_answers_are_judged_as_squads_script_does(guess: str, truth: list[str], exact: float, f1: float) -> None:
    (metric,) = AnswerMetrics(["squad"]).metrics
    found = metric.compute({"predictions": [guess, "x"], "references": [truth, ["x"]]})
    assert found == pytest.approx({"exact_match": (exact + 1) / 2, "f1": (f1 + 1) / 2})
