"""Mutation testing: does a test fail when the code is wrong? cosmic-ray makes small changes, one at a time, in those
rooms (parts of the code) whose failures would be silent. The room's quick tests run on each mutant.

    python benchmarks/mutants.py --rooms sampling loss --sample 12   # 12 mutants per room, chosen by --seed
    python benchmarks/mutants.py --seconds 1200 --seed "$(date +%F)" # rooms in turn, until the time is up
    python benchmarks/mutants.py --again                             # retries survivors: does a test catch them now?
    python benchmarks/mutants.py --because ID "why none can"         # records why a mutant may survive
    python benchmarks/mutants.py --page                              # renders mutants.md from mutants.jsonl

The tests run in a copy of the checkout, one mutant after another, in processes forked from one that has imported all
libraries but ours. The exit status is 1 if fewer than 95% are caught.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from mutants_made import REPO, ROOMS, Mutant, Room, every_mutant, key_of, mutated, sampled, text_of

RESULTS = REPO / "docs" / "results"
ROWS, PAGE = RESULTS / "mutants.jsonl", RESULTS / "mutants.md"
WANTED = 0.95
LEAST_SECONDS, TIMES_AS_LONG = 30.0, 4.0  # time limit of a mutant's tests; the latter is relative to unchanged code
CAUGHT, LIVED, LATE = "caught", "lived", "caught: too slow"
SAME = "same: "  # reasons of equivalent mutants begin so: no test can detect them


class Tests:
    """A copy of the checkout, and a process that forks another for each test run in it."""

    def __init__(self, place: Path, units: bool = False) -> None:
        self.place, self.units = place, units
        names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True)
        for name in names.stdout.decode().splitlines():
            if (REPO / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, place / name)
        self.took: dict[tuple[str, ...], float] = {}
        preload()

    def on(self, room: Room, file: str, text: str) -> tuple[str, str, float]:
        """The outcome, the test that failed, and seconds."""
        began = time.monotonic()
        for tests in filter(None, (room.tests, () if self.units else room.then)):
            words = self._nearest_first(tests, file)
            if tests not in self.took:
                status, said, self.took[tests] = self._run(words, 3600.0)
                if status != 0:
                    raise SystemExit(f"{' '.join(tests)}: these tests fail on unchanged code.\n{said[-3000:]}")
            (self.place / file).write_text(text, encoding="utf-8")
            try:
                status, said, _ = self._run(words, max(LEAST_SECONDS, TIMES_AS_LONG * self.took[tests]))
            finally:
                shutil.copy2(REPO / file, self.place / file)
            if status is None:
                return LATE, "", time.monotonic() - began
            if status:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
                return CAUGHT, failed[1] if failed else f"exit status {status}", time.monotonic() - began
        return LIVED, "", time.monotonic() - began

    def _nearest_first(self, tests: tuple[str, ...], file: str) -> list[str]:
        """The test files, those that name the module first."""
        found: list[str] = []
        for test in tests:
            place = self.place / test
            found += sorted(str(path) for path in place.rglob("test_*.py")) if place.is_dir() else [str(place)]
        module = Path(file).with_suffix("").as_posix().replace("/", ".")
        package, _, name = module.rpartition(".")
        names_it = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
        return sorted(found, key=lambda test: not names_it.search(Path(test).read_text(encoding="utf-8")))

    def _run(self, words: list[str], most_seconds: float) -> tuple[int | None, str, float]:
        """The exit status of pytest; None if it took too long."""
        began = time.monotonic()
        with tempfile.NamedTemporaryFile() as log:
            pid = os.fork()
            if pid == 0:
                status = 99
                try:
                    os.setsid()
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    for stream in (1, 2):
                        os.dup2(log.fileno(), stream)
                    os.chdir(self.place)
                    sys.path[:] = [str(self.place), *(path for path in sys.path if path not in ("", str(REPO)))]
                    os.environ["PYTHONPATH"] = str(self.place)
                    import pytest

                    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
                    status = int(pytest.main(["-x", "-q", "--no-header", "--tb=no", *plugins, *words]))
                finally:
                    os._exit(status)
            status_of: int | None = None
            try:
                while status_of is None and time.monotonic() - began < most_seconds:
                    done, how = os.waitpid(pid, os.WNOHANG)
                    status_of = os.waitstatus_to_exitcode(how) if done else None
                    time.sleep(0 if done else 0.02)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # and its remaining children
                if status_of is None:
                    os.waitpid(pid, 0)
            return status_of, Path(log.name).read_text(errors="replace"), time.monotonic() - began


def preload() -> None:
    """Import once whatever our code and tests import from other packages."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(REPO / "tests"))
    from warm_ranks import USED_LATER

    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    ours = {path.stem for path in (REPO / "tests").glob("*.py")}
    for name in [
        *USED_LATER,
        *"pytest hypothesis pandas jsonschema peft safetensors.torch xxhash yaml rich PIL".split(),
    ]:
        with suppress(Exception):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.split(".")[0] in ("finetune", *ours)]:
        del sys.modules[name]
    sys.path.pop(0)


# Rows and the page


def read_rows() -> list[Mutant]:
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.is_file() else []
    return [Mutant(**json.loads(line)) for line in lines]


def write_rows(rows: list[Mutant]) -> None:
    order = list(ROOMS)
    rows = sorted(rows, key=lambda row: (order.index(row.room), row.file, row.line, row.operator, row.number))
    rows = [row for row in rows if is_there(row)]
    ROWS.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def is_there(row: Mutant) -> bool:
    """Whether the file still has the line that was changed."""
    return (REPO / row.file).is_file() and row.was in (line.strip() for line in text_of(row.file).splitlines())


