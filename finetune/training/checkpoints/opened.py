"""A run is done only once its model has been opened: every weight there by its name and shape, every number finite, and
every file with the hash that it was written with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from finetune.errors import RunError, first_line
from finetune.training.checkpoints.manifest import FileRecord, checkpoints_in, hash_of, in_short, shares
from finetune.training.checkpoints.writing import every, rank, ranks, together

Shapes = Mapping[str, Sequence[int]]
WEIGHTS = ".safetensors"


def open_final(run_folder: Path, records: Mapping[str, FileRecord], expected: Shapes) -> None:
    """The model that has just been moved into its place; `records` are of its files as they were written, `expected`
    the weights that were trained, with their shapes. All ranks must call it, each reads its share. Raises RunError on
    all of them."""
    own = shares({name: record.bytes for name, record in records.items()}, ranks())[rank()]
    parts = every(together(lambda: [_look(run_folder / name, records[name]) for name in own]))
    problems = [problem for part in parts for found, *_ in part for problem in found]
    diverged = [name for part in parts for *_, names in part for name in names]
    there = {name: shape for part in parts for _, shapes, _ in part for name, shape in shapes.items()}
    if not there:
        problems.append(f"no weights ({WEIGHTS}) were written.")
    else:
        problems += [f"{name} is missing." for name in expected if name not in there]
        problems += [
            f"{name} is {there[name]}, and was trained as {list(shape)}."
            for name, shape in expected.items()
            if name in there and list(shape) != there[name]
        ]
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


def _look(path: Path, record: FileRecord) -> tuple[list[str], dict[str, list[int]], list[str]]:
    """What is wrong with a file, the shapes of the weights in it, and those that are not finite."""
    found: list[str] = []
    shapes: dict[str, list[int]] = {}
    diverged: list[str] = []
    try:
        if hash_of(path) != record.xxh3_128:
            return [f"{path.name} has other content than was written."], shapes, diverged
        if path.suffix != WEIGHTS:
            return found, shapes, diverged
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                tensor = file.get_tensor(name)
                shapes[name] = list(tensor.shape)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    diverged.append(name)
    except (OSError, SafetensorError) as error:
        found.append(f"{path.name} cannot be read: {first_line(error)}.")
    return found, shapes, diverged
