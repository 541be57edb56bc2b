"""The final model of a run folder: which weights it gets, how it is moved into place, and the check that it opens.

A run is done only once its model has been opened and checked: names and shapes, finite values, file hashes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune.errors import FinetuneError, RunError, first_line
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.manifest import CHECKPOINT, FileRecord, checkpoints_in, hash_of, in_short, shares
from finetune.training.checkpoints.verifying import verify_together
from finetune.training.checkpoints.writing import by_first, every, flush, leads, rank, ranks, together

FINAL = "final"  # the folder in which the model is assembled
Shapes = Mapping[str, Sequence[int]]
WEIGHTS = ".safetensors"


def best_in(run_folder: Path, named: str | None) -> Path | None:
    """The checkpoint in this run folder that trainer_state.json `named` best. Only the last path component is used: the
    file may be untrusted, and the folder may have moved."""
    name = Path(named or "").name
    return run_folder / name if CHECKPOINT.fullmatch(name) else None


def note_place_of_best(state: Any, place: Path) -> None:
    """Set the best checkpoint's path for trainer_state.json, when this step's checkpoint is saved at `place`."""
    best = state.best_global_step
    if best and (best == state.global_step or place.with_name(f"checkpoint-{best}").is_dir()):
        state.best_model_checkpoint = str(place.with_name(f"checkpoint-{best}"))


def best_to_load(run_folder: Path, named: str | None) -> Path | None:
    """`best_in`, if it verifies; else None, and rank 0 warns that the last weights are kept. All ranks must call it."""
    best, why = best_in(run_folder, named), None
    if best is None or not by_first(best.is_dir):
        why = "is gone"
    else:
        try:
            found = verify_together(best)
        except (FinetuneError, OSError) as error:  # training is done: this must not fail the run
            found = [first_line(error, 400)]
        if found:
            why = f"does not verify: {found[0]}"
    if why is None:
        return best
    if leads():
        print(
            f"warning: {best or named}, the best checkpoint, {why.rstrip('.')}. The last weights are kept.", flush=True
        )
    return None


def save_final(run_folder: Path, write: Callable[[Path], None]) -> dict[str, FileRecord]:
    """Save the model with `write`, and replace the one in the run folder. Returns the records of its files, for
    `open_final`. All ranks must call it.

    At every moment `from_pretrained` finds the old model, none, or the new one: the old weights are deleted before any
    file of the new model is moved, and the file that it looks for first (the index or the single file) is moved last.
    Until then `final/` is complete.
    """
    with (whole := AtomicFolder(run_folder / FINAL, None)) as folder:
        write(folder)
    by_first(lambda: _move_up(run_folder / FINAL))
    return whole.records


def _move_up(folder: Path) -> None:
    run_folder = folder.parent
    for old in _weights(run_folder):
        old.unlink()
    flush(run_folder)
    last = ("model.safetensors", "adapter_model.safetensors")
    for path in sorted(folder.iterdir(), key=lambda path: (path.name.endswith(".index.json"), path.name in last)):
        target = run_folder / path.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)  # from an earlier save
        os.replace(path, target)
    flush(run_folder)
    folder.rmdir()


def _weights(folder: Path) -> list[Path]:
    """The files that `from_pretrained` would open, the index first."""
    kinds = ("*.safetensors.index.json", "pytorch_model*.index.json", "model*.safetensors", "adapter_model.safetensors")
    return [path for kind in (*kinds, "pytorch_model*.bin", "adapter_model.bin") for path in sorted(folder.glob(kind))]


def open_final(run_folder: Path, records: Mapping[str, FileRecord], expected: Shapes) -> None:
    """Check the model that was just moved into place. `records` are its files as written; `expected` are the names and
    shapes of the trained weights. All ranks must call it; each reads its share. Raises RunError on all of them."""
    own = shares({name: record.bytes for name, record in records.items()}, ranks())[rank()]
    parts = every(together(lambda: _look(run_folder, {name: records[name] for name in own})))
    shapes = {name: shape for _, part, _ in parts for name, shape in part.items()}
    problems = [problem for part, _, _ in parts for problem in part] + _unlike(shapes, expected)
    diverged = [name for _, _, part in parts for name in part]
    if diverged and not problems:
        raise RunError(
            f"{run_folder}: training has diverged: {', '.join(diverged[:3])} of the saved model "
            f"{'hold' if len(diverged) > 1 else 'holds'} non-finite values. Lower --learning_rate."
        )
    if problems:
        newest = next(iter(checkpoints_in(run_folder)), None)
        state = f"The training state is in {newest}" if newest else "No checkpoint was saved"
        raise RunError(
            f"{run_folder}: the model cannot be opened as it was trained: {in_short(problems)} {state}. Fix that, then "
            "--resume allow; the run saves the model again."
        )


def _unlike(there: Shapes, expected: Shapes) -> list[str]:
    """The differences between the saved weights and the trained ones."""
    if not there:
        return [f"no weights ({WEIGHTS}) were written."]
    missing = [f"{name} is missing." for name in expected if name not in there]
    return missing + [
        f"{name} has shape {there[name]}, but was trained with {list(shape)}."
        for name, shape in expected.items()
        if name in there and list(shape) != there[name]
    ]


def _look(folder: Path, records: Mapping[str, FileRecord]) -> tuple[list[str], dict[str, list[int]], list[str]]:
    """Problems of the files, the shapes of their weights, and the names of weights that are not finite."""
    problems: list[str] = []
    shapes: dict[str, list[int]] = {}
    diverged: list[str] = []
    for name, record in records.items():
        try:
            if hash_of(folder / name) != record.xxh3_128:
                problems.append(f"{name} does not have the content that was written.")
            elif name.endswith(WEIGHTS):
                with safe_open(folder / name, framework="pt") as file:
                    for weight in file.keys():  # noqa: SIM118  (it is not a dict)
                        tensor = file.get_tensor(weight)
                        shapes[weight] = list(tensor.shape)
                        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                            diverged.append(weight)
        except (OSError, SafetensorError) as error:
            problems.append(f"{name} cannot be read: {first_line(error)}.")
    return problems, shapes, diverged
