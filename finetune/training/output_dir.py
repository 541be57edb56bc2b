"""The run folder before a run: the lock, and what is deleted. Whether it may be written, finetune.run.output_folder
says."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.dsconfig.context import NVME_FOLDER
from finetune.run.files import LOCK
from finetune.run.run import Run
from finetune.training.checkpoints.lock import RESUMED_WAITS_SECONDS, lock_run_folder
from finetune.training.checkpoints.writing import clear_leftovers
from finetune.training.run_folder import command_line


def lock_output_dir(run: Run) -> str | None:
    """No second run may write there from now on. Returns what is to be said. Only rank 0, after `check_output_dir`."""
    folder = Path(run.values["output_dir"]).expanduser()
    wait = RESUMED_WAITS_SECONDS if run.value("resume") else 0.0
    return lock_run_folder(folder, command_line(run.argv, run.launch), wait)


def open_output_dir(run: Run) -> None:
    """Make the folder, without the run that --overwrite_output_dir gives up, and without what a run that was cut off
    left half written. Only rank 0, after `check_output_dir`."""
    folder = Path(run.values["output_dir"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    lock_output_dir(run)  # of a folder that was not there before
    clear_leftovers(folder)
    if run.value("overwrite_output_dir"):
        for path in folder.iterdir():
            if path.name in (NVME_FOLDER, LOCK):
                continue  # a model that is being built swaps its parameters there already; the lock is ours
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
