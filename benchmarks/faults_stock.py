r"""Kills the plain Trainer with DeepSpeed ZeRO-2 during its saves, as benchmarks/faults.py does with the toolkit.

    python benchmarks/faults_stock.py --kills 36         # continues where it stopped

benchmarks/stock_resume.py is launched on two ranks, killed at a random moment of a save (once `checkpoint-N` exists),
and launched again with `resume_from_checkpoint=True`. If that launch fails, the script does what a user would do by
hand: it deletes the newest checkpoint and launches again, until the run trains. Writes a row for each kill to
docs/results/faults_stock.jsonl: what the newest checkpoint lacked, whether and how the launch failed, where it resumed,
and whether the losses that it then logged equal those of the run that was not killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from durability_runs import REPO, checkpoints, launcher, rows_of
from killing import VICTIMS, Kill, Launch, aimed, new_steps
from releases import versions

OUT = REPO / "docs" / "results" / "faults_stock.jsonl"
STEPS, RANKS, SAVE_STEPS = 60, 2, 3
SHARDS = [f"*_{rank}_mp_rank_00_optim_states.pt" for rank in range(RANKS)]  # DeepSpeed's, of ZeRO-1 and -2
WANTED = ("model.safetensors", "latest", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth")


def launch(folder: Path, home: Path) -> Launch:
    words = [str(folder), "--max_steps", str(STEPS), "--save_steps", str(SAVE_STEPS)]
    return Launch([*launcher(RANKS), "benchmarks/stock_resume.py", *words], folder, home / "cache", RANKS)


def save_begins(launch: Launch, to_pass: int) -> dict[str, Callable[[], bool]]:
    """A test for the start of a save, after `to_pass` new checkpoints."""
    before = {path.name for path in launch.folder.glob("checkpoint-*")}
    new = set[str]()

    def saves() -> bool:
        names = os.listdir(launch.folder) if launch.folder.is_dir() else []
        if launch.went_on_from() is not None:
            new.update(name for name in names if name.startswith("checkpoint-") and name not in before)
        return len(new) > to_pass

    return {"save": saves}


def lacking(folder: Path) -> list[str]:
    """The files that a partial checkpoint lacks, or that are empty."""
    missing = [name for name in WANTED if not (folder / name).is_file() or not (folder / name).stat().st_size]
    patterns = [*SHARDS, "mp_rank_00_model_states.pt"]
    return missing + [name for name in patterns if not any(folder.glob(f"global_step*/{name}"))]


class Campaign:
    """One run after the other, each killed until it ends, or until it diverges from the run that was not killed."""

    def __init__(self, home: Path, seed: int, out: Path) -> None:
        self.home, self.seed, self.out = home, seed, out
        self.folder = home / "run"
        uncut = home / "uncut"
        if launch(uncut, home).wait() != 0:
            raise SystemExit((home / "uncut.log").read_text()[-3000:])
        self.truth = losses(uncut, 0)
        self.pending: dict[str, Any] | None = None  # the row of the last kill, which the next launch completes

    def run(self, done: int, kills: int) -> None:
        """Every launch is the resume after one kill and the target of the next."""
        while done < kills:
            generator = random.Random(f"{self.seed} {done} {self.pending is None}")
            current = launch(self.folder, self.home)
            kill = Kill("save", generator.choice(VICTIMS[1:]), generator.random(), generator.random())
            struck_at = aimed(current, kill, save_begins(current, generator.randrange(2)))
            current.end()
            if current.went_on_from() is None:
                self.mend_by_hand(current)
                continue
            wrong = False
            if self.pending is not None:
                wrong = self.complete(self.pending, current)
                done += 1
            self.pending = None
            if struck_at is None or wrong:  # it has ended or diverged: start over
                shutil.rmtree(self.folder)
            else:
                self.pending = self.struck(struck_at, kill)

    def struck(self, struck_at: float, kill: Kill) -> dict[str, Any]:
        names = checkpoints(self.folder)
        whole = [int(path.name.rsplit("-", 1)[1]) for path in names if not lacking(path)]
        row: dict[str, Any] = {"stock": "zero2", "struck": struck_at, "victim": kill.victim}
        row |= {"newest": names[-1].name, "lacks": lacking(names[-1]), "durable": max(whole, default=0)}
        return row | {"latest_unreadable": "latest" in row["lacks"], "failures": [], "deleted_by_hand": []}

    def mend_by_hand(self, current: Launch) -> None:
        """Do what a user does after reading the error."""
        names = checkpoints(self.folder)
        if self.pending is None or not names:
            raise SystemExit(current.output[-3000:])
        self.pending["failures"].append(why(current.output))
        self.pending["deleted_by_hand"].append(names[-1].name)
        shutil.rmtree(names[-1])

    def complete(self, row: dict[str, Any], current: Launch) -> bool:
        """Whether the run has silently diverged."""
        struck_at, steps = row.pop("struck"), new_steps(self.folder, current.began)
        row["from"] = current.went_on_from()
        row["seconds_lost"] = next((round(when - struck_at, 2) for when, step in steps if step >= row["durable"]), None)
        found = losses(self.folder, current.began)
        row["steps_apart"] = [step for step, loss in found.items() if self.truth[step] != loss][:5]
        gone = row["from"] < row["durable"] and not row["deleted_by_hand"]
        row["silently_wrong"] = bool(gone or row["steps_apart"])
        row["versions"] = versions()
        with self.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return bool(row["silently_wrong"])


def losses(folder: Path, since: float) -> dict[int, float]:
    rows = rows_of(folder / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row and row["time"] > since}


def why(output: str) -> str:
    """The first exception of a launch, on one line."""
    said = re.findall(r"^(?:\[rank\d\]: )?((?:\w+\.)*\w*(?:Error|Exception)): (.*)", output, re.MULTILINE)
    named = [f"{kind}: {words}" for kind, words in said if "ChildFailed" not in kind]
    return named[0][:300] if named else output[-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=36)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    done = sum(1 for _ in rows_of(options.out))
    with tempfile.TemporaryDirectory() as place:
        if done < options.kills:
            Campaign(Path(place), options.seed, options.out).run(done, options.kills)
    rows = list(rows_of(options.out))
    failed, wrong = sum(bool(row["failures"]) for row in rows), sum(row["silently_wrong"] for row in rows)
    unreadable = sum(row["latest_unreadable"] for row in rows)
    print(f"{len(rows)} kills: {unreadable} without `latest`, {failed} resumes failed, {wrong} silently wrong")


if __name__ == "__main__":
    main()
