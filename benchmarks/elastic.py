"""Hosts are killed at random in one long run that `finetune supervise` keeps going: what does each kill cost, and does
the run end as one that was never cut?

    python benchmarks/elastic.py --kills 6 --steps 1200         # 3 hosts on two cores: about eight minutes
    python benchmarks/elastic.py --kills 20 --namespaces        # each host in a network namespace (root only): longer

A host is a supervisor with a torchrun of its own and one rank, under an address of its own on this machine. A kill is
SIGKILL to all its processes at once, at a random moment of training; once the others train again, the host comes back.
Processes that are killed close their connections, as a host that crashes does not: with `--namespaces`, a share of the
hosts (`--silent`) loses its network a moment before. The global batch is `--batch`; it should divide by the numbers of
hosts that may be left. If the steps do not last for all kills, the page has those that were made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
from durability_runs import REPO, environment, rows_of
from killing import new_steps
from releases import in_words, versions

from finetune.run.supervised import told

OUT = REPO / "docs" / "results" / "elastic.json"
LATEST_SECONDS = 600.0  # for anything that is waited for between two kills
SWITCH = "elastic-switch"  # a namespace, in which the networks of all hosts meet
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


class CutShortError(Exception):
    """The run has ended, or something that is waited for does not happen."""


@contextmanager
def networks(names: Sequence[str], addresses: Sequence[str]) -> Iterator[None]:
    """A network namespace for each host, in which all know one another's names, on one switch. Needs root."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def remove() -> None:
        for name in (SWITCH, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    remove()
    try:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "switch", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "switch", "up")
        known = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
        for name, address in zip(names, addresses, strict=True):
            (etc := Path("/etc/netns") / name).mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", SWITCH)
            ip("-n", SWITCH, "link", "set", name, "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
        yield
    finally:
        remove()


class Host:
    """One of them; it may be killed and started again."""

    def __init__(self, number: int, hosts: int, recipe: list[str], home: Path, has_network: bool) -> None:
        self.name, self.has_network = f"elastic-{number}", has_network
        self.address = f"10.78.0.{number + 1}" if has_network else f"127.0.0.{number + 1}"
        self.log = home / f"host-{number}.log"
        torchrun = ["torchrun", "--nnodes", f"1:{hosts}", "--nproc_per_node", "1", "--local_addr", self.address]
        torchrun += ["--rdzv_conf", "last_call_timeout=10"]
        self.command = [sys.executable, "-m", "finetune.cli", "supervise", "--", *torchrun, *recipe]
        if has_network:  # and a host name of its own: ranks find one another by it
            inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
            self.command = [*inside, self.name, *self.command]
        self.env = environment(home / "cache")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def network(self, state: str) -> None:
        if self.has_network:
            subprocess.run(["ip", "-n", self.name, "link", "set", "eth0", state], check=True)

    def start(self) -> None:
        self.network("up")
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.command, cwd=REPO, env=self.env, stdout=out, stderr=subprocess.STDOUT)

    def kill(self, is_silent: bool = False) -> bool:
        """Everything of it at once; if `is_silent`, its network first. Returns whether it held rank 0."""
        assert self.process
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        held = False
        for member in family:
            with suppress(psutil.Error):
                held |= member.environ().get("RANK") == "0"
        if is_silent:
            self.network("down")
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
        return max((step for _, step in new_steps(self.folder, 0.0)), default=0)

    def first_step_after(self, moment: float) -> float:
        """When the first step that was logged after this moment was logged."""
        return min((when for when, _ in new_steps(self.folder, moment)), default=0.0)


def wait_for(condition: Callable[[], Any], what: str, hosts: Sequence[Host], seconds: float = LATEST_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if all(host.has_ended for host in hosts):
            raise CutShortError("the run has ended: give it more --steps")
        if time.monotonic() > end:
            raise CutShortError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.2)


