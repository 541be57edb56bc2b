"""Hard negatives: texts that the model, before training, places near an anchor although they are not its positive.

Candidates are the positives of all rows. A candidate almost as similar as the row's own positive is probably another
correct answer: above MOST times that similarity it is left out (de Souza et al., arXiv 2407.15831, TopK-PercPos).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

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
BLOCK = 1024  # anchors compared with all candidates at a time
KEPT = "negatives.npz"  # in the run folder, for a resumed run


class WithNegatives:
    """Rows of pairs, each with `count` negatives added once they are `found`: for each row, the rows (N, count) whose
    positives are its negatives."""

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
    """For each row, the rows whose positives are its negatives; saved in the run folder. All ranks must call it. Raises
    RequestError if a resumed run cannot find them."""
    kept = Path(trainer.args.output_dir) / KEPT
    run = trainer.identity.run
    if trainer.state.global_step > 0:
        found: Any = of_first(_read(kept, run, (len(rows), rows.count)) if leads() else None)
        if found is None:
            raise RequestError(
                f"--resume: the negatives that this run mined are not in {kept}, and the model has moved on since. "
                "Start the run again, or put the file back."
            )
        return np.asarray(found)
    anchors, positives = ([ids[side] for ids in rows.rows[IDS]] for side in (0, 1))
    near = [functional.normalize(embedded(texts), dim=-1) for texts in (anchors, positives)]
    keys = torch.tensor([row[:2] for row in rows.rows[KEYS]])
    share = -(-len(rows) // trainer.args.world_size)  # rows per rank; the last rank may have fewer
    begin = trainer.args.process_index * share
    own = torch.zeros(share, rows.count, dtype=torch.int64)
    blocks = hard_negatives(near[0], near[1], keys, rows.count, range(begin, min(begin + share, len(rows))))
    for place, some in blocks:
        trainer.progress()
        own[place - begin : place - begin + len(some)] = some
    chosen: npt.NDArray[np.int64]
    chosen = trainer.accelerator.gather(own.to(trainer.args.device))[: len(rows)].cpu().numpy()
    if leads():
        write_whole(kept, partial(np.savez, run=np.array(run), rows=chosen))
    return chosen


def _read(kept: Path, run: str, shape: tuple[int, int]) -> npt.NDArray[np.int64] | None:
    """The negatives in the file; None if they are not those of this run."""
    try:
        with np.load(kept) as stored:
            found = stored["rows"]
            is_own = str(stored["run"]) == run and found.shape == shape and found.dtype == np.int64
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return found if is_own and ((found >= 0) & (found < len(found))).all() else None


def hard_negatives(
    anchors: Tensor, positives: Tensor, keys: Tensor, count: int, of: range
) -> Iterator[tuple[int, Tensor]]:
    """For each BLOCK of the rows `of`: its first row, and the `count` rows (B, count) whose positives are nearest to
    its anchors. Takes unit vectors (N, D) and `keys` (N, 2), equal where texts are; each text is a candidate once. If
    there are too few, the row itself fills the place, as its own positive is then no negative."""
    _, first = np.unique(keys[:, 1].numpy(), return_index=True)
    candidates = torch.from_numpy(np.sort(first))
    of_anchor: dict[int, list[int]] = {}
    for anchor, positive in keys.tolist():
        of_anchor.setdefault(anchor, []).append(positive)
    place = {key: i for i, key in enumerate(keys[candidates, 1].tolist())}
    near = positives[candidates].T
    for begin in range(of.start, of.stop, BLOCK):
        rows = slice(begin, min(begin + BLOCK, of.stop))
        own = (anchors[rows] * positives[rows]).sum(1, keepdim=True)
        scores = anchors[rows] @ near
        scores[scores > MOST * own] = -torch.inf
        for i, anchor in enumerate(keys[rows, 0].tolist()):
            known = [place[key] for key in (anchor, *of_anchor[anchor]) if key in place]
            scores[i, known] = -torch.inf
        best = scores.topk(min(count, len(candidates)), dim=1)
        itself = torch.arange(len(anchors))[rows, None]
        chosen = torch.where(best.values.isinf(), itself, candidates[best.indices])
        yield begin, torch.cat([chosen, itself.expand(-1, count - chosen.shape[1])], dim=1)
