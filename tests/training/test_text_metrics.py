"""Metrics of written texts, beside figures that are worked out here."""

from __future__ import annotations

import pytest

from finetune.training.metric_modules import load_metrics

SAMPLE = {"predictions": ["one text", "another one"], "references": ["one text", "another"]}
WRITTEN = {"predictions": ["the cat sat", "a dog"], "references": ["the cat sat down", "a dog"]}


def figures(name: str) -> dict[str, float]:
    (metric,) = load_metrics([name], None, SAMPLE, "text to text")
    return metric.compute(WRITTEN)


def test_exact_match_is_a_share() -> None:
    assert figures("exact_match") == {"exact_match": 0.5}


def test_rouge_is_the_mean_f1_of_words_in_common() -> None:
    found = figures("rouge")
    # Of the first pair three of three words are right, and three of four are there: 2 * 1 * 3/4 / (7/4) = 6/7.
    assert found["rouge1"] == pytest.approx((6 / 7 + 1) / 2)
    assert found["rougeL"] == pytest.approx((6 / 7 + 1) / 2)
    assert found["rouge2"] == pytest.approx((0.8 + 1) / 2)  # two of two pairs, two of three


def test_ter_counts_edits_by_true_words_and_less_is_better() -> None:
    (metric,) = load_metrics(["ter"], None, SAMPLE, "text to text")
    assert metric.compute(WRITTEN)["ter"] == pytest.approx(100 / 6)  # one word is missing, of six
    assert metric.figures == {"ter": False}


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_bleu_and_chrf_are_100_for_the_true_texts_and_less_for_others(name: str) -> None:
    (metric,) = load_metrics([name], None, SAMPLE, "text to text")
    alike = ["the cat sat down on it", "a dog barks at the cat"]
    assert metric.compute({"predictions": alike, "references": alike})[name] == pytest.approx(100)
    assert 0 < metric.compute({"predictions": ["the cat sat down on a mat", alike[1]], "references": alike})[name] < 99
