"""Contrastive losses beside their papers' formulas in numpy, and the gradient of a step beside that of its parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from finetune.data.embedding_rows import CLASSES, PAIRS, SCORED
from finetune.training import contrast as module
from finetune.training.contrast import Contrast, contrast, row_losses

N, D = 7, 6
EVERY = slice(0, N)


def drawn(texts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors (N, texts, D) and keys that are all unlike."""
    vectors = torch.randn(N, texts, D, generator=torch.Generator().manual_seed(texts), dtype=torch.float64)
    return vectors, torch.arange(N * texts).reshape(N, texts)


def unit(vectors: torch.Tensor) -> np.ndarray:
    found = vectors.numpy()
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


@pytest.mark.parametrize("texts", [2, 4])
def test_pairs_have_the_cross_entropy_of_their_positive_among_all_texts(texts: int) -> None:
    vectors, keys = drawn(texts)
    found = row_losses(vectors, keys, torch.zeros(N), Contrast(PAIRS, 0.1), EVERY)
    near = unit(vectors)
    for i in range(N):
        scores = np.exp([[near[i, 0] @ near[j, side] / 0.1 for j in range(N)] for side in range(1, texts)])
        assert float(found[i]) == pytest.approx(-math.log(scores[0][i] / scores.sum()))


def test_what_is_no_negative_is_left_out() -> None:
    """The same positive elsewhere, the anchor's own text, and the other positives of the same anchor."""
    vectors, keys = drawn(2)
    keys[1, 1] = keys[0, 1]  # the first row's positive once more
    keys[2, 1] = keys[0, 0]  # its anchor as a document
    keys[3, 0] = keys[0, 0]  # another positive of its anchor
    keys[4, 1] = keys[3, 1]  # the same text beside another anchor
    found = row_losses(vectors, keys, torch.zeros(N), Contrast(PAIRS, 0.1), EVERY)
    near = unit(vectors)
    scores = {j: math.exp(near[0, 0] @ near[j, 1] / 0.1) for j in (0, 5, 6)}
    assert float(found[0]) == pytest.approx(-math.log(scores[0] / sum(scores.values())))


def test_scored_pairs_have_the_loss_of_cosent() -> None:
    vectors, keys = drawn(2)
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.3])
    found = row_losses(vectors, keys, scores, Contrast(SCORED, 0.05), EVERY)
    cosines = (unit(vectors)[:, 0] * unit(vectors)[:, 1]).sum(-1)
    wrong = [math.exp((cosines[i] - cosines[j]) / 0.05) for i in range(N) for j in range(N) if scores[i] < scores[j]]
    assert found.tolist() == pytest.approx([math.log(1 + sum(wrong))] * N)


def test_texts_with_labels_have_the_supervised_contrastive_loss() -> None:
    vectors, keys = drawn(1)
    labels = torch.tensor([0.0, 0, 1, 1, 1, 2, 0])
    found = row_losses(vectors, keys, labels, Contrast(CLASSES, 0.1), EVERY)
    near = unit(vectors)[:, 0]
    for i in range(N):
        same = [p for p in range(N) if p != i and labels[p] == labels[i]]
        total = sum(math.exp(near[i] @ near[a] / 0.1) for a in range(N) if a != i)
        wanted = [-math.log(math.exp(near[i] @ near[p] / 0.1) / total) for p in same]
        assert float(found[i]) == pytest.approx(sum(wanted) / len(wanted) if wanted else 0.0)


def test_matryoshka_is_the_mean_over_the_first_numbers_of_each_vector() -> None:
    vectors, keys = drawn(2)
    both = row_losses(vectors, keys, torch.zeros(N), Contrast(PAIRS, 0.1, (6, 3)), EVERY)
    each = [row_losses(vectors[..., :dim], keys, torch.zeros(N), Contrast(PAIRS, 0.1), EVERY) for dim in (6, 3)]
    torch.testing.assert_close(both, torch.stack(each).mean(0))


@pytest.mark.parametrize("kind", [PAIRS, SCORED, CLASSES])
def test_blocks_of_rows_have_the_losses_and_the_gradient_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, keys = drawn(1 if kind == CLASSES else 2)
    judged = torch.tensor([0.0, 1, 1, 0, 2, 2, 1])
    whole = vectors.clone().requires_grad_()
    losses = row_losses(whole, keys, judged, Contrast(kind, 0.1), EVERY)
    losses.sum().backward()
    monkeypatch.setattr(module, "BLOCK", 3)
    found, gradient = contrast(vectors, keys, judged, Contrast(kind, 0.1))
    torch.testing.assert_close(found, losses.detach())
    torch.testing.assert_close(gradient, whole.grad)
    assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_the_gradient_of_chunks_is_that_of_the_full_batch(chunk: int) -> None:
    """As the trainer does it: vectors without a graph, their gradient, then each chunk with a graph."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(D, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    texts, keys, judged = torch.randn(16, 2, D), torch.arange(32).reshape(16, 2), torch.zeros(16)
    of = Contrast(PAIRS, 0.05)
    row_losses(model(texts), keys, judged, of, slice(0, 16)).sum().backward()
    wanted = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        made = torch.cat([model(some) for some in texts.split(chunk)])
    _, gradient = contrast(made, keys, judged, of)
    for some, part in zip(texts.split(chunk), gradient.split(chunk), strict=True):
        (model(some) * part).sum().backward()
    for weight, right in zip(model.parameters(), wanted, strict=True):
        error = functional.mse_loss(weight.grad, right).sqrt() / right.square().mean().sqrt()
        assert float(error) < 1e-5
