"""Hosts are killed at random in one long run that `finetune supervise` keeps going: what does each kill cost, and does
the run end as one that was never cut?

    python benchmarks/elastic.py                              # 3 hosts, 6 kills: about half an hour on two cores
    python benchmarks/elastic.py --steps 120 --save_steps 10 --kills 2       # the data of docs/results: a few minutes
    python benchmarks/elastic.py --hosts 20 --kills 40 --steps 20000

A host is a supervisor with a torchrun of its own and one rank, under an address of its own on this machine. A kill is
SIGKILL to all its processes at once, at a random moment of training; once the others train again, the host comes back.
The global batch is `--batch`; it should divide by the numbers of hosts that may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from durability_runs import REPO, different_weights, environment, farthest, rows_of
from releases import in_words, versions

from finetune.run.supervised import told

OUT = REPO / "docs" / "results" / "elastic.json"
LATEST_SECONDS = 600.0
FLAGS = {
    "max_train_samples": 192,
    "max_seq_length": 32,
    "dropout": 0.0,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_total_limit": 2,
    "bf16": False,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}


class Host:
    """One of them; it may be killed and started again."""

    def __init__(self, number: int, hosts: int, recipe: list[str], home: Path) -> None:
        self.address, self.log = f"127.0.0.{number + 1}", home / f"host-{number}.log"
        torchrun = ["torchrun", "--nnodes", f"1:{hosts}", "--nproc_per_node", "1", "--local_addr", self.address]
        torchrun += ["--rdzv_conf", "last_call_timeout=10"]
        self.command = [sys.executable, "-m", "finetune.cli", "supervise", "--", *torchrun, *recipe]
        self.env = environment(home / "cache")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.command, cwd=REPO, env=self.env, stdout=out, stderr=subprocess.STDOUT)

    def kill(self) -> bool:
        """Everything of it at once; returns whether it held rank 0."""
        assert self.process
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        held = False
        for member in family:
            with suppress(psutil.Error):
                held |= member.environ().get("RANK") == "0"
        for member in family:
            with suppress(psutil.Error):
                member.kill()
        self.process.wait()
        return held


class Run:
    """The run folder that all hosts share, and what it tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trainings(self) -> list[dict[str, Any]]:
        return [one for one in told(self.folder / "_supervise") if one["event"] == "training"]

    def last_step(self) -> int:
        return max((row["step"] for row in rows_of(self.folder / "metrics.jsonl") if "loss" in row), default=0)

    def first_step_after(self, moment: float) -> float:
        """When the first step that was logged after this moment was logged."""
        rows = rows_of(self.folder / "metrics.jsonl")
        return min((row["time"] for row in rows if "loss" in row and row["time"] > moment), default=0.0)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LATEST_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not happen within {LATEST_SECONDS:.0f} s")
        time.sleep(0.2)


def kill_one(hosts: list[Host], run: Run, draw: random.Random, after_seconds: float) -> dict[str, Any]:
    """Kill a host, wait until the others train, bring it back, and wait until all train."""
    time.sleep(draw.uniform(0, after_seconds))
    host, step, before = draw.choice(hosts), run.last_step(), len(run.trainings())
    killed_at, held = time.time(), host.kill()
    wait_for(lambda: len(run.trainings()) > before, "training on the hosts that are left")
    shrunk = run.trainings()[-1]
    wait_for(lambda: run.first_step_after(shrunk["time"]), "a step on the hosts that are left")
    trained_at = run.first_step_after(shrunk["time"])
    time.sleep(draw.uniform(0, after_seconds))
    host.start()
    came_back_at = time.time()
    wait_for(lambda: run.trainings()[-1]["hosts"] == len(hosts), "training on all hosts")
    grown = run.trainings()[-1]
    wait_for(lambda: run.first_step_after(grown["time"]), "a step on all hosts")
    return {
        "held_rank_0": held,
        "step": step,
        "hosts_left": shrunk["hosts"],
        "continued_from": shrunk["step"],
        "steps_repeated": step - shrunk["step"],
        "seconds_to_train_again": round(trained_at - killed_at, 1),
        "seconds_to_grow": round(run.first_step_after(grown["time"]) - came_back_at, 1),
        "seconds_stopped_to_grow": grown["seconds"],
        "starts": len(run.trainings()) - before,
    }


