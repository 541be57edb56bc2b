"""Digests of the files that a run's flags name: what it trains on and evaluates."""

from __future__ import annotations

from pathlib import Path

from finetune.data import digests
from finetune.run.flag import FILE, FOLDER, NAME_OR_PATH, TEMPLATE
from finetune.run.on_resume import EVALUATED, ROWS, named
from finetune.run.paths import named_in
from finetune.run.run import Run
from finetune.training.checkpoints.identity import Identity


def of_given_files(run: Run, streams: bool) -> dict[str, str]:
    """By flag: the digest of its file or folder, or a hub's revision, or else the name. Of a stream's files, which may
    be large, only the ends are read."""
    files: dict[str, str] = {}
    for name, flag in run.recipe.flags.items():
        given = run.value(name)
        if flag.on_resume in (ROWS, EVALUATED) and given and flag.path in (FILE, FOLDER, NAME_OR_PATH, TEMPLATE):
            whole = not (streams and flag.on_resume == ROWS)
            found = [
                digests.of_files(Path(path).expanduser(), whole) or digests.hub_revision(path) or path
                for path in named_in(given)
            ]
            files[name] = found[0] if len(found) == 1 else digests.of_text(found)
    return files


def other_training_files(run: Run, before: Identity) -> list[str]:
    """The flags that name other training data than when the checkpoint was saved, or none, or for the first time."""
    was, now = before.facts.get("files", {}), of_given_files(run, bool(run.value("streaming")))
    flags = named(run.recipe.flags, (ROWS,)) & {*was, *now}
    return [f"--{flag}" for flag in sorted(flags) if was.get(flag) != now.get(flag)]
