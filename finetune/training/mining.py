"""Hard negatives: texts that the model, before it is trained, takes to be near an anchor, and that are not its
positive.

Candidates are the positives of all rows. One that is almost as near as the row's own positive is likely to be another
right answer: with more than MOST of its similarity it is left out (de Souza et al., arXiv 2407.15831, TopK-PercPos).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from finetune.data.embedding import IDS, KEYS
from finetune.errors import RequestError
from finetune.training.checkpoints.writing import leads, of_first
from finetune.training.run_folder import write_whole

MOST = 0.95
BLOCK = 1024  # anchors that are compared with all candidates at a time
KEPT = "negatives.npy"  # in the run folder, for a run that goes on


class WithNegatives:
    """Rows of pairs with `count` negatives more each, once these are `found`: of each row the rows (N, count) whose
    positives they are."""

    def __init__(self, rows: Any, count: int) -> None:
        self.rows, self.count = rows, count
        self.found: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = dict(self.rows[number])
        if self.found is None:
            return row
        more = [self.rows[int(other)] for other in self.found[number]]
        return row | {name: [*row[name], *(other[name][1] for other in more)] for name in (IDS, KEYS)}


def mine(trainer: Any, rows: WithNegatives, embedded: Callable[[list[list[int]]], Tensor]) -> npt.NDArray[np.int64]:
    """Of each row the rows whose positives are its negatives, kept in the run folder. All ranks must call it. Raises
    RequestError where a resumed run has lost them."""
    kept = Path(trainer.args.output_dir) / KEPT
    resumed = trainer.state.global_step > 0
    found: Any = of_first(np.load(kept) if leads() and resumed and kept.is_file() else None)
    if found is not None and found.shape == (len(rows), rows.count):
        return np.asarray(found)
    if resumed:
        raise RequestError(
            f"--resume: the negatives that were mined are not in {kept}, and the model has moved on since. Start the "
            "run again, or put the file back."
        )
    anchors, positives = ([ids[side] for ids in rows.rows[IDS]] for side in (0, 1))
    was_training = trainer.model_wrapped.training
    trainer.model_wrapped.eval()
    near = [functional.normalize(embedded(texts), dim=-1) for texts in (anchors, positives)]
    trainer.model_wrapped.train(was_training)
    keys = torch.tensor([row[:2] for row in rows.rows[KEYS]])
    chosen: npt.NDArray[np.int64] = hard_negatives(near[0], near[1], keys, rows.count).numpy()
    if leads():
        write_whole(kept, partial(np.save, arr=chosen))
    return chosen


def hard_negatives(anchors: Tensor, positives: Tensor, keys: Tensor, count: int) -> Tensor:
    """The `count` rows (N, count) whose positives are nearest to each row's anchor, of unit vectors (N, D) and `keys`
    (N, 2) that are equal where texts are. A text is taken once. Where there are too few, the row itself stands, whose
    positive is no negative to it."""
    _, first = np.unique(keys[:, 1].numpy(), return_index=True)
    candidates = torch.from_numpy(np.sort(first))
    of_anchor: dict[int, list[int]] = {}
    for anchor, positive in keys.tolist():
        of_anchor.setdefault(anchor, []).append(positive)
    place = {key: i for i, key in enumerate(keys[candidates, 1].tolist())}
    found = []
    for begin in range(0, len(anchors), BLOCK):
        rows = slice(begin, begin + BLOCK)
        own = (anchors[rows] * positives[rows]).sum(1, keepdim=True)
        scores = anchors[rows] @ positives[candidates].T
        scores[scores > MOST * own] = -torch.inf
        for i, anchor in enumerate(keys[rows, 0].tolist()):
            known = [place[key] for key in (anchor, *of_anchor[anchor]) if key in place]
            scores[i, known] = -torch.inf
        best = scores.topk(min(count, len(candidates)), dim=1)
        itself = torch.arange(len(anchors))[rows, None]
        chosen = torch.where(best.values.isinf(), itself, candidates[best.indices])
        found.append(torch.cat([chosen, itself.expand(-1, count - chosen.shape[1])], dim=1))
    return torch.cat(found)
