"""A temporary folder from which the Trainer resumes in place of a checkpoint, and deletes it afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.errors import RunError, first_line
from finetune.run.files import UNFINISHED

PREFIX = UNFINISHED + "resharded-"  # no run resumes from such a folder, and the next start deletes it
RANDOM_STATES = "rng_state"  # prefix of the ranks' files


class Links:
    """Links to the files of `checkpoint`, for `ranks` ranks. Rank 0 calls the methods."""

    def __init__(self, checkpoint: Path, run_folder: Path, ranks: int) -> None:
        self.checkpoint, self.run_folder, self.ranks = checkpoint, run_folder, ranks
        self.folder = run_folder / (PREFIX + checkpoint.name)

    def make(self, random_states: bool) -> None:
        """Link all files, and with `random_states` those for each rank, under the names that the Trainer looks for;
        extra ranks share them. Raises RunError."""
        self.clear()
        try:
            self.folder.mkdir(parents=True)
            for path in self.checkpoint.iterdir():
                if not path.name.startswith(RANDOM_STATES):
                    (self.folder / path.name).symlink_to(path.resolve())
            found = sorted(self.checkpoint.glob(f"{RANDOM_STATES}*.pth"), key=lambda path: (len(path.name), path.name))
            for rank in range(self.ranks if found and random_states else 0):
                name = f"rng_state_{rank}.pth" if self.ranks > 1 else "rng_state.pth"
                (self.folder / name).symlink_to(found[rank % len(found)].resolve())
        except OSError as error:
            self.clear()
            raise RunError(f"{self.folder}: cannot be written ({error.strerror or first_line(error)}).") from error

    def clear(self) -> None:
        """Delete the folder, and any left by killed runs."""
        for folder in self.run_folder.glob(PREFIX + "*"):
            shutil.rmtree(folder, ignore_errors=True)
