"""Which checkpoint a run resumes from. Before the process group exists, each rank makes a cheap check, so that a wrong
request fails at once. After that, rank 0 takes the run folder's lock and chooses again, because the previous run may
have saved another checkpoint meanwhile; then all ranks together read every byte of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import FinetuneError, NothingToDoError, RequestError
from finetune.run.files import IDENTITY, LAST_WRITTEN, REPLACED, STATE_FILE
from finetune.run.output_dir import FIRST_START, RESUMES, START_ANEW
from finetune.run.run import Run
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.given_files import other_training_files
from finetune.training.checkpoints.identity import mixed, of_another_run, read_identity, read_run
from finetune.training.checkpoints.manifest import (
    MANIFEST,
    altered,
    checkpoints_in,
    in_short,
    problems,
    read_manifest,
)
from finetune.training.checkpoints.state import state_problems
from finetune.training.checkpoints.verifying import verify_together
from finetune.training.checkpoints.writing import SHARED_DISK_SECONDS, by_first, every, restore_replaced

ALWAYS = ("auto", "allow")  # values of --resume that are not paths


@dataclass(frozen=True)
class Chosen:
    """The checkpoint folder, or None to start from scratch, and notes on it, one line each."""

    checkpoint: str | None
    notes: tuple[str, ...] = ()


def checkpoint_to_resume(run: Run) -> Chosen:
    """The checkpoint that --resume means, judged by names and sizes only. Raises RequestError if there is none, except
    for `allow`: a job that a cluster restarts may have been interrupted before its first checkpoint."""
    resume = run.value("resume")
    if not resume:
        return Chosen(None)
    return _newest(run, {}) if resume in ALWAYS else _named(run, Path(resume).expanduser())


def settle(run: Run, chosen: Chosen) -> Chosen:
    """All ranks agree on the checkpoint and read all of it; one that does not verify is skipped for an older one. Call
    it once the process group exists and rank 0 holds the lock. Raises RequestError on all ranks."""
    if run.value("resume") not in ALWAYS:
        _refuse_other_sight(chosen.checkpoint)
        if chosen.checkpoint is not None and (found := verify_together(Path(chosen.checkpoint))):
            raise RequestError(_refused(Path(chosen.checkpoint), found))
        return chosen
    seen_early, broken = chosen.checkpoint, dict[str, str]()
    by_first(lambda: restore_replaced(Path(run.values["output_dir"]).expanduser()))
    while True:
        chosen = by_first(lambda: _newest(run, broken))
        _refuse_other_disk(chosen.checkpoint, seen_early)
        if chosen.checkpoint is None or not (found := verify_together(Path(chosen.checkpoint))):
            return chosen
        broken[Path(chosen.checkpoint).name] = in_short(found)


def newest_verified(run_folder: Path) -> Path:
    """The newest checkpoint that verifies, for callers that have no Run. All ranks must call it."""
    for path in by_first(lambda: checkpoints_in(run_folder)):
        if not verify_together(path):
            return path
    raise RequestError(f"resume_from_checkpoint=True: {run_folder} holds no checkpoint that verifies. Name one.")


def _newest(run: Run, broken: dict[str, str]) -> Chosen:
    """The newest checkpoint in the run folder that passes the cheap check and has not been found `broken`."""
    folder, resume = Path(run.values["output_dir"]).expanduser(), run.values["resume"]
    skipped: list[str] = []
    for path, why in _looked_at(folder, broken, run.value("resume_changed") == "allow"):
        if why is None:
            _refuse_if_finished(run, path, RequestError if resume == "auto" else NothingToDoError)
            return Chosen(str(path), tuple(f"warning: a checkpoint is skipped: {line}" for line in skipped))
        skipped.append(why)
    if not skipped and resume == "allow":
        return Chosen(None)
    if not skipped:
        raise RequestError(f"--resume {resume}: {folder} holds no checkpoint. {FIRST_START}")
    raise RequestError(
        f"--resume {resume}: {folder} holds no checkpoint that verifies. {' '.join(skipped)} `finetune checkpoint "
        f"verify {folder}` gives details. {START_ANEW}"
    )


def _looked_at(folder: Path, broken: dict[str, str], takes_others: bool) -> Iterator[tuple[Path, str | None]]:
    """Checkpoints, newest first, each with its problem, if any. An interrupted save may have renamed the only one: rank
    0 restores its name once it holds the lock."""
    for link in sorted(path for path in folder.glob("checkpoint-*") if path.is_symlink()):
        yield link, f"{link.name} is a link, and a run resumes only from its own folders."
    own = read_run(folder)
    for path in checkpoints_in(folder) or sorted(folder.glob(f"{REPLACED}checkpoint-*"), reverse=True):
        if not (path / MANIFEST).exists():
            why = f"has no {MANIFEST}: another version wrote it. --resume {path} accepts it without verification."
            yield path, f"{path.name} {why}"
            continue
        found = broken.get(path.name) or in_short(_glance(path))
        if not found and not takes_others:
            found = of_another_run(path, own) or ""
        yield path, found or None


def _named(run: Run, path: Path) -> Chosen:
    """The checkpoint that the user named, which may predate manifests."""
    if not (path / STATE_FILE).is_file():
        raise RequestError(f"--resume {path}: is not a checkpoint folder (it has no trainer_state.json). {RESUMES}")
    if path.is_symlink():
        raise RequestError(f"--resume {path}: is a link to {os.readlink(path)}. Give the checkpoint itself.")
    notes: tuple[str, ...] = ()
    if not (path / MANIFEST).exists():
        notes = (f"warning: {path} has no {MANIFEST}, so it cannot be verified. It is used as it is.",)
        found = state_problems(path, None)
        if found:
            raise RequestError(_refused(path, found))
    elif found := _glance(path):
        raise RequestError(_refused(path, found))
    other = of_another_run(path, read_run(Path(run.values["output_dir"]).expanduser()))
    if other and run.value("resume_changed") != "allow":
        raise RequestError(
            f"--resume {path}: {other} Give another --output_dir, or resume anyway with --resume_changed allow."
        )
    return Chosen(str(path), notes)


def _glance(path: Path) -> list[str]:
    """Check names and sizes, and the content of the small files that are read before the rest."""
    if found := problems(path, hashes=False):
        return found
    manifest = read_manifest(path)
    found = altered(path, manifest, [name for name in (STATE_FILE, IDENTITY) if name in manifest.files])
    return found or state_problems(path, manifest.step) or mixed(path, manifest)


def _refused(path: Path, found: list[str]) -> str:
    return (
        f"--resume {path}: it does not verify. {in_short(found)} Give another checkpoint; auto takes the newest in "
        "--output_dir that verifies, if there is one."
    )


def _refuse_other_sight(checkpoint: str | None) -> None:
    """Raise unless all ranks found the given path: on a disk that is not shared, or lags, some would not."""
    seen = every(checkpoint)
    for number, found in enumerate(seen):
        if found != seen[0]:
            raise _seen_otherwise(seen[0], number, found or "no checkpoint")


def _refuse_other_disk(checkpoint: str | None, seen_early: str | None) -> None:
    """Raise unless all ranks come to see rank 0's choice; if it found none, no other rank may have seen one."""
    end = time.monotonic() + SHARED_DISK_SECONDS
    while checkpoint and not (Path(checkpoint) / STATE_FILE).is_file() and time.monotonic() < end:
        time.sleep(0.1)
    sees = (Path(checkpoint) / STATE_FILE).is_file() if checkpoint else seen_early is None
    for number, found in enumerate(every(sees)):
        if not found:
            raise _seen_otherwise(checkpoint, number, "does not see it" if checkpoint else "one")


