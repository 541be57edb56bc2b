"""What a bench folder holds: rows of `results.jsonl`, one a repeat, gathered into cells."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.bench.by_ddp import BASE, Place, Setting, base_of, paired
from finetune.bench.published import FILE
from finetune.drawing.words import gib
from finetune.privacy import HIDDEN, TOKEN
from finetune.report.axes import as_number
from finetune.report.run_folder import read_json, read_lines, read_text, without_secrets

RESULTS = "results.jsonl"
GRID = "grid.json"  # the cells that were asked for
SHOWN = 6  # of those that were not run
DONE, DDP, PIPELINE = "done", BASE, "pipeline"
PUBLISHED = FILE


@dataclass(frozen=True)
class Cell:
    """All repeats of one. Figures are medians over those that were done; None where there is none."""

    name: str
    rows: tuple[Mapping[str, Any], ...]

    def word(self, key: str) -> str:
        value = self.rows[0].get(key)
        return "" if value is None else str(value)

    def count(self, key: str, default: int = 0) -> int:
        value = as_number(self.rows[0].get(key))
        return default if value is None else int(value)

    @property
    def model(self) -> str:
        return self.word("model")

    @property
    def layout(self) -> str:
        return self.word("layout")

    @property
    def done(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row.get("status") == DONE]

    @property
    def status(self) -> str:
        """ "done", or with how many of the repeats were, or what became of the last."""
        if len(self.done) == len(self.rows):
            return DONE
        last = str(next(row.get("status") for row in reversed(self.rows) if row.get("status") != DONE))
        return f"{last} {len(self.rows) - len(self.done)}/{len(self.rows)}" if self.done else last

    @property
    def global_batch(self) -> int:
        replicas = self.count("world_size", 1) // max(self.count("pipeline_parallel_size", 1), 1)
        return self.count("micro_batch", 1) * self.count("accumulation", 1) * max(replicas, 1)

    def values(self, key: str) -> list[float]:
        return [value for row in self.done if (value := as_number(row.get(key))) is not None and value >= 0]

    def median(self, key: str) -> float | None:
        return statistics.median(found) if (found := self.values(key)) else None

    @property
    def rate(self) -> float | None:
        return self.median("samples_per_second")

    @property
    def rates(self) -> dict[Any, float]:
        """Samples a second by repeat."""
        found = ((row.get("repeat"), as_number(row.get("samples_per_second"))) for row in self.done)
        return {_hashable(repeat): value for repeat, value in found if value is not None}

    @property
    def averages(self) -> dict[Any, float]:
        """The average bytes of the fullest rank, by repeat."""
        found = {}
        for row in self.done:
            memory = row.get("memory")
            if isinstance(memory, dict) and (ranks := numbers(memory.get("average_bytes"))):
                found[_hashable(row.get("repeat"))] = max(ranks)
        return found

    @property
    def place(self) -> Place:
        setting = Setting(self.model, self.count("world_size"), self.global_batch, self.word("precision"))
        return Place(setting, self.layout.lower(), self.count("micro_batch"), self.count("checkpoint_interval"))

    @property
    def spread(self) -> float | None:
        """Of samples a second over the repeats: half of the range, as a share of the median."""
        found = self.values("samples_per_second")
        return (max(found) - min(found)) / 2 / statistics.median(found) if len(found) > 1 and min(found) > 0 else None

    @property
    def step_seconds(self) -> float | None:
        found = [median for row in self.done if (steps := numbers(row.get("step_seconds"))) and min(steps) > 0
                 for median in (statistics.median(steps),)]  # fmt: skip
        return statistics.median(found) if found else None

    def memory(self, key: str) -> list[float]:
        """Bytes by rank, the most of all repeats."""
        each = [numbers(memory.get(key)) for row in self.done if isinstance(memory := row.get("memory"), dict)]
        each = [one for one in each if one and min(one) >= 0]
        ranks = min(map(len, each), default=0)
        return [max(one[rank] for one in each) for rank in range(ranks)]

    def most(self, key: str) -> float | None:
        return max(self.memory(key), default=None)

    def measured(self, what: str) -> float | None:
        """What `planned` gives under the same name."""
        return self.step_seconds if what == "step_seconds" else self.most(what)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of rank 0."""
        for row in self.done:
            memory = row.get("memory")
            kinds = memory.get("by_kind") if isinstance(memory, dict) else None
            if isinstance(kinds, dict):
                return {
                    str(kind): int(size) for kind, value in kinds.items() if (size := as_number(value)) and size > 0
                }
        return {}

    def planned(self, key: str) -> float | None:
        plans = [plan for row in self.rows if isinstance(plan := row.get("planned"), dict)]
        return next((value for plan in plans if (value := as_number(plan.get(key))) and value > 0), None)

    @property
    def final_loss(self) -> float | None:
        found = [losses[-1] for row in self.done if (losses := numbers(row.get("losses")))]
        return statistics.median(found) if found else None


