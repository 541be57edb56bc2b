"""A run is done only once its model has been opened: every weight there by its name and shape, every number finite, and
every file with the hash that it was written with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from finetune.errors import RunError, first_line
from finetune.training.checkpoints.manifest import FileRecord, checkpoints_in, hash_of, in_short, shares
from finetune.training.checkpoints.writing import every, rank, ranks, together

Shapes = Mapping[str, Sequence[int]]
WEIGHTS = ".safetensors"


@dataclass
class _Found:
    """What is wrong with files, the shapes of the weights in them, and the names of those that are not finite."""

    problems: list[str] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)

    def take(self, other: _Found) -> None:
        self.problems += other.problems
        self.shapes |= other.shapes
        self.diverged += other.diverged


def open_final(run_folder: Path, records: Mapping[str, FileRecord], expected: Shapes) -> None:
    """The model that has just been moved into its place; `records` are of its files as they were written, `expected`
    the weights that were trained, with their shapes. All ranks must call it, each reads its share. Raises RunError on
    all of them."""
    own = shares({name: record.bytes for name, record in records.items()}, ranks())[rank()]
    found = _Found()
    for part in every(together(lambda: _look(run_folder, {name: records[name] for name in own}))):
        found.take(part)
    problems, diverged = found.problems + _unlike(found.shapes, expected), found.diverged
    if diverged and not problems:
        raise RunError(
            f"{run_folder}: training has diverged: {', '.join(diverged[:3])} of the model that was saved "
            f"{'hold' if len(diverged) > 1 else 'holds'} numbers that are not finite. Lower --learning_rate."
        )
    if problems:
        newest = next(iter(checkpoints_in(run_folder)), None)
        state = f"The training state is in {newest}" if newest else "No checkpoint was saved"
        raise RunError(
            f"{run_folder}: the model cannot be opened as it was trained: {in_short(problems)} {state}; once that is "
            "mended, --resume auto saves the model again."
        )


def _unlike(there: Shapes, expected: Shapes) -> list[str]:
    """What differs from the weights that were trained."""
    if not there:
        return [f"no weights ({WEIGHTS}) were written."]
    missing = [f"{name} is missing." for name in expected if name not in there]
    return missing + [
        f"{name} is {there[name]}, and was trained as {list(shape)}."
        for name, shape in expected.items()
        if name in there and list(shape) != there[name]
    ]


def _look(folder: Path, records: Mapping[str, FileRecord]) -> _Found:
    found = _Found()
    for name, record in records.items():
        try:
            if hash_of(folder / name) != record.xxh3_128:
                found.problems.append(f"{name} has other content than was written.")
            elif name.endswith(WEIGHTS):
                _read(folder / name, found)
        except (OSError, SafetensorError) as error:
            found.problems.append(f"{name} cannot be read: {first_line(error)}.")
    return found


def _read(path: Path, found: _Found) -> None:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            tensor = file.get_tensor(name)
            found.shapes[name] = list(tensor.shape)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                found.diverged.append(name)
