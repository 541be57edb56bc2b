"""Does a test fail when the code is wrong? Small breakages, made one at a time by cosmic-ray, in the rooms whose
failure would be silent, and the quick tests of their room run on each.

    python benchmarks/mutants.py --rooms sampling loss --sample 12   # as many a room, chosen by --seed
    python benchmarks/mutants.py --seconds 1200 --seed "$(date +%F)" # rooms in turn, until the time is over
    python benchmarks/mutants.py --again                             # those that lived: does a test catch them today?
    python benchmarks/mutants.py --because ID "why none can"         # the reason of one that may live
    python benchmarks/mutants.py --page                              # docs/results/mutants.md, out of mutants.jsonl

The tests run in a copy of the checkout, one mutant after another, in processes forked from one that has imported all
libraries but ours. The exit status is 1 where fewer than 95% were caught.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "docs" / "results"
ROWS, PAGE = RESULTS / "mutants.jsonl", RESULTS / "mutants.md"
WANTED = 0.95
LEAST_SECONDS, TIMES_AS_LONG = 30.0, 4.0  # what the tests of a mutant may take: that many times what they take without
DROPPED = "DropCall"  # ours; all others are cosmic-ray's
# The same to Python, or the same but slower.
EQUIVALENT = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq", "RemoveDecorator")
CAUGHT, LIVED, LATE = "caught", "lived", "caught: too slow"
SAME = "same: "  # how the reason begins of one that no test could tell, for its result is the same
UNIT = "tests/training"
OF_PLANS = "zero12 update traffic zero schedule partition collectives optimizers pipelines memory seconds".split()
OF_CHECKPOINTS = "atomic_folder manifest space rotation choice best opened lock identity run_folder".split()


@dataclass(frozen=True)
class Room:
    """Files, and their quick tests: `tests` first, and `then` where those pass, which start processes."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    then: tuple[str, ...] = ()


ROOMS = {
    "data": Room(("finetune/data/*.py",), ("tests/data",)),
    "sampling": Room(("finetune/data/sampling.py",), ("tests/data/test_sampling.py",)),
    "loss": Room(("finetune/training/loss.py",), (f"{UNIT}/test_loss.py",)),
    "checkpoints": Room(
        ("finetune/training/checkpoints/*.py",),
        tuple(f"{UNIT}/test_{name}.py" for name in OF_CHECKPOINTS),
        (f"{UNIT}/test_together.py", "tests/security/test_fuzz.py", "tests/commands/test_checkpoint.py"),
    ),
    "reshard": Room(
        ("finetune/training/reshard/*.py",),
        (f"{UNIT}/test_reshard.py", f"{UNIT}/test_reshard_forms.py"),
        ("tests/runs/test_reshard_runs.py",),
    ),
    "guards": Room(("finetune/training/guards/*.py",), (f"{UNIT}/guards",), ("tests/runs/test_mid_run_faults.py",)),
    "dsconfig rules": Room(("finetune/dsconfig/rules/*.py",), ("tests/dsconfig",), ("tests/run",)),
    "plan formulas": Room(
        (
            *("finetune/plan/collectives.py", "finetune/plan/kernels.py", "finetune/plan/memory.py"),
            *("finetune/plan/optimizers.py", "finetune/plan/partition.py", "finetune/plan/schedule.py"),
            *("finetune/plan/seconds.py", "finetune/plan/traffic.py", "finetune/plan/update.py"),
            *("finetune/plan/zero.py", "finetune/plan/engines/*.py"),
        ),
        tuple(f"tests/plan/test_{name}.py" for name in OF_PLANS),
        ("tests/plan/test_faster_chips.py", "tests/plan/test_search.py", "tests/plan/test_forward.py"),
    ),
    "pipeline": Room(
        ("finetune/training/pipeline/*.py",),
        (f"{UNIT}/test_pipeline_cut.py", f"{UNIT}/test_pipeline_parts.py", "tests/models/test_mlp_pipeline.py"),
        ("tests/models/test_gptlite_pipeline.py", "tests/models/test_alexnet.py", "tests/runs/test_pipeline.py"),
    ),
}


