"""Figures of embeddings, and the negatives that are mined of them, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from finetune.data.embedding_rows import CLASSES, PAIRS, SCORED
from finetune.training.contrast import Contrast
from finetune.training.mining import hard_negatives
from finetune.training.retrieval import embedding_metrics, figures, ranks_of_labels, ranks_of_positives


def at(*degrees: float) -> torch.Tensor:
    """Unit vectors of two numbers."""
    radians = torch.deg2rad(torch.tensor(degrees))
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_a_rank_counts_the_texts_that_are_as_near_or_nearer() -> None:
    """The first anchor's positive is behind two others, the second's is the nearest, the third's equals another."""
    near = torch.stack([at(0, 50, 40), at(30, 45, 10)], dim=1)
    keys = torch.tensor([[0, 10], [1, 11], [2, 12]])
    assert ranks_of_positives(near, keys).tolist() == [2, 1, 3]
    same = torch.stack([at(0, 50, 40), at(30, 45, 45)], dim=1)
    assert ranks_of_positives(same, keys).tolist()[1:] == [2, 2]


def test_other_right_answers_and_the_anchor_itself_are_no_wrong_ones() -> None:
    near = torch.stack([at(0, 0, 90), at(20, 10, 0)], dim=1)
    assert ranks_of_positives(near, torch.tensor([[0, 10], [0, 11], [2, 12]])).tolist()[0] == 2
    assert ranks_of_positives(near, torch.tensor([[0, 10], [0, 11], [2, 0]])).tolist()[0] == 1


def test_a_text_that_is_there_twice_is_one_candidate() -> None:
    near = torch.stack([at(0, 90, 90), at(20, 10, 10)], dim=1)
    assert ranks_of_positives(near, torch.tensor([[0, 10], [1, 11], [2, 11]])).tolist()[0] == 2


def test_figures_of_pairs_are_of_ranks_and_of_their_own_negatives() -> None:
    vectors = torch.stack([at(0, 50, 40), at(30, 45, 10), at(20, 0, 80)], dim=1) * 3
    found = figures(vectors, torch.arange(9).reshape(3, 3), torch.zeros(3), PAIRS)
    assert found["triplet_accuracy"] == pytest.approx(2 / 3)
    assert found["recall_at_1"] == pytest.approx(1 / 3)
    assert found["recall_at_10"] == 1
    ranks = ranks_of_positives(functional.normalize(vectors, dim=-1), torch.arange(9).reshape(3, 3))
    assert found["mrr_at_10"] == pytest.approx(float((1 / ranks).mean()))


def test_scores_are_compared_by_their_order() -> None:
    vectors = torch.stack([at(0, 0, 0, 0), at(10, 20, 30, 40)], dim=1)
    found = figures(vectors, torch.zeros(4, 2), torch.tensor([4.0, 3, 2, 1]), SCORED)
    assert found["spearman"] == pytest.approx(1)
    assert 0.9 < found["pearson"] < 1


def test_labels_are_found_by_the_nearest_of_the_same_and_a_single_one_counts_not() -> None:
    near = at(0, 10, 12, 90, 5)
    assert ranks_of_labels(near, torch.tensor([0.0, 0, 1, 1, 2])).tolist() == [2, 3, 4, 1]


def test_the_loss_of_an_evaluation_is_over_batches_as_large_as_trainings_and_dims_have_their_own_figures() -> None:
    vectors, keys = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(1)), np.arange(40).reshape(20, 2)
    bits = np.zeros(20, dtype=np.int32)
    evaluated = SimpleNamespace(predictions=(vectors.flatten(1).numpy(), keys, bits))
    small, large = (embedding_metrics(Contrast(PAIRS, 0.05), size)(evaluated)["loss"] for size in (4, 20))
    assert small < large, "more texts to choose from"
    found = embedding_metrics(Contrast(PAIRS, 0.05, (8, 4)), 20)(evaluated)
    assert found["recall_at_5_dim_4"] != found["recall_at_5"]
    assert "recall_at_5_dim_8" not in found
    labelled = SimpleNamespace(predictions=(vectors[:, 0].numpy(), keys[:, :1], bits))
    assert embedding_metrics(Contrast(CLASSES, 0.05), 20)(labelled)["recall_at_1"] == 1


def mined(anchors: torch.Tensor, positives: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """By two ranks."""
    shares = (range(3), range(3, len(keys)))
    return torch.cat([rows for of in shares for _, rows in hard_negatives(anchors, positives, keys, count, of)])


def test_one_scored_pair_correlates_with_nothing() -> None:
    found = figures(torch.randn(1, 2, 4), torch.tensor([[0, 1]]), torch.tensor([0.5]), SCORED)
    assert all(np.isnan(value) for value in found.values())


def test_negatives_are_the_nearest_that_are_not_almost_right() -> None:
    anchors, positives = at(0, 90, 180, 270), at(20, 70, 160, 21)
    keys = torch.tensor([[0, 10], [1, 11], [2, 12], [3, 13]])
    found = mined(anchors, positives, keys, 2)
    # cos 21 is more than 0.95 of cos 20, the first row's own: the fourth may be right, too.
    assert found[0].tolist() == [1, 2]
    assert found[2].tolist()[0] == 1


def test_what_belongs_to_an_anchor_is_not_its_negative() -> None:
    anchors, positives = at(0, 0, 90, 180), at(5, 40, 45, 50)
    keys = torch.tensor([[0, 10], [0, 11], [2, 11], [3, 0]])
    found = mined(anchors, positives, keys, 3)
    assert found[0].tolist() == [0, 0, 0], "of three candidates two are its own, and one is its text"
    assert 0 in found[3].tolist()
