"""What recipes do with unusual and hostile paths: every path flag of every recipe, with everything a path may lead to.

    python benchmarks/path_flags.py                     # all cases, as real runs: an hour
    python benchmarks/path_flags.py --before_torch      # only what a run checks before importing torch: minutes
    python benchmarks/path_flags.py --every 7           # every seventh case
    python benchmarks/path_flags.py --taken             # whole runs of the cases that --before_torch accepted
    python benchmarks/path_flags.py --recipes seq_cls --flags config

Appends a line per case to docs/results/path_flags.jsonl, and renders path_flags.md from it (benchmarks/pages.py). A
case is harmless if the run exits with status 0, or with 2 and one line "error:", without a traceback, within 5 seconds
of CPU time and 1 GiB of memory beyond its imports. Runs are forked from a process that has imported the stack.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from releases import in_words, versions  # noqa: E402

from finetune.entry.main import resolve_here  # noqa: E402
from finetune.errors import FinetuneError  # noqa: E402
from finetune.run.choose import recipes  # noqa: E402
from finetune.run.launch import Launch  # noqa: E402

OUT = REPO / "docs" / "results" / "path_flags.jsonl"

CPU_SECONDS, WALL_SECONDS, MORE_BYTES = 5.0, 120.0, 2**30
OTHERS = ("resume",)  # takes a path or a keyword
TABLES = ("train_file", "validation_file", "test_file")
SUFFIXES = {**dict.fromkeys(TABLES, ".csv"), **dict.fromkeys(("deepspeed", "deepspeed_config"), ".json"),
            "metrics": ".py", "config": ".yaml", "chat_template": ".jinja"}  # fmt: skip
STEP = "--max_steps 1 --max_train_samples 64 --max_eval_samples 8 --save_strategy no --eval_strategy no"


@dataclass(frozen=True)
class Case:
    recipe: str
    flag: str
    hazard: str
    status: int  # -1: killed
    cpu_seconds: float
    more_mib: int
    said: str  # the last line

    @property
    def is_harmless(self) -> bool:
        is_quick = self.cpu_seconds <= CPU_SECONDS or self.status == 0
        return self.status in (0, 2) and is_quick and self.more_mib < MORE_BYTES >> 20


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 * 2**30)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


# Each creates something at a path, or returns another name.
HAZARDS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/stdin": lambda path: path.symlink_to("/dev/stdin"),
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nothing"),
    "link to itself": _loop,
    "0 bytes": Path.touch,
    "NULs": lambda path: path.write_bytes(b"\0" * 4096),
    "random bytes": lambda path: path.write_bytes(bytes(range(256)) * 64),
    "2 GiB hole": _sparse,
    "nothing": lambda path: None,
    "long name": lambda path: path.with_name("n" * 300 + path.suffix),
    "newline in the name": lambda path: path.with_name(f"a\nerror: b{path.suffix}"),
    "ESC in the name": lambda path: path.with_name(f"a\x1b[2J{path.suffix}"),
    "NUL in the name": lambda path: path.with_name(f"a\0b{path.suffix}"),
    "~": lambda path: "~",
    "~nobody": lambda path: f"~nobody_of_that_name/{path.name}",
    "trailing blank": lambda path: f"{path} ",
    "blank": lambda path: " ",
    "below a file": lambda path: (path.touch(), path / "x")[1],
    "no permission": lambda path: (path.touch(mode=0), path)[1],
}


def path_flags(recipe: str) -> list[str]:
    return [name for name, flag in recipes()[recipe].flags.items() if flag.path or name in OTHERS]


def words_of(flag: str, hazard: str, folder: Path) -> list[str]:
    """The command-line words of a case, whose files are in `folder`."""
    place = folder / f"strange{SUFFIXES.get(flag, '')}"
    named = HAZARDS[hazard](place)
    output = [] if flag == "output_dir" else ["--output_dir", str(folder / "run")]
    return [*output, f"--{flag}", str(named if isinstance(named, str | Path) else place)]


def before_torch(recipe: str, words: list[str]) -> None:
    """What a run checks from its flags alone."""
    resolve_here(recipes()[recipe], words, Launch())


def whole_run(recipe: str, words: list[str]) -> None:
    sys.argv = [f"recipes/{recipe}.py", *words, *STEP.split()]
    sys.path[0] = str(REPO / "recipes")
    runpy.run_path(str(REPO / "recipes" / f"{recipe}.py"), run_name="__main__")


def tried(recipe: str, flag: str, hazard: str, run: Callable[[str, list[str]], None]) -> Case:
    folder = Path(tempfile.mkdtemp(prefix="path_flags"))
    try:
        words, said = words_of(flag, hazard, folder), folder / "said"
        began = time.monotonic()
        if (child := os.fork()) == 0:
            _become(lambda: run(recipe, words), said, folder)
        used = None
        while used is None:
            pid, how, found = os.wait4(child, os.WNOHANG)
            if pid:
                used = found
            elif time.monotonic() - began > WALL_SECONDS:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        text = said.read_text(errors="replace") if said.exists() else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    status = os.waitstatus_to_exitcode(how)
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if "Traceback" in text or (status == 2 and len(errors) != 1):
        status = -1
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    last = (errors or text.strip().splitlines() or [""])[-1].replace(str(folder), "FOLDER")[:160]
    more = max(0, used.ru_maxrss - own) >> 10
    return Case(recipe, flag, hazard, status, round(used.ru_utime + used.ru_stime, 2), more, last)


def _become(run: Callable[[], None], said: Path, folder: Path) -> NoReturn:
    status = 1
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for to, source in ((0, nothing), (1, out), (2, out)):
            os.dup2(source, to)
        sys.stdout, sys.stderr = (os.fdopen(one, "w", errors="replace", closefd=False) for one in (1, 2))
        os.setsid()
        os.chdir(folder)
        os.environ |= {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "FINETUNE_CACHE": str(folder / "cache")}
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            run()
            status = 0
        except FinetuneError as error:
            print(f"error: {error}", flush=True)
            status = error.exit_status
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def cases(names: list[str], flags: list[str] | None, hazards: list[str]) -> Iterator[tuple[str, str, str]]:
    for recipe in names:
        for flag in path_flags(recipe):
            if flags is None or flag in flags:
                yield from ((recipe, flag, hazard) for hazard in hazards)


def page(rows: list[dict[str, Any]]) -> str:
    stack = in_words(next(row["versions"] for row in reversed(rows)))
    lines = [
        "# Unusual and hostile paths",
        "",
        f"`python benchmarks/path_flags.py`, {stack}, two cores.",
        f"Each path flag of each recipe is given {len(HAZARDS)} unusual or hostile paths. A run is harmless if it",
        "exits with status 0, or with 2 and a single `error:` line, without a traceback. It may use less than",
        f"{MORE_BYTES >> 20:,} MiB of memory beyond its imports and, if it is refused, {CPU_SECONDS:g} s of CPU time.",
        "",
        "*Before torch* covers only what a run checks before importing torch; *whole* is a run of one step. If fewer",
        "than all cases were tried, they are a sample (`--every`).",
        "",
        "| recipe | mode | flags | cases tried | refused | accepted | harmful | most CPU seconds of a refused case |",
        "|---|---|---|---|---|---|---|---|",
    ]
    last = {(row["recipe"], row["mode"], row["flag"], row["hazard"]): row for row in rows}
    for recipe, mode in sorted({(one, mode) for one, mode, *_ in last}):
        mine = [row for (one, how, *_), row in last.items() if (one, how) == (recipe, mode)]
        refused = [row for row in mine if row["status"] == 2 and row["is_harmless"]]
        counts = Counter(row["status"] for row in mine if row["is_harmless"])
        flags = len({flag for one, _, flag, _ in last if one == recipe})
        tried_flags = len({row["flag"] for row in mine})
        figures: list[object] = [tried_flags, f"{len(mine)} of {flags * len(HAZARDS)}", counts[2], counts[0]]
        figures += [len(mine) - counts[2] - counts[0], max((row["cpu_seconds"] for row in refused), default=0.0)]
        lines.append(f"| {recipe} | {mode} | {' | '.join(map(str, figures))} |")
    odd = [row for row in last.values() if not row["is_harmless"]]
    lines += ["", "Harmful:", ""] if odd else ["", "No case was harmful.", ""]
    lines += [f"- {row['recipe']}, {row['mode']}, `--{row['flag']}`, {row['hazard']}: {row['said']}" for row in odd]
    lines += [""] * bool(odd) + ["What this does not show: several ranks, hubs, and two such paths at once.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=sorted(recipes()))
    parser.add_argument("--flags", nargs="+")
    parser.add_argument("--hazards", nargs="+", default=list(HAZARDS))
    parser.add_argument("--before_torch", action="store_true", help="only the checks before torch is imported")
    parser.add_argument("--every", type=int, default=1, help="try only every N-th case")
    parser.add_argument("--taken", action="store_true", help="only cases that --before_torch accepted")
    asked = parser.parse_args()
    run = before_torch if asked.before_torch else whole_run
    if not asked.before_torch:
        from compiled_ops import build, enter, folder_of_this_stack
        from warm_ranks import import_the_stack

        _sessions = enter(folder_of_this_stack())  # compiled beforehand: compiling would exceed a case's time limit
        build("ON_CPU")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import_the_stack()
    more = {"mode": "before torch" if asked.before_torch else "whole", "versions": versions()}
    found = list(islice(cases(asked.recipes, asked.flags, asked.hazards), 0, None, asked.every))
    if asked.taken:
        before = [row for row in map(json.loads, OUT.read_text().splitlines()) if row["mode"] == "before torch"]
        taken = {(row["recipe"], row["flag"], row["hazard"]) for row in before if row["status"] == 0}
        found = [one for one in found if one in taken]
    with OUT.open("a") as out:
        for one in found:
            case = tried(*one, run)
            line = json.dumps({**asdict(case), "is_harmless": case.is_harmless, **more})
            print(line if not case.is_harmless else ".", flush=True)
            out.write(line + "\n")
            out.flush()
    OUT.with_suffix(".md").write_text(page([json.loads(line) for line in OUT.read_text().splitlines()]))


if __name__ == "__main__":
    main()