class DropCall:
    """An operator of cosmic-ray's kind: a statement that is a call alone, such as `file.flush()`, does nothing."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        is_call = node.type == "atom_expr" and node.children[-1].get_code().startswith("(")
        if is_call and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        from parso.python.tree import Keyword

        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)


@dataclass(frozen=True)
class Mutant:
    """Occurrence `number` of an operator in a file that has `of` places with all others of its room. `was` and
    `became`: the line."""

    room: str
    file: str
    operator: str
    number: int
    line: int
    of: int
    was: str = ""
    became: str = ""
    outcome: str = ""
    by: str = ""  # the test that failed
    seconds: float = 0.0
    because: str = ""
    mended: bool = False  # it lived at first, and a test was written

    @property
    def id(self) -> str:
        return f"{Path(self.file).stem}:{self.line}:{self.operator}:{self.number}"


# What there is


def files_of(room: Room) -> list[str]:
    found = sorted({path for pattern in room.files for path in REPO.glob(pattern)})
    return [path.relative_to(REPO).as_posix() for path in found if path.name != "__init__.py"]


def text_of(file: str) -> str:
    return (REPO / file).read_text(encoding="utf-8")


def operator_of(name: str) -> Any:
    from cosmic_ray.plugins import get_operator

    return DropCall() if name == DROPPED else get_operator(f"core/{name}")()


def families() -> dict[str, list[str]]:
    """Operators that change the same places, by what they look for."""
    from cosmic_ray.plugins import get_operator, operator_names

    found: dict[str, list[str]] = {DROPPED: [DROPPED]}
    for name in (name.removeprefix("core/") for name in operator_names()):
        if not get_operator(f"core/{name}").arguments() and not name.endswith(EQUIVALENT):
            family = "_".join(name.split("_")[:2]) if name.startswith("Replace") and "_" in name else name
            found.setdefault(family, []).append(name)
    return found


def every_mutant(room: str) -> list[list[Mutant]]:
    """Places in the room's files, each with all that may be done to it."""
    from cosmic_ray.ast import ast_nodes, get_ast

    places: dict[tuple[str, str, Any], list[Mutant]] = {}
    kinds = families()
    for file in files_of(ROOMS[room]):
        nodes = list(ast_nodes(get_ast(text_of(file))))
        for family, names in kinds.items():
            for name in names:
                change = operator_of(name)
                positions = (position for node in nodes for position in change.mutation_positions(node))
                for number, (start, _) in enumerate(positions):
                    places.setdefault((file, family, start), []).append(Mutant(room, file, name, number, start[0], 0))
    return [[replace(one, of=len(places)) for one in places[key]] for key in sorted(places)]


def mutated(mutant: Mutant) -> tuple[Mutant, str] | None:
    """The file's text with the change, and what it is; None where it means the same: in an annotation, for one."""
    from cosmic_ray.mutating import mutate_code

    before = text_of(mutant.file)
    after = mutate_code(before, operator_of(mutant.operator), mutant.number)
    if after is None:
        return None
    try:
        if _meaning(after) == _meaning(before):
            return None
    except SyntaxError:
        return None
    old, new = before.splitlines(), after.splitlines()
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), mutant.line - 1)
    return replace(mutant, was=old[at].strip(), became=new[at].strip()), after


def _meaning(text: str) -> str:
    """Without annotations, which are never evaluated here, and without the words of assertions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.Assert):
            node.msg = None
    return ast.dump(tree)


def sampled(room: str, count: int, seed: str, known: set[tuple[str, str, str]]) -> Iterator[tuple[Mutant, str]]:
    """`count` of the room's places, and of each one change, that are not `known`."""
    choice = random.Random(f"{seed} {room}")
    places = every_mutant(room)
    choice.shuffle(places)
    left = count
    for place in places:
        if not left:
            return
        found = mutated(choice.choice(place))
        if found is not None and key_of(found[0]) not in known:
            left -= 1
            yield found


def key_of(row: Mutant) -> tuple[str, str, str]:
    """It stays while lines above it come and go."""
    return row.file, row.was, row.became


# The tests