@dataclass
class Bench:
    name: str
    folder: Path
    cells: list[Cell]
    study: dict[str, Any] = field(default_factory=dict)
    scale: str = ""  # of all cells, where their rows do not say it
    grids: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(cell.model for cell in self.cells))

    def of(self, model: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.model == model]

    def facts(self, key: str) -> list[str]:
        """What the rows say of `versions`, `machine` or the like: one text, or several where they differ."""
        return self._said(row.get(key) for cell in self.cells for row in cell.rows)

    @property
    def measured_by(self) -> list[str]:
        """What the bytes of memory are."""
        held = (row.get("memory") for cell in self.cells for row in cell.done)
        return self._said(memory.get("measured_by") for memory in held if isinstance(memory, dict))

    def _said(self, values: Iterable[Any]) -> list[str]:
        return list(dict.fromkeys(_fact(value) for value in values if value))

    def base(self, cell: Cell) -> Cell | None:
        """The DDP run of the same model, ranks, samples a step and precision; of the same micro-batch if there is."""
        return base_of(cell, self.cells, lambda one: one.place)

    def rate_to_ddp(self, cell: Cell) -> float | None:
        """Of throughput."""
        base = self.base(cell)
        return paired(cell.rates, base.rates) if base else None

    def memory_to_ddp(self, cell: Cell) -> float | None:
        """Of the average, which is what the study of GPT-lite gives."""
        base = self.base(cell)
        return paired(cell.averages, base.averages) if base else None


def is_bench(folder: Path) -> bool:
    return (folder / RESULTS).is_file()


def read_bench(folder: Path, name: str) -> Bench:
    """Never raises for what is in the folder; it is said in `notes`."""
    notes = list[str]()
    rows = read_lines(folder / RESULTS, notes)
    groups: dict[str, dict[Any, dict[str, Any]]] = {}
    for row in rows:
        if not isinstance(row.get("cell"), str):
            notes.append(f"{RESULTS}: a row without a cell is left out.")
            continue
        groups.setdefault(row["cell"], {})[_hashable(row.get("repeat"))] = without_secrets(row)  # a later row wins
    cells = [Cell(cell, tuple(repeats.values())) for cell, repeats in groups.items()]
    if not cells:
        notes.append(f"{RESULTS}: it has no results yet.")
    grid = without_secrets(read_json(folder / GRID, notes))
    asked = grid.get("cells")
    due = [cell for cell in asked if isinstance(cell, str) and cell not in groups] if isinstance(asked, list) else []
    if due and cells:
        shown = ", ".join(due[:SHOWN]) + (f" and {len(due) - SHOWN} more" if len(due) > SHOWN else "")
        notes.append(f"Not run yet, `--resume` does: {shown}.")
    texts = {path.name: read_text(path, notes) for path in sorted(folder.glob("*.yaml"))}
    grids = {file: TOKEN.sub(HIDDEN, text) for file, text in texts.items() if text}
    return Bench(name, folder, cells, _study(notes), _fact(grid.get("scale") or ""), grids, notes)


def _study(notes: list[str]) -> dict[str, Any]:
    """What others have measured (finetune/bench/published.json): title, source, machine, figures."""
    return read_json(PUBLISHED, notes)


def numbers(found: Any) -> list[float]:
    some: Iterable[Any] = found if isinstance(found, list) else ()
    return [value for one in some if (value := as_number(one)) is not None]


def of_done(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.done]


def _fact(value: Any) -> str:
    """An object in a line: words as they are, bytes in GiB, numbers with their names."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(_item(str(key), one) for key, one in value.items() if one not in (None, [], {}, ""))


def _item(key: str, value: Any) -> str:
    size = as_number(value)
    if size is not None:
        return f"{gib(size)} GiB" if key.endswith("_bytes") else f"{value} {key}"
    text = value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if key in ("system", "processor", "gpus") else f"{key} {text}"


def _hashable(value: Any) -> Any:
    return value if value is None or isinstance(value, int | str) else str(value)
