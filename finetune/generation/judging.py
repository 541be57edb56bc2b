"""Texts that a model in training generates for held-out samples: on all ranks, with their metrics, and as a file and a
table for the reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import distributed

from finetune.data.columns import Labels
from finetune.generation.batches import Batch, rounds_of
from finetune.training.metric_modules import LoadedMetrics, load_metrics
from finetune.training.run_folder import write_text
from finetune.training.trainer import FinetuneTrainer

USUAL_METRICS = ("exact_match", "rouge")
SAMPLES = {"predictions": ["one text", "another one"], "references": ["one text", "another"]}
SHOWN_ROWS, SHOWN_CHARACTERS = 8, 160  # in the model card
Row = TypeVar("Row")


class TextMetrics(LoadedMetrics):
    """A `compute_metrics` that calls `of_rows`, whose metrics are `own` (and whether greater is better); `of_texts`
    applies the metrics called `names` to generated texts. Raises RequestError for a metric that cannot be loaded."""

    def __init__(
        self, names: Sequence[str], task: str, own: Mapping[str, bool], of_rows: Callable[[Any], dict[str, float]]
    ) -> None:
        self.labels, self.own, self.of_rows = Labels(task, ()), own, of_rows
        self.metrics = load_metrics(names, None, SAMPLES, task.replace("_", " "), tuple(own))

    def __call__(self, evaluated: Any) -> dict[str, float]:
        return self.of_rows(evaluated)

    def of_texts(self, written: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
        """The metrics of generated texts, the same on each rank."""
        return self.figures({"predictions": list(written), "references": list(truth)})


def over_ranks(
    trainer: FinetuneTrainer, batches: Sequence[Batch], write: Callable[[Batch], Sequence[Row]]
) -> list[Row]:
    """What `write` returns for the samples of all batches, in the order of their numbers, on every rank. All ranks must
    call it. Batches, and so the texts, do not depend on the number of ranks. If weights are sharded, a rank without a
    batch repeats another's, and `write` must keep finished ranks running until the last is done (`synced_gpus` of
    transformers' `generate`)."""
    rank, ranks = trainer.args.process_index, trainer.args.world_size
    own: list[tuple[int, Row]] = []
    for some in rounds_of(batches, ranks):
        trainer.progress()
        mine = some[rank] if rank < len(some) else some[0] if trainer.needs_all_ranks else None
        rows = write(mine) if mine else []
        own += zip(mine.numbers, rows, strict=True) if mine and rank < len(some) else []
    every: list[Any] = [own]
    if ranks > 1:
        every = [None] * ranks
        distributed.all_gather_object(every, own)
    of_number = dict(row for some in every for row in some)
    return [of_number[number] for number in sorted(of_number)]


def write_rows(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write a line of JSON for each row of `columns`, which have equal lengths."""
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def table_of(columns: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    """Evenly spaced rows of `columns` after a header row, for the model card."""
    count = len(next(iter(columns.values())))
    places = np.unique(np.linspace(0, count - 1, SHOWN_ROWS).astype(int))
    return [tuple(columns), *([_short(texts[int(i)]) for texts in columns.values()] for i in places)]


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= SHOWN_CHARACTERS else f"{one[: SHOWN_CHARACTERS - 3]}..."