def measure(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    draw, run, uncut = random.Random(options.seed), Run(home / "run"), home / "uncut"
    flags = {**FLAGS, "max_steps": options.steps, "save_steps": options.save_steps, "do_eval": False}
    flags |= {"per_device_train_batch_size": options.micro}
    flags |= {"gradient_accumulation_steps": options.batch // options.hosts // options.micro}
    recipe = ["recipes/seq_cls.py", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    alone = ["torchrun", "--standalone", "--nproc_per_node", str(options.hosts), *recipe, "--output_dir", str(uncut)]
    began = time.time()
    subprocess.run(alone, cwd=REPO, env=environment(home / "cache"), check=True, stdout=subprocess.DEVNULL)
    uncut_seconds = time.time() - began
    hosts = [Host(n, options.hosts, [*recipe, "--output_dir", str(run.folder)], home) for n in range(options.hosts)]
    try:
        for host in hosts:
            host.start()
        wait_for(lambda: run.last_step() > options.save_steps, "the first checkpoint")
        began, kills = time.time(), []
        for _ in range(options.kills):
            kills.append(kill_one(hosts, run, draw, options.between))
            print(json.dumps(kills[-1]), flush=True)
        statuses = [host.process.wait() for host in hosts if host.process]
    finally:
        for host in hosts:
            if host.process and host.process.poll() is None:
                host.kill()
    pairs = list(zip(losses(run.folder), losses(uncut), strict=True))
    return {
        "hosts": options.hosts,
        "steps": options.steps,
        "save_steps": options.save_steps,
        "global_batch": options.batch,
        "uncut_seconds": round(uncut_seconds, 1),
        "statuses": statuses,
        "kills": kills,
        "starts": len(run.trainings()),
        "largest_difference_of_a_loss": max(abs(one - other) / abs(other) for one, other in pairs),
        "last_losses": list(pairs[-1]),
        "weights_that_differ": len(different_weights(run.folder, uncut)),
        "largest_difference_of_a_weight": farthest(run.folder, uncut),
        "cores": os.cpu_count(),
        "versions": versions(),
    }


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder / "metrics.jsonl") if "loss" in row]


def span(seconds: list[float]) -> str:
    least, most = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{least} s" if least == most else f"{least} to {most} s"


def page(found: dict[str, Any]) -> str:
    kills = found["kills"]
    again, grow = ([kill[name] for kill in kills] for name in ("seconds_to_train_again", "seconds_stopped_to_grow"))
    rows = [
        f"| {n} | {kill['step']:,} | {'yes' if kill['held_rank_0'] else 'no'} | {kill['hosts_left']} | "
        f"{kill['steps_repeated']} | {kill['seconds_to_train_again']:.0f} | {kill['seconds_stopped_to_grow']:.0f} |"
        for n, kill in enumerate(kills, 1)
    ]
    sizes = {name: found[name] for name in ("hosts", "steps", "save_steps")} | {"kills": len(kills)}
    command = " ".join(["python benchmarks/elastic.py", *(f"--{name} {size}" for name, size in sizes.items())])
    cores, statuses = found["cores"], " and ".join(map(str, sorted(set(found["statuses"]))))
    return f"""# Hosts that are killed and come back

`{command}`

This keeps one run of {found["steps"]:,} steps going with `finetune supervise`, on {found["hosts"]} hosts with one rank
each, which share {cores} CPU cores of one machine. It kills all processes of a random host, at a random moment, as
often as the table says. Once the others train again, the host comes back. A checkpoint is saved every
{found["save_steps"]} steps; the global batch is {found["global_batch"]}.

- All supervisors ended with status {statuses}.
- The largest difference of any step's loss from the same run without kills is
  {found["largest_difference_of_a_loss"]:.1e}, relative (fp32).
- After a kill, the next step came {span(again)} later. Most of this is starting Python and
  importing torch on {cores} cores, and 10 s of waiting for other hosts.
- Growing back stopped training for {span(grow)}.

| kill | at step | was it rank 0's host | hosts left | steps repeated | seconds to the next step | seconds to grow |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Measured with {in_words(found["versions"])}; the data are in [elastic.json](elastic.json). Nothing of this was measured
on GPUs or over a real network.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, default=3)
    add("--kills", type=int, default=6)
    add("--steps", type=int, default=3000)
    add("--save_steps", type=int, default=50)
    add("--batch", type=int, default=24, help="samples a step")
    add("--micro", type=int, default=4, help="samples of a rank at once; accumulation makes up the rest")
    add("--between", type=float, default=10.0, help="seconds of training, at most, before a kill and before a return")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
