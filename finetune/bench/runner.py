"""Runs a grid: each repeat of each cell is a process, and yields a row however it ends. Never imports torch.

Repeat 0 of all cells comes first, then repeat 1, so that other load on the machine affects all cells alike.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.bench.cell import command_of, parameters_of, plan_of_cell, why_not
from finetune.bench.grid import Cell, Grid, config_sha256
from finetune.bench.models import TEXT
from finetune.bench.result import GRID, RECORD, RESULTS, Row, append, checked, read_rows
from finetune.errors import RequestError
from finetune.host.hardware import gpus_here, machine
from finetune.measure.outcome import CRASHED, DONE, UNSUPPORTED
from finetune.measure.processes import run
from finetune.plan.machine import Machine
from finetune.safe_read import read_json_object
from finetune.versions import revision, versions

LOGS, WORK = "logs", "work"
OF_CELL = ("model", "layout", "ds_config", "world_size", "micro_batch", "accumulation", "checkpoint_interval",
           "precision")  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """A grid, the folder for its results, and the machine to plan for."""

    grid: Grid
    folder: Path
    machine: Machine | None
    source: Path  # the grid's YAML

    def due(self, only: str | None) -> list[tuple[int, Cell]]:
        """(repeat, cell) in running order, without those that have a row. Raises RequestError if no cell matches
        `only`, a pattern such as *-zero2-* or a part of a name."""
        wanted = [cell for cell in self.grid.cells if only is None or is_named(cell.name, only)]
        if not wanted:
            names = ", ".join(cell.name for cell in self.grid.cells[:5])
            raise RequestError(f"--only {only}: no cell matches. There are {names}, ...; --dry_run lists them.")
        had = {(row.cell, row.repeat) for row in self.rows()}
        every = [(repeat, cell) for repeat in range(self.grid.repeats) for cell in wanted]
        return [(repeat, cell) for repeat, cell in every if (cell.name, repeat) not in had]

    def rows(self) -> list[Row]:
        return read_rows(self.folder) if (self.folder / RESULTS).is_file() else []

    def open(self, resume: bool) -> None:
        """Prepare the folder, and copy the YAML there. Raises RequestError unless it is empty or, with `resume`, holds
        part of the same grid."""
        record = self.folder / RECORD
        if record.is_file():
            if not resume:
                raise RequestError(
                    f"{self.folder} holds a benchmark. --resume runs what is missing; for a new one, give another "
                    "--output_dir, or delete the folder."
                )
            if read_json_object(record, inside=self.folder).get("sha256") != self.grid.sha256:
                raise RequestError(
                    f"--resume: {self.folder} holds another grid: cells, sizes, steps or a DeepSpeed config have "
                    "changed since. Give another --output_dir, and --compare the two."
                )
        else:
            if resume and not self._part.is_file():
                raise RequestError(
                    f"--resume: {self.folder} holds no benchmark to continue. Leave --resume out to start one there, "
                    "or give the --output_dir of the one to continue."
                )
            self._write_record(record)
        (self.folder / LOGS).mkdir(exist_ok=True)
        if not (yaml := self.folder / GRID).is_file():
            shutil.copyfile(self.source, yaml)

    @property
    def _part(self) -> Path:
        return (self.folder / RECORD).with_suffix(".part")

    def _write_record(self, record: Path) -> None:
        """Write the record first, and atomically, so that a kill leaves a folder that can be resumed."""
        part = self._part
        if self.folder.is_dir() and any(path != part for path in self.folder.iterdir()):
            raise RequestError(f"{self.folder} holds something other than a benchmark. Give another --output_dir.")
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "sha256": self.grid.sha256,
            "scale": self.grid.scale,
            "repeats": self.grid.repeats,
            "steps": self.grid.steps,
            "models": {name: asdict(model) for name, model in self.grid.models.items()},
            "cells": [cell.name for cell in self.grid.cells],
        }
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(record)

    def run(self, only: str | None) -> Iterator[Row]:
        """Run what is due; yields each row once it is on disk."""
        due = self.due(only)
        where: dict[str, Any] = {"versions": versions(), "machine": machine(), "git_revision": revision()}
        for repeat, cell in due:
            row = replace(self.one(cell, repeat), **where)
            append(self.folder, row)
            yield row

    def one(self, cell: Cell, repeat: int) -> Row:
        model, begun, start = self.grid.models[cell.model], time.time(), time.monotonic()
        row = Row(
            **{name: getattr(cell, name) for name in OF_CELL},
            cell=cell.name,
            ds_config_sha256=config_sha256(cell.ds_config),
            pipeline_parallel_size=cell.stages,
            scale=self.grid.scale,
            model_sha256=model.sha256,
            global_batch=cell.samples,
            steps=self.grid.steps,
            repeat=repeat,
            status=UNSUPPORTED,
            parameters=parameters_of(model),
            planned=plan_of_cell(cell, model, self.machine),
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        )
        if reason := why_not(cell):
            return replace(row, reason=reason)
        name = f"{cell.name}-r{repeat}"
        log, work = f"{LOGS}/{name}.txt", (self.folder / WORK / name).absolute()
        try:
            work.mkdir(parents=True, exist_ok=True)
            command = command_of(cell, self.grid, work, gpus_here() == 0)
            ended = run(command, self.folder / log, self.grid.timeout_seconds)
            row = replace(
                row, status=ended.kind, reason=ended.reason, seconds=round(time.monotonic() - start, 3), log=log
            )
            return self._with_figures(row, cell, work) if row.is_done else row
        finally:
            shutil.rmtree(self.folder / WORK, ignore_errors=True)

    def _with_figures(self, row: Row, cell: Cell, work: Path) -> Row:
        """`row` with the ranks' measurements. A step takes as long as its slowest rank."""
        model, held = self.grid.models[cell.model], ("peak_bytes", "average_bytes", "rss_peak_bytes")
        try:
            ranks = [json.loads((work / f"rank-{rank}.json").read_text()) for rank in range(cell.world_size)]
            seconds = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
            speed = cell.samples / statistics.median(seconds)
            counted = sum(rank["parameters"] for rank in ranks) * cell.stages // cell.world_size
            whole = {name: ranks[0][name] for name in ("by_kind", "measured_by")}
            found = replace(
                row,
                step_seconds=seconds,
                samples_per_second=speed,
                tokens_per_second=speed * model.sequence_tokens if model.name in TEXT else None,
                losses=ranks[0]["losses"],
                parameters=row.parameters or counted,
                memory={name: [rank[name] for rank in ranks] for name in held} | whole,
            )
            return checked(found)
        except FileNotFoundError as error:
            reason = f"it exited normally, but left no {Path(error.filename).name}"
        except (OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = f"it exited normally, but its measurements are unusable ({type(error).__name__}: {error})"
        return replace(row, status=CRASHED, reason=reason)


def is_named(name: str, pattern: str) -> bool:
    """Whether `name` matches a shell pattern, or contains it; commas separate several patterns."""
    return any(fnmatch.fnmatchcase(name, one) or one in name for one in pattern.split(","))


def progress_line(row: Row, number: int, many: int) -> str:
    if row.status != DONE:
        return f"[{number}/{many}] {row.cell}, repeat {row.repeat}: {row.status}: {row.reason}"
    return (
        f"[{number}/{many}] {row.cell}, repeat {row.repeat}: {row.samples_per_second:,.1f} samples/s, peak "
        f"{row.peak_bytes / 2**20:,.1f} MiB, in {row.seconds:.0f} s"
    )
