"""Contrastive losses over a whole global batch, and their gradients with respect to its embeddings.

A row's loss depends on all rows of a step, so a micro-batch has no loss by itself. First all rows are embedded without
a graph, and the loss gives the gradient of each embedding. Then each micro-batch is embedded again with a graph, and
its gradients are propagated back (GradCache: Gao et al., arXiv 2101.06983). Any global batch thus fits in the memory of
one micro-batch, and the gradient is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from finetune.data.embedding_rows import CLASSES, SCORED

BLOCK = 1024  # rows compared with all others at a time, to bound memory


@dataclass(frozen=True)
class Contrast:
    """The objective: `kind` is PAIRS, SCORED or CLASSES of finetune.data.embedding_rows; `dims` are the Matryoshka
    dimensions, how many leading numbers of a vector are compared; empty: all of them."""

    kind: str
    temperature: float
    dims: tuple[int, ...] = ()


def contrast(vectors: Tensor, keys: Tensor, judged: Tensor, of: Contrast) -> tuple[Tensor, Tensor]:
    """The loss of each row (N,) of a global batch's vectors (N, C, D), and the gradient (N, C, D) of the losses' sum.
    `keys` (N, C) are equal where texts are; `judged` (N,) are scores or label ids. All in fp32."""
    vectors = vectors.detach().requires_grad_()
    gradient, losses = torch.zeros_like(vectors), []
    block = len(vectors) if of.kind == SCORED else BLOCK
    with torch.enable_grad():
        for begin in range(0, len(vectors), block):
            rows = slice(begin, begin + block)
            found = row_losses(vectors, keys, judged, of, rows)
            gradient += torch.autograd.grad(found.sum(), vectors)[0]
            losses.append(found.detach())
    return torch.cat(losses), gradient


def row_losses(vectors: Tensor, keys: Tensor, judged: Tensor, of: Contrast, rows: slice) -> Tensor:
    """Losses of these `rows`: the mean over the dimensions (Matryoshka: Kusupati et al., arXiv 2205.13147)."""
    found = []
    for dim in of.dims or (vectors.shape[-1],):
        near = functional.normalize(vectors[..., :dim], dim=-1)
        if of.kind == SCORED:
            found.append(cosent(near, judged, of.temperature))
        elif of.kind == CLASSES:
            found.append(supervised(near[:, 0], judged, of.temperature, rows))
        else:
            found.append(info_nce(near, keys, of.temperature, rows))
    return torch.stack(found).mean(0)


def info_nce(near: Tensor, keys: Tensor, temperature: float, rows: slice) -> Tensor:
    """Cross entropy of each row's positive among the positives and negatives of all rows (van den Oord et al., arXiv
    1807.03748, equation 4, with cosines). False negatives are masked: texts equal to the positive or the anchor, and
    other positives of the same anchor."""
    count, texts = keys.shape
    documents = near[:, 1:].transpose(0, 1).reshape((texts - 1) * count, -1)  # all positives, then all negatives
    of_documents = keys[:, 1:].T.reshape(-1)
    anchors, positives = keys[rows, :1], keys[rows, 1:2]
    alike = (of_documents == positives) | (of_documents == anchors)
    if len(keys[:, 0].unique()) < count:
        alike |= _known(keys, rows)
    own = torch.arange(count, device=near.device)[rows]
    alike[torch.arange(len(own), device=near.device), own] = False
    scores = near[rows, 0] @ documents.T / temperature
    return functional.cross_entropy(scores.masked_fill(alike, -torch.inf), own, reduction="none")


def _known(keys: Tensor, rows: slice) -> Tensor:
    """Whether each document (all positives, then all negatives) is a positive of the row's anchor anywhere in the
    batch: (rows, (C - 1) N)."""
    texts, ids = keys.unique(return_inverse=True)
    pairs = (ids[:, 0] * len(texts) + ids[:, 1]).sort().values
    asked = ids[rows, :1] * len(texts) + ids[:, 1:].T.reshape(-1)
    return pairs[torch.searchsorted(pairs, asked).clamp(max=len(pairs) - 1)] == asked


def supervised(near: Tensor, labels: Tensor, temperature: float, rows: slice) -> Tensor:
    """Khosla et al., arXiv 2004.11362, equation 2: the mean cross entropy of the other texts with a row's label among
    all other texts; 0 if no other text has the label."""
    itself = torch.eye(len(near), dtype=torch.bool, device=near.device)[rows]
    same = (labels[rows, None] == labels) & ~itself
    scores = (near[rows] @ near.T / temperature).masked_fill(itself, -torch.inf)
    logs = scores.log_softmax(dim=1).masked_fill(~same, 0.0)
    return -logs.sum(1) / same.sum(1).clamp(min=1)


def cosent(near: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """log(1 + the sum of exp((a - b) / temperature)) over all pairs of rows in which the row with cosine `a` has the
    smaller score (Su, kexue.fm/archives/8847; sentence-transformers' CoSENTLoss). One number, repeated for each row:
    (N,)."""
    cosines = (near[:, 0] * near[:, 1]).sum(-1) / temperature
    wrong = (cosines[:, None] - cosines)[scores[:, None] < scores]
    return torch.cat([wrong.new_zeros(1), wrong]).logsumexp(0).expand(len(near))