def share_caught(rows: list[Mutant]) -> float:
    """The share caught, of the mutants that are not equivalent."""
    counted = [row for row in rows if not is_same(row)]
    return sum(row.outcome != LIVED for row in counted) / len(counted) if counted else 1.0


def is_same(row: Mutant) -> bool:
    return row.because.startswith(SAME)


def run_all(todo: Iterator[tuple[Mutant, str]], seconds: float, rows: list[Mutant], units: bool) -> None:
    """Run as many as the time allows; each result is written immediately."""
    began = time.monotonic()
    by_key = {key_of(row): row for row in rows}
    with tempfile.TemporaryDirectory(prefix="finetune-mutants-") as place:
        tests = Tests(Path(place), units)
        for mutant, text in todo:
            outcome, by, took = tests.on(ROOMS[mutant.room], mutant.file, text)
            done = replace(mutant, outcome=outcome, by=by.replace(f"{place}/", ""), seconds=round(took, 1))
            before = by_key.get(key_of(done))
            mended = outcome != LIVED and before is not None and (before.mended or before.outcome == LIVED)
            by_key[key_of(done)] = replace(done, because=done.because if outcome == LIVED else "", mended=mended)
            write_rows(list(by_key.values()))
            print(f"{outcome:16} {took:5.1f} s  {done.id}  {done.was!r} -> {done.became!r}  {by[-60:]}", flush=True)
            if time.monotonic() - began > seconds:
                break


def in_turn(rooms: list[str], count: int, seed: str, known: set[tuple[str, str, str]]) -> Iterator[tuple[Mutant, str]]:
    """One of each room, then another of each, so that even a short run covers all rooms."""
    streams = [sampled(room, count, seed, known) for room in rooms]
    while streams:
        for stream in list(streams):
            if (found := next(stream, None)) is None:
                streams.remove(stream)
            else:
                yield found


def survivors(rows: list[Mutant], rooms: list[str]) -> Iterator[tuple[Mutant, str]]:
    """The mutants that survived without a recorded reason."""
    asked = {key_of(row): row for row in rows if row.outcome == LIVED and row.room in rooms and not row.because}
    kinds = {(row.file, row.operator) for row in asked.values()}
    places = [one for room in rooms for place in every_mutant(room) for one in place]
    for found in (mutated(one) for one in places if (one.file, one.operator) in kinds):
        if found is not None and asked.pop(key_of(found[0]), None):
            yield found


def page(rows: list[Mutant]) -> str:
    """Render the page from the rows alone."""
    lines = [
        "# Mutation testing: does a test fail when the code is wrong?",
        "",
        "cosmic-ray makes small changes to the code, one at a time, where a failure would be silent. One more operator",
        "is ours: it removes a call. The quick tests of that part of the code run on each mutant.",
        "`python benchmarks/mutants.py --page` renders this page from [mutants.jsonl](mutants.jsonl); `--help` shows",
        "how to run more mutants. `.ci/nightly` does so for twenty minutes.",
        "",
        "A place is an operator, a number, a condition, a loop or a call. At each sampled place, one change was tried.",
        "Changes that Python cannot distinguish (in annotations, `is` for `==` of small numbers, a missing cache) are",
        "not sampled. Of the others, some are equivalent: they still compute the same. A person has reviewed these.",
        "The list below gives the reasons, and the share caught excludes them.",
        "",
        "| part of the code | places | sampled | equivalent | caught | survived | share caught |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    places = {room: max((row.of for row in rows if row.room == room), default=0) for room in ROOMS}
    for room in (*ROOMS, "all"):
        own = [row for row in rows if room in (row.room, "all")]
        caught, same = (sum(fits(row) for row in own) for fits in (lambda r: r.outcome != LIVED, is_same))
        share = f"{share_caught(own):.1%}" if own else ""
        many = places.get(room, sum(places.values()))
        lived = len(own) - caught - same
        lines.append(f"| {room} | {many:,} | {len(own)} | {same} | {caught} | {lived} | {share} |")
    left, mended = sum(places.values()) - len(rows), sum(row.mended for row in rows)
    told = f"Of the caught mutants, {mended} survived when they were first tried; tests were written for them."
    lines += ["", f"{left:,} places have not been tried yet; each night samples others. {told}", ""]
    lines += ["## Survivors", "", "| mutant | original | mutated | why it survives |", "|---|---|---|---|"]
    for row in rows:
        if row.outcome == LIVED:
            was, became = (f"`{text.replace('|', chr(92) + '|')}`" for text in (row.was, row.became))
            lines.append(f"| {row.room}, {row.id} | {was} | {became} | {row.because or 'not reviewed yet'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--sample", type=int, default=12, metavar="COUNT")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--units", action="store_true", help="only tests that start no training runs")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--because", nargs=2, metavar=("ID", "WHY"))
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the tests end, too
    rows = read_rows()
    if asked.because:
        found, why = asked.because
        if not any(row.id == found for row in rows):
            parser.error(f"{found}: there is no such mutant in {ROWS.name}.")
        write_rows([replace(row, because=why) if row.id == found else row for row in rows])
    elif asked.again:
        run_all(survivors(rows, asked.rooms), asked.seconds, rows, asked.units)
    elif not asked.page:
        known = {key_of(row) for row in rows}
        run_all(in_turn(asked.rooms, asked.sample, asked.seed, known), asked.seconds, rows, asked.units)
    rows = read_rows()
    PAGE.write_text(page(rows), encoding="utf-8")
    counted = sum(not is_same(row) for row in rows)
    print(f"{share_caught(rows):.1%} of {counted} caught; the target is {WANTED:.0%}.")
    return int(share_caught(rows) < WANTED)


if __name__ == "__main__":
    sys.exit(main())
