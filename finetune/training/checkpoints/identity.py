"""Of which run a checkpoint is, and what decided its course until then. Never imports torch.

`run.json` in a checkpoint holds the run's id, the step, the flags and facts that change the numbers, and the hash of
every other file: weights, optimizer and state that were saved at one step. In a run folder it holds id and lineage.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.files import IDENTITY
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.manifest import FileRecord, Manifest

FORMAT = 1
RUN_ID = re.compile("[0-9a-f]{32}")
SHOWN = 8  # of a run's id
MOST_LAUNCHES = 10_000
MOST_SHOWN = 100  # stretches of a lineage; recipe.yaml must stay as small as readers of YAML take it


@dataclass(frozen=True)
class Stretch:
    """The steps after `from_step`, until the next of a lineage: by which run, and which flags and facts were changed
    then, each with the value before and after."""

    run: str
    from_step: int
    changed: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        found = "; ".join(f"{name} {shown(before)} -> {shown(now)}" for name, (before, now) in self.changed.items())
        return found or f"run {self.run[:SHOWN]}"


@dataclass(frozen=True)
class Identity:
    """`flags` are compared by value. `facts` are what data and model come to: hashes, and the model's config."""

    run: str
    flags: Mapping[str, Any]
    facts: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    lineage: tuple[Stretch, ...]
    step: int = 0
    files: Mapping[str, str] = field(default_factory=dict)  # their hashes

    def at(self, step: int, records: Mapping[str, FileRecord]) -> Identity:
        """For the checkpoint of `step`."""
        return replace(self, step=step, files={name: record.xxh3_128 for name, record in records.items()})

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def new_id() -> str:
    return uuid.uuid4().hex


def shown(value: Any) -> str:
    """A flag's value in a line."""
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_identity(folder: Path) -> Identity | None:
    """Of a checkpoint; None for one that has none. Raises RequestError for what is not as we write it."""
    place = f"{folder.name}/{IDENTITY}"
    if not (folder / IDENTITY).exists() and not (folder / IDENTITY).is_symlink():
        return None
    content = read_json_object(folder / IDENTITY, inside=folder, name=place)
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {str(content['format'])[:20]}")
        step = content["step"]
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step is {str(step)[:20]!r}")
        facts = {str(name): dict(fact) for name, fact in dict(content["facts"]).items()}
        texts = [{str(k): str(v) for k, v in dict(content[name]).items()} for name in ("versions", "files")]
        lineage = _lineage(content["lineage"])
        return Identity(_id(content["run"]), dict(content["flags"]), facts, texts[0], lineage, step, texts[1])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{place} is not as it was written: {str(error)[:100] or type(error).__name__}.") from error


def read_run(run_folder: Path) -> tuple[str, tuple[Stretch, ...]] | None:
    """Id and lineage of the run that a folder holds; None where it tells none. Raises RequestError."""
    place = f"{run_folder.name}/{IDENTITY}"
    if not (run_folder / IDENTITY).exists():
        return None
    content = read_json_object(run_folder / IDENTITY, inside=run_folder, name=place)
    try:
        return _id(content["run"]), _lineage(content["lineage"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{place} is not as it was written: {str(error)[:100]}. Delete it: it is made anew from the checkpoint."
        ) from error


def run_record(run: str, lineage: Sequence[Stretch]) -> dict[str, Any]:
    """What `read_run` reads."""
    return {"format": FORMAT, "run": run, "lineage": [asdict(stretch) for stretch in lineage]}


def lineage_lines(lineage: Sequence[Stretch]) -> list[str]:
    """Which steps ran under which flags, for people; nothing where all ran under the same."""
    if len(lineage) < 2:
        return []
    ends = [f"{stretch.from_step}" for stretch in lineage[1:]] + ["the end"]
    lines = [f"steps {s.from_step + 1} to {end}: {s}" for s, end in zip(lineage, ends, strict=True)]
    left_out = len(lines) - MOST_SHOWN
    return [f"{left_out:,} earlier stretches are in {IDENTITY}", *lines[-MOST_SHOWN:]] if left_out > 0 else lines


def of_another_run(checkpoint: Path, own: tuple[str, tuple[Stretch, ...]] | None) -> str | None:
    """Says so where it is neither of the run whose folder this is, nor of one that the run has gone on from."""
    identity = read_identity(checkpoint)
    if identity is None or own is None or identity.run in (own[0], *(stretch.run for stretch in own[1])):
        return None
    return f"{checkpoint.name} is of run {identity.run[:SHOWN]}, and the folder is of run {own[0][:SHOWN]}."


def mixed(folder: Path, manifest: Manifest) -> list[str]:
    """What of a checkpoint was not saved with the rest of it, though its manifest may have been made anew."""
    try:
        identity = read_identity(folder)
    except RequestError as error:
        return [str(error)]
    if identity is None:
        return []
    if identity.step != manifest.step:
        return [f"{folder.name}: {IDENTITY} is of step {identity.step}, and the manifest of step {manifest.step}."]
    now = {name: record.xxh3_128 for name, record in manifest.files.items() if name != IDENTITY}
    others = [name for name in sorted(now.keys() | identity.files.keys()) if now.get(name) != identity.files.get(name)]
    return [
        f"{folder.name}/{name} is not the file that was saved at step {identity.step} ({IDENTITY})." for name in others
    ]


def _lineage(content: Any) -> tuple[Stretch, ...]:
    if not isinstance(content, list) or len(content) > MOST_LAUNCHES:
        raise ValueError("lineage is no list")
    found = []
    for row in content:
        changed = {str(name): (before, now) for name, (before, now) in dict(row["changed"]).items()}
        found.append(Stretch(_id(row["run"]), int(row["from_step"]), changed))
    return tuple(found)


def _id(value: Any) -> str:
    if not isinstance(value, str) or not RUN_ID.fullmatch(value):
        raise ValueError("run is no id")
    return value
