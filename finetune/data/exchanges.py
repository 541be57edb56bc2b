"""The prompt and the last answer of each document of a split, from its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from finetune.data.mixture import Joined
from finetune.data.packing import PackedDataset


@dataclass(frozen=True)
class Exchanges:
    """For each document: its number in the split, the tokens before its last answer, and the answer's tokens."""

    numbers: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]
    documents: int  # documents in the split, including those without a prompt or answer


def exchanges_of(split: PackedDataset | Joined) -> Exchanges:
    """The last trained turn of each conversation, or a row's completion, including its end token; the prompt is
    everything before it, including the header. Skips documents without a prompt or answer. The split must record which
    tokens are trained on."""
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
    """Start and end of the last contiguous run of trained tokens; 0, 0 if there is none."""
    places = np.flatnonzero(learnt)
    if not len(places):
        return 0, 0
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1] if len(breaks) else places[0]), int(places[-1]) + 1
