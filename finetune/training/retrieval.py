"""Metrics of embeddings: retrieval (are a text's matches among its nearest?) and correlation with similarity scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor
from torch.nn import functional

from finetune.data.embedding_rows import CLASSES, SCORED
from finetune.training.contrast import Contrast, contrast

BLOCK = 1024  # rows compared with all others at a time
RECALLS = (1, 5, 10)
CUT = 10  # lower ranks count as 0 in the mean reciprocal rank


def embedding_metrics(of: Contrast, global_batch_size: int) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` over vectors (N, C D), keys (N, C) and the bits of scores or labels (N,). The loss is
    training's, over batches as large as training's, in an order that depends only on the number of rows."""

    def metrics(evaluated: Any) -> dict[str, float]:
        flat, keys, bits = (torch.from_numpy(np.ascontiguousarray(one)) for one in evaluated.predictions)
        vectors, judged = flat.float().reshape(*keys.shape, -1), bits.to(torch.int32).view(torch.float32)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(keys)))
        batches = order.split(global_batch_size)
        losses = [contrast(vectors[some], keys[some], judged[some], of)[0] for some in batches]
        found = {"loss": float(torch.cat(losses).mean()), **figures(vectors, keys, judged, of.kind)}
        for dim in of.dims:
            if dim < vectors.shape[-1]:
                less = figures(vectors[..., :dim], keys, judged, of.kind)
                found |= {f"{name}_dim_{dim}": value for name, value in less.items()}
        return found

    return metrics


def figures(vectors: Tensor, keys: Tensor, judged: Tensor, kind: str) -> dict[str, float]:
    """Metrics by name, from vectors (N, C, D)."""
    near = functional.normalize(vectors, dim=-1)
    if kind == SCORED:
        cosines = (near[:, 0] * near[:, 1]).sum(-1)
        if len(cosines) < 2:  # correlation is undefined
            return {"spearman": math.nan, "pearson": math.nan}
        return {"spearman": float(spearmanr(cosines, judged)[0]), "pearson": float(pearsonr(cosines, judged)[0])}
    if kind == CLASSES:
        return _of_ranks(ranks_of_labels(near[:, 0], judged))
    found = _of_ranks(ranks_of_positives(near, keys))
    if near.shape[1] > 2:
        scores = (near[:, :1] * near[:, 1:]).sum(-1)
        found["triplet_accuracy"] = float((scores[:, :1] > scores[:, 1:]).all(dim=1).float().mean())
    return found


def _of_ranks(ranks: Tensor) -> dict[str, float]:
    found = {f"recall_at_{k}": float((ranks <= k).float().mean()) for k in RECALLS}
    return found | {f"mrr_at_{CUT}": float(torch.where(ranks <= CUT, 1 / ranks, 0.0).mean())}


def ranks_of_positives(near: Tensor, keys: Tensor) -> Tensor:
    """The rank (N,) of each anchor's positive among all positives and negatives, each text once, from unit vectors
    (N, C, D). The anchor's other positives and its own text are left out; in a tie the positive ranks last."""
    documents, of_documents = near[:, 1:].reshape(-1, near.shape[-1]), keys[:, 1:].reshape(-1)
    unique, first = np.unique(of_documents.numpy(), return_index=True)
    corpus = documents[torch.from_numpy(first)]
    own = torch.from_numpy(np.searchsorted(unique, keys[:, 1].numpy()))
    of_anchor: dict[int, list[int]] = {}
    for anchor, place in zip(keys[:, 0].tolist(), own.tolist(), strict=True):
        of_anchor.setdefault(anchor, []).append(place)
    places = {key: i for i, key in enumerate(unique.tolist())}
    found = []
    for begin in range(0, len(near), BLOCK):
        rows = slice(begin, begin + BLOCK)
        scores = near[rows, 0] @ corpus.T
        score = scores.gather(1, own[rows, None])
        for i, anchor in enumerate(keys[rows, 0].tolist()):
            scores[i, of_anchor[anchor]] = -torch.inf
            if anchor in places:
                scores[i, places[anchor]] = -torch.inf
        found.append(1 + (scores >= score).sum(1))
    return torch.cat(found)


def ranks_of_labels(near: Tensor, labels: Tensor) -> Tensor:
    """For each text, the rank of the nearest other text with its label among all texts with other labels, from unit
    vectors (N, D). Texts whose label no other text has are left out."""
    found = []
    for begin in range(0, len(near), BLOCK):
        rows = slice(begin, begin + BLOCK)
        scores, same = near[rows] @ near.T, labels[rows, None] == labels
        itself = torch.eye(len(near), dtype=torch.bool)[rows]
        best = scores.masked_fill(~same | itself, -torch.inf).amax(1, keepdim=True)
        ranks = 1 + ((scores >= best) & ~same).sum(1)
        found.append(ranks[~best[:, 0].isinf()])
    return torch.cat(found)