def kill_one(hosts: list[Host], run: Run, draw: random.Random, options: argparse.Namespace) -> dict[str, Any]:
    """Kill a host, wait until the others train, bring it back, and wait until all train. Raises CutShortError."""
    time.sleep(draw.uniform(0, options.between))
    host, is_silent = draw.choice(hosts), options.namespaces and draw.random() < options.silent
    if host.has_ended:
        raise CutShortError("the run has ended: give it more --steps")
    step, before = run.last_step(), len(run.trainings())
    killed_at, held = time.time(), host.kill(is_silent)
    wait_for(lambda: len(run.trainings()) > before, "training on the hosts that are left", hosts)
    shrunk = run.trainings()[-1]
    wait_for(lambda: run.first_step_after(shrunk["time"]), "a step on the hosts that are left", hosts)
    trained_at = run.first_step_after(shrunk["time"])
    time.sleep(draw.uniform(0, options.between))
    host.start()
    came_back_at = time.time()
    wait_for(lambda: run.trainings()[-1]["hosts"] == len(hosts), "training on all hosts", hosts)
    grown = run.trainings()[-1]
    wait_for(lambda: run.first_step_after(grown["time"]), "a step on all hosts", hosts)
    return {
        "held_rank_0": held,
        "is_silent": is_silent,
        "step": step,
        "hosts_left": shrunk["hosts"],
        "continued_from": shrunk["step"],
        "steps_repeated": step - shrunk["step"],
        "seconds_to_train_again": round(trained_at - killed_at, 1),
        "seconds_to_grow": round(run.first_step_after(grown["time"]) - came_back_at, 1),
        "seconds_stopped_to_grow": grown["seconds"],
        "starts": len(run.trainings()) - before,
    }


def killed(hosts: list[Host], run: Run, options: argparse.Namespace, uncut_seconds: float) -> list[dict[str, Any]]:
    """Start all hosts, kill as often as asked, and let the run end."""
    draw, kills = random.Random(options.seed), []
    try:
        for host in hosts:
            host.start()
        wait_for(lambda: run.last_step() > options.save_steps, "the first checkpoint", hosts)
        try:
            for _ in range(options.kills):
                kills.append(kill_one(hosts, run, draw, options))
                print(json.dumps(kills[-1]), flush=True)
        except CutShortError as error:
            print(f"after {len(kills)} kills: {error}", flush=True)
        latest = LATEST_SECONDS + 5 * uncut_seconds
        with suppress(CutShortError):
            wait_for(lambda: all(host.has_ended for host in hosts), "the end of the run", hosts, latest)
    finally:
        for host in hosts:
            if not host.has_ended:
                host.kill()
    return kills


