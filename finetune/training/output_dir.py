"""The run folder before a run: may it be written, and what is deleted."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from finetune.dsconfig.load import NVME_FOLDER
from finetune.errors import RequestError
from finetune.safe_read import read_json_object
from finetune.training.arguments import Request
from finetune.training.checkpoints.lock import LOCK, RESUMED_WAITS_SECONDS, lock_run_folder
from finetune.training.checkpoints.writing import clear_leftovers
from finetune.training.run_files import RUN_RECORD
from finetune.training.run_folder import command_line

INPUTS = (
    "model_name_or_path",
    "tokenizer_name",
    "dataset_name",
    "train_file",
    "validation_file",
    "test_file",
    "train_dir",
    "validation_dir",
    "test_dir",
    "cifar_dir",
    "config",
    "deepspeed",
)


def check_output_dir(request: Request) -> None:
    """Refuse a folder that cannot be written, or that holds a run which may not be overwritten. Only rank 0 calls it.

    Nothing is deleted yet: `open_output_dir` does that once the rest of the request has been found right.
    """
    folder = Path(request.values["output_dir"]).expanduser()
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--output_dir {folder}: is a file. Give a folder.")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RequestError(
            f"--output_dir {folder}: cannot be written ({error.strerror}). Give another folder."
        ) from error
    entries = [p.name for p in folder.iterdir() if p.name not in ("lost+found", LOCK)] if folder.is_dir() else []
    resume = request.values.get("resume")
    if resume == "allow" and entries == [NVME_FOLDER]:
        return
    if not entries or (resume and (resume != "allow" or RUN_RECORD in entries)):
        return
    if not request.values.get("overwrite_output_dir"):
        raise RequestError(
            f"--output_dir {folder}: holds {len(entries)} files or folders already. Go on with it by --resume auto, "
            "delete it by --overwrite_output_dir True, or give another folder."
        )
    if RUN_RECORD not in entries:
        raise RequestError(
            f"--output_dir {folder}: holds {', '.join(sorted(entries)[:3])} but no {RUN_RECORD}, so it is no run of "
            "ours and is not deleted. Empty it by hand, or give another folder."
        )
    for name in INPUTS:
        given = Path(str(request.values.get(name) or "")).expanduser()
        if request.values.get(name) and given.exists() and given.resolve().is_relative_to(folder.resolve()):
            raise RequestError(
                f"--overwrite_output_dir would delete {folder}, which holds --{name} {given}. Give another "
                "--output_dir."
            )


def lock_output_dir(request: Request) -> str | None:
    """No second run may write there from now on. Returns what is to be said. Only rank 0, after `check_output_dir`."""
    folder = Path(request.values["output_dir"]).expanduser()
    wait = RESUMED_WAITS_SECONDS if request.values.get("resume") else 0.0
    return lock_run_folder(folder, command_line(request.argv, request.launch), wait)


def open_output_dir(request: Request) -> None:
    """Make the folder, without the run that --overwrite_output_dir gives up, and without what a run that was cut off
    left half written. Only rank 0, after `check_output_dir`."""
    folder = Path(request.values["output_dir"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    lock_output_dir(request)  # of a folder that was not there before
    clear_leftovers(folder)
    if request.values.get("overwrite_output_dir"):
        for path in folder.iterdir():
            if path.name in (NVME_FOLDER, LOCK):
                continue  # a model that is being built swaps its parameters there already; the lock is ours
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_same_model(checkpoint: str | None, config: Any) -> None:
    """Raises RequestError where a checkpoint is of a model with other labels or another vocabulary: the data have
    changed, or the flags."""
    path = Path(checkpoint or "") / "config.json"
    if not checkpoint or not path.is_file():
        return
    before, now = read_json_object(path), json.loads(config.to_json_string(use_diff=False))
    shape = "model_type id2label vocab_size hidden_size hidden_sizes depths dim num_hidden_layers n_layers"
    for name in shape.split():
        if name in before and name in now and before[name] != now[name]:
            raise RequestError(
                f"--resume: {checkpoint} is of a model with {name} {before[name]}, but these data and flags make one "
                f"with {now[name]}. Resume with the flags in its recipe.yaml, or give another --output_dir."
            )