def _seen_otherwise(by_first: str | None, rank: int, says: str) -> RequestError:
    return RequestError(
        f"--resume: rank 0 finds {by_first or 'no checkpoint'}, rank {rank} {says}. "
        "Put --output_dir on a disk that all hosts see."
    )


def _refuse_if_finished(run: Run, checkpoint: Path, kind: type[FinetuneError]) -> None:
    """Raise if the run has done all its steps: its results are kept. For a cluster's restart, this is not an error,
    unless the data are others."""
    state = read_json_object(checkpoint / STATE_FILE)
    asked = run.value("max_steps")
    by_steps = asked > 0 and state["global_step"] >= asked
    by_epochs = asked <= 0 and state["global_step"] >= state["max_steps"]
    card = checkpoint.parent / LAST_WRITTEN
    if not card.is_file() or card.stat().st_mtime < (checkpoint / STATE_FILE).stat().st_mtime:
        return  # interrupted after its last step: the work after training is still to be done
    if by_steps or (by_epochs and run.value("num_train_epochs") <= state["num_train_epochs"]):
        before = read_identity(checkpoint) if run.value("resume_changed") != "allow" else None
        if before and (changed := other_training_files(run, before)):
            raise RequestError(
                f"--resume: the run in {checkpoint.parent} has ended, and was trained on other files: "
                f"{', '.join(changed)} {'has' if len(changed) == 1 else 'have'} changed. Give another --output_dir."
            )
        raise kind(
            f"--resume: the run ended at step {state['global_step']}, and nothing is left to do. To continue, raise "
            "--num_train_epochs or --max_steps."
        )
