"""The run folder, before a run: whether --resume finds a checkpoint there, whether it can be written, and whether its
content may be deleted."""

from __future__ import annotations

import tempfile
from itertools import takewhile
from pathlib import Path

from finetune.dsconfig.context import NVME_FOLDER
from finetune.errors import RequestError
from finetune.run.files import LOCK, REPLACED, RUN_RECORD, STATE_FILE, SUPERVISION
from finetune.run.meanings import nearest
from finetune.run.paths import named_in
from finetune.run.run import Run

START_ANEW = "To start over, replace --resume with --overwrite_output_dir True."
FIRST_START = "--resume allow starts the run if there is none. To start over, give --overwrite_output_dir True instead."
NOT_A_RUNS = ("lost+found", LOCK, SUPERVISION)  # may be there before a run's first start
RESUMES = "Give one, auto, or allow."


def missing_checkpoint(run: Run) -> list[str]:
    """Errors in --resume that show in file names alone."""
    resume, folder = run.value("resume"), Path(run.value("output_dir")).expanduser()
    if not resume or resume == "allow":
        return []
    if resume != "auto":
        there = (Path(resume).expanduser() / STATE_FILE).is_file()
        said = f"{run.said('resume')}: is not a checkpoint folder (it has no {STATE_FILE})."
        return [] if there else [f"{said}{_meant_to_resume(resume, folder)}"]
    return [] if has_checkpoint(folder) else [f"{run.said('resume')}: {folder} holds no checkpoint. {FIRST_START}"]


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoint-*")) or any(folder.glob(f"{REPLACED}checkpoint-*"))


def _meant_to_resume(word: str, folder: Path) -> str:
    """The word or the checkpoint in the run folder that `word` is most like, as a question; else what there is."""
    known = {"auto": "auto", "allow": "allow", **{path.name: str(path) for path in folder.glob("checkpoint-*")}}
    near = nearest(Path(word).name, known)
    return f" Did you mean {known[near]}?" if near else f" {RESUMES}"


def check_output_dir(run: Run) -> None:
    """Refuse a folder that cannot be written, or that holds a run which must not be overwritten. Only rank 0 calls it.

    Nothing is deleted yet: `open_output_dir` does that after the rest of the request has passed its checks.
    """
    folder = Path(run.value("output_dir")).expanduser()
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{run.said('output_dir')}, but that is a file. Give a folder.")
    to_make = list(takewhile(lambda place: not place.exists(), (folder, *folder.absolute().parents)))
    if link := next(filter(Path.is_symlink, to_make), None):
        raise RequestError(f"{run.said('output_dir')}, but {link} is a broken link. Give another folder.")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RequestError(
            f"{run.said('output_dir')}, but it cannot be written ({error.strerror}). Give another folder."
        ) from error
    entries = [p.name for p in folder.iterdir() if p.name not in NOT_A_RUNS] if folder.is_dir() else []
    resume = run.value("resume")
    if resume == "allow" and entries == [NVME_FOLDER]:
        return
    if not entries or (resume and (resume != "allow" or RUN_RECORD in entries)):
        return
    if not run.value("overwrite_output_dir"):
        mend, again = "Give another folder.", "Continue it with --resume auto"
        if RUN_RECORD in entries:
            again = again if has_checkpoint(folder) else "It has no checkpoint: start it again with --resume allow"
            mend = f"{again}, delete it with --overwrite_output_dir True, or give another folder."
        elif has_checkpoint(folder):
            mend = f"{again}, or give another folder."
        raise RequestError(f"{run.said('output_dir')}, but it already holds {len(entries)} files or folders. {mend}")
    if RUN_RECORD not in entries:
        raise RequestError(
            f"{run.said('output_dir')}, but it holds {', '.join(sorted(entries)[:3])} and no {RUN_RECORD}, so no "
            "recipe wrote it, and it is not deleted. Empty it by hand, or give another folder."
        )
    for name in run.recipe.inputs:
        for given in named_in(run.value(name)):
            path = Path(given).expanduser()
            if path.exists() and path.resolve().is_relative_to(folder.resolve()):
                raise RequestError(
                    f"{run.said('overwrite_output_dir')}, which would delete {folder}, but it holds {run.said(name)}. "
                    "Give another --output_dir."
                )
