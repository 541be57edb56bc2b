r"""SIGKILL at random moments, for all recipes and layouts: does every run resume, from where, and to the same weights?

    python benchmarks/faults.py --minutes 60                     # continues where it stopped, at the next chain
    python benchmarks/faults.py --minutes 5 --runs plain zero2   # some of the runs

A chain is one run of durability_runs.py in one folder. It is launched, killed, launched again with `--resume`, killed
again, and so on; after the last kill it runs to its end. Its weights are then compared with those of a run that was not
killed. Half of the kills are aimed at saves: they wait for `unfinished-checkpoint-N` and strike at a random moment of
that save, in its rotation, or while the final model is put in place. The others come at a random moment of start-up and
training. They hit one random rank, all ranks at once, or the launcher first and the ranks a random moment later, as a
cluster does. Everything is drawn from --seed. Writes a row for each kill and each chain to docs/results/faults.jsonl.
benchmarks/faults_stock.py does the same to the plain Trainer with DeepSpeed.

    python benchmarks/faults.py --async_save on --runs zero2 --chains 1    # checkpoints written in the background
    python benchmarks/faults.py --async_save on --aim writes               # and each kill aimed at such a write
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from durability_runs import REPO, RUNS, TASKS, different_rows, different_weights, rows_of
from killing import (
    MOMENTS_OF_SAVES,
    OTHER_MOMENTS,
    VICTIMS,
    WRITE,
    Kill,
    Launch,
    aimed,
    aimed_at_write,
    moments,
    new_steps,
    what_it_hit,
)
from releases import versions

from finetune.training.checkpoints.manifest import checkpoints_in, problems

OUT = REPO / "docs" / "results" / "faults.jsonl"
STEPS = 60
FLAGS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, "logging_steps": 1}
# With measured costs, a fresh start may choose another partition than the uninterrupted run, and round differently.
MORE_FLAGS = {"image_cls_pipeline": {"partition_method": "parameters"}}
KILLS_PER_CHAIN = 6
KILLED = ("plain", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp", "pipeline")
KILLED += ("causal_lm", "causal_lm_packed", "image_cls", "image_cls_pipeline", "pipeline_2x2")
KILLED += ("sequence", "experts", "experts_2x2", *TASKS)
writing = threading.Lock()


class Chain:
    """One run in one folder, killed and launched again, and the record of each kill."""

    def __init__(
        self, name: str, number: int, seed: int, home: Path, async_save: str = "off", aim: str = "mixed"
    ) -> None:
        self.name, self.number, self.home, self.async_save, self.aim = name, number, home, async_save, aim
        self.run, self.folder = RUNS[name], home / f"{name}-{number}"
        self.generator = random.Random(f"{seed} {name} {number}")
        self.struck: list[dict[str, Any]] = []
        self.unanswered: list[dict[str, Any]] = []  # kills whose resume no launch has reported yet
        self.steps: list[tuple[float, int]] = []  # the time at which each step was logged, over all launches

    def rows(self, kills: int) -> list[dict[str, Any]]:
        """Launch, kill, launch again, and finally let the run end."""
        for at in range(kills):
            launch, row = self.launch(), self.draw(at, kills)
            kill = Kill(row["moment"], row["victim"], self.generator.random(), self.generator.random())
            to_pass = self.generator.randrange(2)
            if kill.moment == WRITE:
                struck_at = aimed_at_write(launch, kill, to_pass)
            else:
                struck_at = aimed(launch, kill, moments(launch, to_pass))
            ended = launch.end()
            self.hear(launch)
            if struck_at is None:  # it ended before the kill
                break
            row |= {"time": struck_at, "hit": what_it_hit(launch, STEPS), "seconds_to_end": ended}
            row["torn"] = [path.name for path in self.folder.glob("unfinished-checkpoint-*")]
            row["newest_is_whole"] = newest_is_whole(self.folder)
            row |= {"durable": newest_durable(self.folder), "step": max((s for _, s in self.steps), default=0)}
            self.struck.append(row)
            self.unanswered.append(row)
        launch = self.launch()
        status = launch.wait()
        self.hear(launch)
        return [*self.told(), self.closing(launch, status)]

    def draw(self, at: int, kills: int) -> dict[str, Any]:
        """Draw the next kill: every second one at a save, late ones perhaps at that of the final model."""
        late = at >= kills - 2
        fitting = [moment for moment in MOMENTS_OF_SAVES if late or moment != "final"]
        moment = self.generator.choice(fitting if at % 2 else OTHER_MOMENTS) if self.aim == "mixed" else WRITE
        victim = self.generator.choice(VICTIMS if self.run.ranks > 1 else VICTIMS[1:2])
        return {"run": self.name, "chain": self.number, "kill": at, "moment": moment, "victim": victim}

    def launch(self) -> Launch:
        self.durable = newest_durable(self.folder)
        how = "allow" if self.durable is None else "auto"
        flags = {**flags_of(self.name), "async_save": self.async_save}
        command = self.run.command(self.folder, resume=how, **flags)
        return Launch(command, self.folder, self.home / "cache", self.run.ranks)

    def hear(self, launch: Launch) -> None:
        """Record where a finished launch resumed, by its own message and by the first step that it logged."""
        own = new_steps(self.folder, launch.began)
        self.steps += own
        said = launch.went_on_from()
        if said is None and own and self.durable is None:
            said = 0
        if said is None and "nothing is left to do" in launch.output:
            said = self.durable
        if said is None and launch.was_struck:
            return  # killed before its message: the next launch answers for both kills
        for row in self.unanswered:
            first = own[0][1] - 1 if own else said
            row |= {"from": said, "resumed": said is not None and first == said}
            row["lost_steps"] = None if said is None else (row["durable"] or 0) - said
            if not row["resumed"]:
                row["output"] = launch.output[-1500:]
        self.unanswered = []

    def told(self) -> list[dict[str, Any]]:
        for row in self.struck:
            again = [when for when, step in self.steps if when > row["time"] and step >= max(row["step"], 1)]
            row["seconds_lost"] = round(min(again) - row["time"], 2) if again else None
            row["time"] = round(row["time"], 2)
        return self.struck

    def closing(self, launch: Launch, status: int | None) -> dict[str, Any]:
        """Whether the run ended as if it had not been killed."""
        ended = status == 0 or "nothing is left to do" in launch.output
        row = {"run": self.name, "chain": self.number, "kills": len(self.struck), "ended": ended}
        row["async_save"] = self.async_save
        uncut = uncut_run(self.name, self.home)
        apart = different_weights(self.folder, uncut) if ended else ["it did not end"]
        row |= {
            "weights_apart": apart[:5],
            "rows_apart": different_rows(self.folder, uncut)[:5],
            "versions": versions(),
        }
        row["left_over"] = [path.name for path in self.folder.glob("unfinished-*")]
        return row if ended else {**row, "output": launch.output[-1500:]}


def flags_of(name: str) -> dict[str, Any]:
    return {**FLAGS, **MORE_FLAGS.get(name, {})}


def newest_durable(folder: Path) -> int | None:
    """The step of the newest checkpoint that verifies to the last byte."""
    if not folder.is_dir():
        return None
    good = (path for path in checkpoints_in(folder) if not problems(path, hashes=True))
    newest = next(good, None)
    return None if newest is None else int(newest.name.rsplit("-", 1)[1])


def newest_is_whole(folder: Path) -> bool:
    """Whether the newest checkpoint under a final name is complete; true if there is none."""
    newest = next(iter(checkpoints_in(folder)), None) if folder.is_dir() else None
    return newest is None or not problems(newest, hashes=True)


def uncut_run(name: str, home: Path) -> Path:
    """The folder of the run that is not killed, trained once."""
    folder = home / f"{name}-uncut"
    with running[name]:
        if not (folder / "README.md").is_file():
            launch = Launch(RUNS[name].command(folder, **flags_of(name)), folder, home / "cache", RUNS[name].ranks)
            if launch.wait() != 0:
                raise SystemExit(f"{name}: {launch.output[-3000:]}")
    return folder


running = {name: threading.Lock() for name in RUNS}


def campaign(names: list[str], home: Path, options: argparse.Namespace) -> None:
    """Chains of all runs in turn until the time is up; single-rank chains run two at a time."""
    done = {(row["run"], row["chain"]) for row in rows_of(options.out) if "kills" in row}
    end = time.monotonic() + 60 * options.minutes
    todo = [(name, number) for number in range(options.chains) for name in names if (name, number) not in done]
    alone = [one for one in todo if RUNS[one[0]].ranks > 1]
    paired = [one for one in todo if RUNS[one[0]].ranks == 1]

    def one(of: tuple[str, int]) -> None:
        if time.monotonic() > end:
            return
        chain = Chain(*of, options.seed, home, options.async_save, options.aim)
        rows = chain.rows(options.kills)
        shutil.rmtree(chain.folder, ignore_errors=True)
        with writing, options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        *kills, last = rows
        bad = sum(not row.get("resumed") for row in kills)
        ends = "bit-identical" if last["ended"] and not last["weights_apart"] else "DIFFERS"
        print(f"{of[0]:18} chain {of[1]}: {len(kills)} kills, {bad} not resumed, {ends}", flush=True)

    for number in range(options.chains):  # so that a short budget covers every layout
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, [of for of in paired if of[1] == number]))
        for of in alone:
            if of[1] == number:
                one(of)


def summary(rows: list[dict[str, Any]]) -> str:
    kills = [row for row in rows if "kill" in row]
    chains = [row for row in rows if "kills" in row]
    resumed = sum(row.get("resumed", False) for row in kills)
    lost = [row for row in kills if row.get("lost_steps")]
    equal = sum(not row["weights_apart"] for row in chains)
    seconds = [row["seconds_lost"] for row in kills if row.get("seconds_lost") is not None]
    aimed_at_saves = sum(row["moment"] in (*MOMENTS_OF_SAVES, WRITE) for row in kills)
    lines = [f"{len(kills)} kills, {aimed_at_saves} of them aimed at saves"]
    hit = sum(str(row.get("hit")).startswith("save") for row in kills)
    lines += [f"judging by the files left behind, {hit} hit a save"]
    lines += [f"{resumed} resumed, {len(lost)} lost steps beyond the last durable save"]
    lines += [f"chains that ended bit-identical to the uninterrupted run: {equal} of {len(chains)}"]
    lines += (
        [f"seconds lost per kill: median {statistics.median(seconds):.1f}, maximum {max(seconds):.1f}"]
        if seconds
        else []
    )
    lines += [json.dumps(row) for row in kills if not row.get("resumed") or row.get("lost_steps")]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--runs", nargs="+", default=list(KILLED), choices=list(RUNS))
    parser.add_argument("--chains", type=int, default=3, help="per run")
    parser.add_argument("--kills", type=int, default=KILLS_PER_CHAIN, help="per chain")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--async_save", default="off", choices=("off", "on"), help="of the runs that are killed")
    parser.add_argument("--aim", default="mixed", choices=("mixed", "writes"), help="writes: every kill at a write")
    parser.add_argument("--out", type=Path, help="default: docs/results/faults.jsonl, or faults_async.jsonl beside it")
    options = parser.parse_args()
    options.out = options.out or (OUT if options.async_save == "off" else OUT.with_name("faults_async.jsonl"))
    with tempfile.TemporaryDirectory() as folder:
        campaign(options.runs, Path(folder), options)
    print(summary(list(rows_of(options.out))))


if __name__ == "__main__":
    main()
