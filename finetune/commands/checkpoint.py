"""`finetune checkpoint ls|verify`: list a run's checkpoints, and check that they are as they were saved."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.errors import RequestError
from finetune.run.files import DELETING, REPLACED, STATE_FILE, SUPERSEDED, UNFINISHED
from finetune.safe_read import read_bounded, read_json_object
from finetune.training.checkpoints.manifest import MANIFEST, Manifest, checkpoints_in, files_of, problems, read_manifest

VERIFIED, UNVERIFIED, BROKEN = "verified", "unverified", "broken"
COLOURS = {VERIFIED: "green", UNVERIFIED: "yellow", BROKEN: "red"}
LEFTOVERS = tuple(f"{begin}*" for begin in (UNFINISHED, DELETING, REPLACED))
PIPED_WIDTH = 160  # columns, without a terminal
MOST_OF_NAME = 200  # bytes


@dataclass(frozen=True)
class Seen:
    """One checkpoint. It is unverified if its bytes were not read, or if it has no record of them."""

    path: Path
    manifest: Manifest | None
    bytes: int
    state: str
    problems: list[str]


def run(asked: argparse.Namespace) -> int:
    """The exit status: for `verify`, 1 if a checkpoint is not verified to be complete; else 0."""
    folder = Path(asked.folder)
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "there is no such folder"
        raise RequestError(f"{folder}: {what}. Give the --output_dir of a run, or a checkpoint in it.")
    verifies = asked.kind == "verify"
    is_one = (folder / MANIFEST).exists() or folder.name.startswith("checkpoint-")
    if is_one and not verifies:
        raise RequestError(f"{folder}: is a checkpoint. `ls` takes a run folder; `verify` takes either.")
    places = [folder] if is_one else checkpoints_in(folder)
    if not places and verifies:
        raise RequestError(f"{folder}: holds no checkpoint. Give the --output_dir of a run that saved one.")
    begun = time.monotonic()
    seen = [_look(place, verifies or asked.verify) for place in places]
    run_folder = folder.parent if is_one else folder
    if asked.json:
        best, latest = _best(places), _latest(run_folder)
        print(json.dumps([_record(one, best, latest) for one in seen], indent=2))
    elif verifies:
        _say_verified(seen, time.monotonic() - begun)
    else:
        _show(run_folder, seen, asked.verify)
    return 1 if verifies and any(one.state != VERIFIED for one in seen) else 0


def _look(place: Path, hashes: bool) -> Seen:
    try:
        size = sum(files_of(place)[0].values())
        manifest = read_manifest(place)
    except OSError as error:
        return Seen(place, None, 0, BROKEN, [f"{place.name} cannot be read: {error.strerror}."])
    except RequestError as error:
        older = not (place / MANIFEST).exists() and (place / STATE_FILE).is_file()
        return Seen(place, None, size, UNVERIFIED if older else BROKEN, [str(error)])
    found = problems(place, hashes)
    state = BROKEN if found else VERIFIED if hashes else UNVERIFIED
    return Seen(place, manifest, size, state, found)


def _best(places: list[Path]) -> str | None:
    """The name of the best checkpoint, according to the newest readable one."""
    for place in places:
        try:
            best = read_json_object(place / STATE_FILE, inside=place).get("best_model_checkpoint")
        except RequestError:
            continue
        return Path(best).name if isinstance(best, str) else None
    return None


def _latest(run_folder: Path) -> str | None:
    path = run_folder / "latest"
    try:
        return read_bounded(path, MOST_OF_NAME, inside=run_folder).strip()
    except RequestError:
        return None


def _record(one: Seen, best: str | None, latest: str | None) -> dict[str, Any]:
    own: dict[str, Any] = {"name": one.path.name, "bytes": one.bytes, "state": one.state, "problems": one.problems}
    own |= {"best": one.path.name == best, "latest": one.path.name == latest}
    if one.manifest is not None:
        about = asdict(one.manifest)
        own |= {name: about[name] for name in about if name != "files"} | {"file_count": len(about["files"])}
    return own


def _show(run_folder: Path, seen: list[Seen], hashes: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH, highlight=False)
    if not seen:
        console.print(f"{run_folder} holds no checkpoint.", markup=False)
    else:
        console.print(_table(seen, _best([one.path for one in seen]), _latest(run_folder)))
    left = [path.name for pattern in LEFTOVERS for path in sorted(run_folder.glob(pattern))]
    if left:
        console.print(f"Left by an interrupted run, or being written now: {', '.join(left)}.", markup=False)
    if aside := [path.name for path in sorted(run_folder.glob(f"{SUPERSEDED}*"))]:
        console.print(
            f"Set aside by a run that resumed at an earlier step; you may delete them: {', '.join(aside)}.",
            markup=False,
        )
    if seen and not hashes:
        console.print("Only names and sizes were checked; `--verify` reads every byte.", markup=False)


def _table(seen: list[Seen], best: str | None, latest: str | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "epoch", "saved (UTC)", "size", "layout", "ranks", "state", ""):
        table.add_column(name, justify="right" if name in ("step", "epoch", "size", "ranks") else "left")
    table.columns[-2].overflow = "fold"  # a state includes what is wrong
    for one in seen:
        manifest = one.manifest
        marks = [word for word, name in (("best", best), ("latest", latest)) if one.path.name == name]
        why = f": {one.problems[0]}" if one.problems else ""
        row = [one.path.name.rpartition("-")[2], "", "", _size(one.bytes), "", ""]
        if manifest is not None:
            epoch = "" if manifest.epoch is None else f"{manifest.epoch:.2f}"
            layout, ranks = str(manifest.layout), str(manifest.layout.world_size)
            row = [str(manifest.step), epoch, manifest.saved.rstrip("Z").replace("T", " "), row[3], layout, ranks]
        table.add_row(*row, Text(one.state + why, COLOURS[one.state]), ", ".join(marks))
    return table


def _say_verified(seen: list[Seen], seconds: float) -> None:
    for one in seen:
        files = "" if one.manifest is None else f"{len(one.manifest.files)} files, "
        print(f"{one.path.name}: {one.state} ({files}{_size(one.bytes)})")
        for problem in one.problems:
            print(f"  {problem}")
    whole = sum(one.state == VERIFIED for one in seen)
    print(f"{whole} of {len(seen)} verified; {_size(sum(one.bytes for one in seen))} in {seconds:.1f} s.")


def _size(count: int) -> str:
    for power, unit, digits in ((30, "GiB", 2), (20, "MiB", 1), (10, "KiB", 1)):
        if count >= 2**power:
            return f"{count / 2**power:.{digits}f} {unit}"
    return f"{count} B"
