"""The content of a run folder, as far as it can be read: a run may be unfinished, or a file damaged."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.privacy import HIDDEN, TOKEN, hidden, is_secret, names_a_secret
from finetune.report.text import as_dict, as_list, as_number
from finetune.run.files import EXPERT_LOAD, FAILURE, RUN_RECORD
from finetune.safe_read import read_bytes, read_json_lines, read_json_object, read_yaml

METRICS, RESULTS, ENVIRONMENT, RECIPE = "metrics.jsonl", "all_results.json", "environment.json", RUN_RECORD
MARKS = (METRICS, RESULTS, "train_results.json", "eval_results.json", ENVIRONMENT, RECIPE)  # any marks a run folder
LONGEST_TEXT = 20_000  # letters shown of samples.md and of the card
LARGEST_PICTURE_BYTES = 2_000_000
MOST_PICTURES = 50


@dataclass
class RunFolder:
    """`notes` say what could not be read. All content is untrusted text and numbers."""

    name: str
    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    ds_config: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    confusion: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    samples: str = ""
    card: str = ""
    pictures: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return "train_runtime" in self.results or (bool(self.results) and not any("loss" in row for row in self.rows))

    @property
    def logged(self) -> list[dict[str, Any]]:
        """All rows but the Trainer's last, which has means over the whole run."""
        return [row for row in self.rows if "train_runtime" not in row]

    @property
    def steps(self) -> int:
        return int(max((as_number(row.get("step")) or 0 for row in self.rows), default=0))

    @property
    def gpus(self) -> list[Any]:
        """The names of those that it saw; none for a run on CPUs."""
        return as_list(self.environment.get("gpus"))

    @property
    def ranks(self) -> int:
        """The number of ranks whose memory was recorded; 0 without a record, as of a killed run."""
        return len(as_list(self.results.get("peak_memory_gib_per_rank")))


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def read_run(folder: Path, name: str) -> RunFolder:
    """Never raises for the folder's content; problems go into `notes`."""
    run = RunFolder(name, folder)
    notes = run.notes
    run.rows = read_lines(folder, METRICS, notes)
    results = (read_json(folder, name, notes) for name in (RESULTS, "train_results.json", "eval_results.json"))
    run.results = next(filter(None, results), {})
    run.environment = without_secrets(read_json(folder, ENVIRONMENT, notes))
    run.recipe = without_secrets(as_dict(_tried(folder, RECIPE, notes, read_yaml)))
    run.ds_config = without_secrets(read_json(folder, "ds_config.json", notes))
    run.schedule = read_json(folder, "schedule.json", notes)
    run.confusion = read_json(folder, "confusion_matrix.json", notes)
    run.profile = read_json(folder, "profile/summary.json", notes)
    run.experts = read_json(folder, EXPERT_LOAD, notes)
    run.samples, run.card = read_text(folder, "samples.md", notes), read_text(folder, "README.md", notes)
    for picture in sorted((*folder.glob("*.png"), *folder.glob("profile/*.png")))[:MOST_PICTURES]:
        name = picture.relative_to(folder).as_posix()
        data = _tried(folder, name, notes, partial(read_bytes, most=LARGEST_PICTURE_BYTES)) or b""
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            run.pictures[name] = data
    if not run.finished:
        notes.append("It is unfinished, or ended early: it has no results." if run.rows else "It has no results.")
    if why := read_json(folder, FAILURE, notes).get("error"):
        notes.append(f"Its last start ended with: {why}")
    return run


def read_lines(folder: Path, name: str, notes: list[str]) -> list[dict[str, Any]]:
    """JSON objects, one per line; none without a file. A line left incomplete by a kill is skipped, with a note."""
    found, torn = _tried(folder, name, notes, read_json_lines) or ((), 0)
    rows = [row for _, row in found if isinstance(row, dict)]
    if torn := torn + len(found) - len(rows):
        notes.append(f"{name}: skipped {torn:,} {'line' if torn == 1 else 'lines'}, incomplete or not an object.")
    return rows


def read_json(folder: Path, name: str, notes: list[str]) -> dict[str, Any]:
    return _tried(folder, name, notes, read_json_object) or {}


def _tried(folder: Path, name: str, notes: list[str], read: Callable[..., Any]) -> Any:
    """What `read` returns for a file in a folder; None if it is not there, or if it cannot be read, with a note."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        return read(path, inside=folder)
    except RequestError as error:
        reason = re.sub(rf"^{re.escape(str(path))}(:\d+:\d+)?: ", "", str(error))
        notes.append(f"{path.name}: skipped, it {reason}")
        return None


def without_secrets(found: Mapping[str, Any]) -> dict[str, Any]:
    """`found` with secrets replaced by "***" (`finetune.privacy`), at any depth."""
    return {str(key): _shown(str(key), value) for key, value in found.items()}


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return without_secrets(value)
    if isinstance(value, list | tuple | set):
        return [_shown(key, one) for one in value]
    if isinstance(value, str):
        return HIDDEN if is_secret(key, value) or names_a_secret(key) else hidden(value)
    return value


def read_text(folder: Path, name: str, notes: list[str]) -> str:
    """The end of the text if it is too long, without access tokens; "" without a file."""
    content: bytes = _tried(folder, name, notes, read_bytes) or b""
    text = content.decode("utf-8", errors="replace")
    if len(text) > LONGEST_TEXT:
        notes.append(f"{name}: only the last {LONGEST_TEXT:,} of {len(text):,} letters are shown.")
    return TOKEN.sub(HIDDEN, text[-LONGEST_TEXT:])