class Tests:
    """A copy of the checkout, and a process that forks one for each run of tests in it."""

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
        """Outcome, the test that failed, and seconds."""
        began = time.monotonic()
        for tests in filter(None, (room.tests, () if self.units else room.then)):
            words = self._nearest_first(tests, file)
            if tests not in self.took:
                status, said, self.took[tests] = self._run(words, 3600.0)
                if status != 0:
                    raise SystemExit(f"{' '.join(tests)}: these fail as they are.\n{said[-3000:]}")
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
        """Those that name the module begin."""
        found: list[str] = []
        for test in tests:
            place = self.place / test
            found += sorted(str(path) for path in place.rglob("test_*.py")) if place.is_dir() else [str(place)]
        module = Path(file).with_suffix("").as_posix().replace("/", ".")
        package, _, name = module.rpartition(".")
        names_it = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
        return sorted(found, key=lambda test: not names_it.search(Path(test).read_text(encoding="utf-8")))

    def _run(self, words: list[str], most_seconds: float) -> tuple[int | None, str, float]:
        """The exit status of pytest, None where it took too long."""
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
                    os.killpg(pid, signal.SIGKILL)  # and what it has left behind
                if status_of is None:
                    os.waitpid(pid, 0)
            return status_of, Path(log.name).read_text(errors="replace"), time.monotonic() - began


def preload() -> None:
    """Whatever our rooms and tests import of others, once."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
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
    """Still, with the line that was changed."""
    return (REPO / row.file).is_file() and row.was in (line.strip() for line in text_of(row.file).splitlines())


def share_caught(rows: list[Mutant]) -> float:
    """Of those that compute anything else."""
    counted = [row for row in rows if not is_same(row)]
    return sum(row.outcome != LIVED for row in counted) / len(counted) if counted else 1.0


def is_same(row: Mutant) -> bool:
    return row.because.startswith(SAME)


def run_all(todo: Iterator[tuple[Mutant, str]], seconds: float, rows: list[Mutant], units: bool) -> None:
    """As many as can be in the time; each is written down at once."""
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
    """One of each room, then another of each: a time that ends early has seen all of them."""
    streams = [sampled(room, count, seed, known) for room in rooms]
    while streams:
        for stream in list(streams):
            if (found := next(stream, None)) is None:
                streams.remove(stream)
            else:
                yield found


def survivors(rows: list[Mutant], rooms: list[str]) -> Iterator[tuple[Mutant, str]]:
    """Those that lived, and nobody has said why they may."""
    asked = {key_of(row): row for row in rows if row.outcome == LIVED and row.room in rooms and not row.because}
    kinds = {(row.file, row.operator) for row in asked.values()}
    places = [one for room in rooms for place in every_mutant(room) for one in place]
    for found in (mutated(one) for one in places if (one.file, one.operator) in kinds):
        if found is not None and asked.pop(key_of(found[0]), None):
            yield found


def page(rows: list[Mutant]) -> str:
    """Out of the rows alone."""
    lines = [
        "# Mutants: does a test fail when the code is wrong?",
        "",
        "Small breakages, made one at a time by cosmic-ray (and, of ours, a call that is left out) in the rooms whose",
        "failure would be silent; the quick tests of the room are run on each. `python benchmarks/mutants.py --page`",
        "made this page out of [mutants.jsonl](mutants.jsonl), `--help` says how to run more; `.ci/nightly` does, for",
        "twenty minutes. A place is an operator, a number, a condition, a loop or a call; of each that was sampled",
        "one change was tried. What means the same to Python (in annotations, `is` for `==` of small numbers, a cache",
        "less) is not sampled. Of the others some compute the same all the same: a person has looked, the list below",
        "says why, and the share is of those that do not.",
        "",
        "| room | places | sampled | the same | caught | lived | caught |",
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
    told = f"Of those that are caught {mended} lived when they were first tried; tests were written for them."
    lines += ["", f"{left:,} places were not tried yet: each night takes others. {told}", ""]
    lines += ["## Those that live, and why", "", "| mutant | was | became | why |", "|---|---|---|---|"]
    for row in rows:
        if row.outcome == LIVED:
            was, became = (f"`{text.replace('|', chr(92) + '|')}`" for text in (row.was, row.became))
            lines.append(f"| {row.room}, {row.id} | {was} | {became} | {row.because or 'not looked at yet'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--sample", type=int, default=12, metavar="COUNT")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--units", action="store_true", help="only the tests that start no runs")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--because", nargs=2, metavar=("ID", "WHY"))
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the tests end with it
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
    print(f"{share_caught(rows):.1%} of {counted} caught; {WANTED:.0%} are wanted.")
    return int(share_caught(rows) < WANTED)


if __name__ == "__main__":
    sys.exit(main())