def measure(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    run, uncut = Run(home / "run"), home / "uncut"
    flags = {**FLAGS, "max_steps": options.steps, "save_steps": options.save_steps, "do_eval": False}
    flags |= {"per_device_train_batch_size": options.micro}
    flags |= {"gradient_accumulation_steps": options.batch // options.hosts // options.micro}
    recipe = ["recipes/seq_cls.py", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    alone = ["torchrun", "--standalone", "--nproc_per_node", str(options.hosts), *recipe, "--output_dir", str(uncut)]
    began = time.time()
    subprocess.run(alone, cwd=REPO, env=environment(home / "cache"), check=True, stdout=subprocess.DEVNULL)
    uncut_seconds = time.time() - began
    recipe += ["--output_dir", str(run.folder)]
    hosts = [Host(number, options.hosts, recipe, home, options.namespaces) for number in range(options.hosts)]
    names, addresses = [host.name for host in hosts], [host.address for host in hosts]
    with networks(names, addresses) if options.namespaces else nullcontext():
        kills = killed(hosts, run, options, uncut_seconds)
    if not kills:
        raise SystemExit("no kill was completed")
    statuses = [host.process.returncode for host in hosts if host.process]
    ours, theirs = losses(run.folder), losses(uncut)
    apart = {step: abs(ours[step] - loss) / abs(loss) for step, loss in theirs.items() if step in ours}
    struck = {step: one for step, one in apart.items() if step <= kills[-1]["step"]}
    words = {name: value for name, value in vars(options).items() if name not in ("out", "namespaces")}
    command = [f"--{name} {value}" for name, value in words.items() if value != DEFAULTS[name]]
    return {
        "command": " ".join(["python benchmarks/elastic.py", *command, *["--namespaces"] * options.namespaces]),
        "hosts": options.hosts,
        "network_namespaces": options.namespaces,
        "steps": options.steps,
        "save_steps": options.save_steps,
        "global_batch": options.batch,
        "uncut_seconds": round(uncut_seconds, 1),
        "statuses": statuses,
        "kills": kills,
        "starts": len(run.trainings()),
        "steps_compared": len(apart),
        "largest_difference_of_a_loss": max(apart.values()),
        "largest_difference_until_the_last_kill": max(struck.values()),
        "first_step_over_a_millionth": next((step for step, one in apart.items() if one > 1e-6), None),
        "cores": os.cpu_count(),
        "versions": versions(),
    }


def losses(folder: Path) -> dict[int, float]:
    """By step. Steps that were repeated count with their last loss."""
    return {row["step"]: row["loss"] for row in rows_of(folder / "metrics.jsonl") if "loss" in row}


def span(seconds: list[float]) -> str:
    least, most = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{least} s" if least == most else f"{least} to {most} s"


def page(found: dict[str, Any]) -> str:
    kills = found["kills"]
    again, grow = ([kill[name] for kill in kills] for name in ("seconds_to_train_again", "seconds_stopped_to_grow"))
    rows = [
        f"| {n} | {kill['step']:,} | {_yes(kill['held_rank_0'])} | {_yes(kill['is_silent'])} | {kill['hosts_left']} | "
        f"{kill['steps_repeated']} | {kill['seconds_to_train_again']:.0f} | {kill['seconds_stopped_to_grow']:.0f} |"
        for n, kill in enumerate(kills, 1)
    ]
    cores, over = found["cores"], found["first_step_over_a_millionth"]
    after = found["steps_compared"] - kills[-1]["step"]
    ended = f"It was stopped, for want of time, {after:,} steps after the last kill"
    ended = ended if any(found["statuses"]) else "All supervisors ended with status 0"
    later = f": rounding, which grows, passes 1e-6 at step {over:,}" if over else ""
    where = "each in a network namespace" if found["network_namespaces"] else "on one network"
    where += ", beside other work" if found.get("beside_other_work") else ""
    lost = statistics.median(one + other for one, other in zip(again, grow, strict=True))
    head = ("kill", "at step", "was it rank 0's host", "silent", "hosts left", "steps repeated")
    head = (*head, "seconds to the next step", "seconds to grow")
    return f"""# Hosts that are killed and come back

`{found["command"]}`

This keeps one run of {found["steps"]:,} steps going with `finetune supervise`, on {found["hosts"]} hosts with one rank
each, {where}, which share {cores} CPU cores of one machine. It kills all processes of a random host, at
a random moment, {len(kills)} times; a silent host loses its network first, so that no connection is closed. Once the
others train again, the host comes back. A checkpoint is saved every {found["save_steps"]} steps, and the global batch
is {found["global_batch"]}.

- {ended}.
- Until the last kill, no step's loss differs from that of the same run without kills by more than
  {found["largest_difference_until_the_last_kill"]:.1e}, relative (fp32). Over all {found["steps_compared"]:,} steps
  that were compared, the largest difference is {found["largest_difference_of_a_loss"]:.1e}{later}.
- After a kill, the next step came {span(again)} later. Most of this is starting Python and
  importing torch on {cores} cores, and 10 s of waiting for other hosts.
- Growing back stopped training for {span(grow)}.
- In the median, a kill and the return cost {lost / 60:.1f} minutes in all.

| {" | ".join(head)} |
{"|---" * len(head)}|
{chr(10).join(rows)}

Measured with {in_words(found["versions"])}; the data are in [elastic.json](elastic.json). Nothing of this was measured
on GPUs or over a real network.
"""


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


DEFAULTS: dict[str, Any] = {
    "hosts": 3,
    "kills": 6,
    "steps": 3000,
    "save_steps": 50,
    "batch": 24,
    "micro": 4,
    "between": 5.0,
    "silent": 0.25,
    "seed": 0,
}
HELP = {
    "batch": "samples a step",
    "micro": "samples of a rank at once; accumulation makes up the rest",
    "between": "seconds of training, at most, before a kill and before a return",
    "silent": "share of the kills that take away the network first",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=HELP.get(name))
    parser.add_argument("--namespaces", action="store_true", help="each host in a network namespace; needs root")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.batch % (options.hosts * options.micro):
        parser.error("--batch must be a multiple of --hosts x --micro")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
