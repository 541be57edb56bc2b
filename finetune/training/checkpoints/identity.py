"""Which run a checkpoint belongs to, and what determined its results so far. Never imports torch.

`run.json` in a checkpoint holds the run's id, the step, the flags and facts that affect the results, and the hash of
every other file, which ties weights, optimizer and state to one step. In a run folder it holds the id and lineage.
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
SHOWN = 8  # leading characters of a run's id
MOST_LAUNCHES = 10_000
MOST_SHOWN = 100  # stretches of a lineage; recipe.yaml must stay below the size limit of our YAML reader


@dataclass(frozen=True)
class Stretch:
    """The steps after `from_step`, up to the next stretch of the lineage: which run took them, and which flags and
    facts changed at its start, each as (before, after)."""

    run: str
    from_step: int
    changed: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        found = "; ".join(f"{name} {shown(before)} -> {shown(now)}" for name, (before, now) in self.changed.items())
        return found or f"run {self.run[:SHOWN]}"


@dataclass(frozen=True)
class Identity:
    """`flags` are compared by value. `facts` describe the data and the model: hashes, and the model's config."""

    run: str
    flags: Mapping[str, Any]
    facts: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    lineage: tuple[Stretch, ...]
    step: int = 0
    files: Mapping[str, str] = field(default_factory=dict)  # their hashes

    def at(self, step: int, records: Mapping[str, FileRecord]) -> Identity:
        """The identity for the checkpoint of `step`."""
        return replace(self, step=step, files={name: record.xxh3_128 for name, record in records.items()})

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def new_id() -> str:
    return uuid.uuid4().hex


def shown(value: Any) -> str:
    """A flag's value, shortened to fit a line."""
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_identity(folder: Path) -> Identity | None:
    """A checkpoint's identity, or None if it has none. Raises RequestError for a malformed file."""
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
        raise RequestError(f"{place} is malformed: {str(error)[:100] or type(error).__name__}.") from error


def read_run(run_folder: Path) -> tuple[str, tuple[Stretch, ...]] | None:
    """Id and lineage of the run in a folder, or None if it records none. Raises RequestError."""
    place = f"{run_folder.name}/{IDENTITY}"
    if not (run_folder / IDENTITY).exists():
        return None
    content = read_json_object(run_folder / IDENTITY, inside=run_folder, name=place)
    try:
        return _id(content["run"]), _lineage(content["lineage"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{place} is malformed: {str(error)[:100]}. Delete it: it is recreated from the checkpoint."
        ) from error


def run_record(run: str, lineage: Sequence[Stretch]) -> dict[str, Any]:
    """The content of the file that `read_run` reads."""
    return {"format": FORMAT, "run": run, "lineage": [asdict(stretch) for stretch in lineage]}


def lineage_lines(lineage: Sequence[Stretch]) -> list[str]:
    """Readable lines on which steps ran under which flags; none if the flags never changed."""
    if len(lineage) < 2:
        return []
    ends = [f"{stretch.from_step}" for stretch in lineage[1:]] + ["the end"]
    lines = [f"steps {s.from_step + 1} to {end}: {s}" for s, end in zip(lineage, ends, strict=True)]
    left_out = len(lines) - MOST_SHOWN
    return [f"{left_out:,} earlier stretches are in {IDENTITY}", *lines[-MOST_SHOWN:]] if left_out > 0 else lines


def of_another_run(checkpoint: Path, own: tuple[str, tuple[Stretch, ...]] | None) -> str | None:
    """A message if the checkpoint is neither from this folder's run nor from one that it was resumed from."""
    identity = read_identity(checkpoint)
    if identity is None or own is None or identity.run in (own[0], *(stretch.run for stretch in own[1])):
        return None
    return f"{checkpoint.name} belongs to run {identity.run[:SHOWN]}, and the folder to run {own[0][:SHOWN]}."


def mixed(folder: Path, manifest: Manifest) -> list[str]:
    """Files of a checkpoint that were not saved with the rest, even if its manifest was recreated to match them."""
    try:
        identity = read_identity(folder)
    except RequestError as error:
        return [str(error)]
    if identity is None:
        return []
    if identity.step != manifest.step:
        return [f"{folder.name}: {IDENTITY} is for step {identity.step}, but the manifest is for {manifest.step}."]
    now = {name: record.xxh3_128 for name, record in manifest.files.items() if name != IDENTITY}
    others = [name for name in sorted(now.keys() | identity.files.keys()) if now.get(name) != identity.files.get(name)]
    return [
        f"{folder.name}/{name} is not the file that was saved at step {identity.step} ({IDENTITY})." for name in others
    ]


def _lineage(content: Any) -> tuple[Stretch, ...]:
    if not isinstance(content, list) or len(content) > MOST_LAUNCHES:
        raise ValueError("lineage is not a list")
    found = []
    for row in content:
        changed = {str(name): (before, now) for name, (before, now) in dict(row["changed"]).items()}
        found.append(Stretch(_id(row["run"]), int(row["from_step"]), changed))
    return tuple(found)


def _id(value: Any) -> str:
    if not isinstance(value, str) or not RUN_ID.fullmatch(value):
        raise ValueError("run is not an id")
    return value
