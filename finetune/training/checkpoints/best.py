"""The best checkpoint, whose weights become the final model: looked at as closely as one to go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError, first_line
from finetune.training.checkpoints.manifest import CHECKPOINT
from finetune.training.checkpoints.verifying import verify_together
from finetune.training.checkpoints.writing import leads, of_first, together


def best_in(run_folder: Path, named: str | None) -> Path | None:
    """The checkpoint of this run folder that trainer_state.json has `named` the best, by its last name alone: the file
    may be a stranger's, and the folder may have moved since."""
    name = Path(named or "").name
    return run_folder / name if CHECKPOINT.fullmatch(name) else None


def note_place_of_best(state: Any, place: Path) -> None:
    """What trainer_state.json is to say of the best checkpoint when that of this step is saved at `place`."""
    best = state.best_global_step
    if best and (best == state.global_step or place.with_name(f"checkpoint-{best}").is_dir()):
        state.best_model_checkpoint = str(place.with_name(f"checkpoint-{best}"))


def best_to_load(run_folder: Path, named: str | None) -> Path | None:
    """That one, once it has verified and the guard has seen it; else None, which rank 0 says: then the last weights
    are kept. All ranks must call it."""
    best, why = best_in(run_folder, named), None
    if best is None or not of_first(together(lambda: best.is_dir() if leads() else False)):
        why = "is gone"
    else:
        try:
            found = verify_together(best)
        except (FinetuneError, OSError) as error:  # the run is done: that must not end it
            found = [first_line(error, 400)]
        if found:
            why = f"is not as it was saved: {found[0]}"
    if why is None:
        return best
    if leads():
        print(
            f"warning: {best or named}, the best checkpoint, {why.rstrip('.')}. The last weights are kept.", flush=True
        )
    return None
