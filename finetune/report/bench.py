"""The content of a benchmark folder: the rows of `results.jsonl`, one per repeat, grouped into cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import listed
from finetune.report.published import BASE
from finetune.report.run_folder import read_json, read_lines, read_text, without_secrets
from finetune.report.text import as_dict, as_list, as_number, gib

RESULTS = "results.jsonl"
GRID = "grid.json"  # the requested cells
SHOWN = 6  # of the cells that have not run
DONE, PIPELINE = "done", "pipeline"


@dataclass(frozen=True)
class Cell:
    """All repeats of one cell. Values are medians over the repeats that were done; None without any."""

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
        """ "done", or the status of the last repeat that was not, with how many were not."""
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
        return _median(self.values(key))

    @property
    def rate(self) -> float | None:
        return self.median("samples_per_second")

    def by_repeat(self, figure: Callable[[Mapping[str, Any]], float | None]) -> dict[Any, float]:
        found = ((row.get("repeat"), figure(row)) for row in self.done)
        return {_hashable(repeat): value for repeat, value in found if value is not None}

    @property
    def rates(self) -> dict[Any, float]:
        """Samples per second by repeat."""
        return self.by_repeat(lambda row: as_number(row.get("samples_per_second")))

    @property
    def averages(self) -> dict[Any, float]:
        """The fullest rank's average bytes, by repeat."""
        return self.by_repeat(lambda row: max(numbers(_memory(row).get("average_bytes")), default=None))

    @property
    def setting(self) -> tuple[str, int, int, str]:
        """What it has in common with the DDP cell that it is compared with."""
        return self.model, self.count("world_size"), self.global_batch, self.word("precision")

    @property
    def spread(self) -> float | None:
        """The spread of samples per second over repeats: half the range, as a share of the median."""
        found = self.values("samples_per_second")
        return (max(found) - min(found)) / 2 / statistics.median(found) if len(found) > 1 and min(found) > 0 else None

    @property
    def step_seconds(self) -> float | None:
        each = (numbers(row.get("step_seconds")) for row in self.done)
        return _median([statistics.median(steps) for steps in each if steps and min(steps) > 0])

    def memory(self, key: str) -> list[float]:
        """Bytes by rank, the maximum over repeats."""
        each = [ranks for row in self.done if (ranks := numbers(_memory(row).get(key))) and min(ranks) >= 0]
        return [max(sizes) for sizes in zip(*each, strict=False)]

    def most(self, key: str) -> float | None:
        return max(self.memory(key), default=None)

    def measured(self, what: str) -> float | None:
        """The measured counterpart of `planned(what)`."""
        return self.step_seconds if what == "step_seconds" else self.most(what)

    @property
    def by_kind(self) -> dict[str, int]:
        kinds = next((kinds for row in self.done if (kinds := as_dict(_memory(row).get("by_kind")))), {})
        return {str(kind): int(size) for kind, value in kinds.items() if (size := as_number(value)) and size > 0}

    def planned(self, key: str) -> float | None:
        values = (as_number(as_dict(row.get("planned")).get(key)) for row in self.rows)
        return next((value for value in values if value and value > 0), None)

    @property
    def final_loss(self) -> float | None:
        """The loss of the last step; None if that is not a finite number, whatever earlier steps had."""
        ends = [numbers(losses[-1:]) for row in self.done if isinstance(losses := row.get("losses"), list) and losses]
        return _median([end for (end,) in ends]) if all(ends) else None


@dataclass
class Bench:
    name: str
    folder: Path
    cells: list[Cell]
    scale: str = ""  # of all cells, if their rows do not give it
    grids: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(cell.model for cell in self.cells))

    def of(self, model: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.model == model]

    def facts(self, key: str) -> list[str]:
        """The rows' `versions`, `machine` or the like: one text, or several if they differ."""
        return _facts(row.get(key) for cell in self.cells for row in cell.rows)

    @property
    def measured_by(self) -> list[str]:
        return _facts(_memory(row).get("measured_by") for cell in self.cells for row in cell.done)

    def base(self, cell: Cell) -> Cell | None:
        """The DDP cell of the same setting, without checkpointing; with the same micro-batch if possible."""
        found = [one for one in self.of(cell.model) if one.done and one.layout.lower() == BASE
                 and not one.count("checkpoint_interval") and one.setting == cell.setting]  # fmt: skip
        return min(found, key=lambda one: one.count("micro_batch") != cell.count("micro_batch"), default=None)

    def rate_to_ddp(self, cell: Cell) -> float | None:
        base = self.base(cell)
        return paired(cell.rates, base.rates) if base else None

    def memory_to_ddp(self, cell: Cell) -> float | None:
        """The ratio of average memory, which is what the GPT-lite study gives."""
        base = self.base(cell)
        return paired(cell.averages, base.averages) if base else None


def is_bench(folder: Path) -> bool:
    return (folder / RESULTS).is_file()


def cells_of(rows: Iterable[Mapping[str, Any]]) -> list[Cell]:
    groups: dict[str, dict[Any, Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["cell"], {})[_hashable(row.get("repeat"))] = row  # a later row wins
    return [Cell(name, tuple(repeats.values())) for name, repeats in groups.items()]


def read_bench(folder: Path, name: str) -> Bench:
    """Never raises for the folder's content; problems go into `notes`."""
    notes = list[str]()
    rows = read_lines(folder, RESULTS, notes)
    named = [without_secrets(row) for row in rows if isinstance(row.get("cell"), str)]
    if len(named) < len(rows):
        notes.append(f"{RESULTS}: {len(rows) - len(named)} rows without a cell were skipped.")
    cells = cells_of(named)
    if not cells:
        notes.append(f"{RESULTS}: there are no results yet.")
    grid = without_secrets(read_json(folder, GRID, notes))
    had = {cell.name for cell in cells}
    due = [cell for cell in as_list(grid.get("cells")) if isinstance(cell, str) and cell not in had]
    if due and cells:
        notes.append(f"Not run yet (`--resume` runs them): {listed(due, SHOWN)}.")
    files = sorted(path.name for path in folder.glob("*.yaml"))
    grids = {file: text for file in files if (text := read_text(folder, file, notes))}
    return Bench(name, folder, cells, _fact(grid.get("scale") or ""), grids, notes)


def paired(ours: Mapping[Any, float], base: Mapping[Any, float]) -> float | None:
    """The median over repeats of the ratio repeat by repeat, since repeats are interleaved and each pair saw the same
    machine; without common repeats, the ratio of the medians. None without values, or if the base's are 0."""
    ratios = [value / base[repeat] for repeat, value in ours.items() if base.get(repeat)]
    if ratios:
        return statistics.median(ratios)
    middle = statistics.median(base.values()) if base else 0.0
    return statistics.median(ours.values()) / middle if ours and middle else None


def _memory(row: Mapping[str, Any]) -> dict[str, Any]:
    return as_dict(row.get("memory"))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def numbers(found: Any) -> list[float]:
    return [value for one in as_list(found) if (value := as_number(one)) is not None]


def _facts(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(_fact(value) for value in values if value))


def _fact(value: Any) -> str:
    """An object in one line: words unchanged, bytes in GiB, numbers with their names."""
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
