"""What is asked in the documents of a split, and what is answered last: from their tokens as they are learnt."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from finetune.data.mixture import Joined
from finetune.data.packing import PackedDataset


@dataclass(frozen=True)
class Exchanges:
    """By document: its number in the split, the tokens before its last answer, and those of the answer."""

    numbers: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]
    documents: int  # of the split, those without a question or an answer included


def exchanges_of(split: PackedDataset | Joined) -> Exchanges:
    """Of conversations the last turn that is learnt, and of a row with a prompt its completion, each with the mark that
    ends it. Before it stands what it is learnt after, header included. A document without either is left out. The split
    has to say of each token whether it is learnt."""
    numbers, prompts, answers, first = [], [], [], 0
    for part in split.parts if isinstance(split, Joined) else (split,):
        tokens = part.tokens
        for number, (start, end) in enumerate(pairwise(tokens.starts.tolist()), first):
            begin, finish = _last_run(tokens.learnt[start:end] if tokens.learnt is not None else np.zeros(0, bool))
            if begin:
                numbers.append(number)
                prompts.append(tokens.ids[start : start + begin].tolist())
                answers.append(tokens.ids[start + begin : start + finish].tolist())
        first += len(tokens.starts) - 1
    return Exchanges(numbers, prompts, answers, first)


def _last_run(learnt: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Where the last tokens that are learnt together begin and end; 0, 0 where none are."""
    places = np.flatnonzero(learnt)
    if not len(places):
        return 0, 0
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1] if len(breaks) else places[0]), int(places[-1]) + 1
