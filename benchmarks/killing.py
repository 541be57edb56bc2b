"""Launches that are killed at a random moment, and what the kill hit."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from durability_runs import REPO, environment

MARK = "DURABILITY_LAUNCH"  # an environment variable of all processes of a launch
LOOK_SECONDS = 0.002
START_SECONDS = 9.0  # a kill in start-up comes within this time
TRAINING_SECONDS = 0.9  # a kill in training comes within this time after the first step
SAVE_SECONDS = 0.25  # a kill in a save comes within this time: about as long as a save takes, so some come just after
LAUNCHER_SECONDS = 0.4  # ranks outlive their launcher by at most this time
LATEST_END_SECONDS = 60.0  # how long the remaining ranks may take to end once one is killed
LONGEST_SECONDS = 300.0
MOMENTS_OF_SAVES = ("save", "save", "save", "rename", "rotation", "final")
OTHER_MOMENTS = ("start", "training", "training", "training")
WRITE = "write"  # while a checkpoint is being written: aimed at with `aimed_at_write`
VICTIMS = ("one rank", "all ranks", "launcher")


@dataclass(frozen=True)
class Kill:
    """`when` and `which`, from 0 to 1, choose the moment within its time span, and the rank."""

    moment: str
    victim: str
    when: float
    which: float


class Launch:
    """A running launch; `folder` is its run folder, and its output is in a log beside it."""

    def __init__(self, command: Sequence[str], folder: Path, cache: Path, ranks: int) -> None:
        self.folder, self.wanted = folder, ranks
        self.mark, self.began = uuid.uuid4().hex, time.time()
        self.log = folder.with_name(folder.name + ".log")
        self.was_struck = False
        self.seen: list[str] = []  # names in the run folder at the kill
        self._ranks: list[psutil.Process] = []
        with self.log.open("w") as out:
            env = {**environment(cache), MARK: self.mark}
            self.process = subprocess.Popen(command, cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def went_on_from(self) -> int | None:
        """The step from which it resumed, according to its own message."""
        for line in self.output.splitlines():
            if line.startswith("going on from "):
                return int(line.rsplit(" ", 1)[1])
        return None

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> list[psutil.Process]:
        """The training processes, by rank; fewer while the launcher is starting them."""
        if len(self._ranks) < self.wanted:
            found: dict[int, psutil.Process] = {}
            with suppress(psutil.Error):
                parent = psutil.Process(self.process.pid)
                if self.wanted == 1:
                    found = {0: parent}
                for child in parent.children() if self.wanted > 1 else ():
                    with suppress(psutil.Error, KeyError):
                        found.setdefault(int(child.environ()["RANK"]), child)
            self._ranks = [found[rank] for rank in sorted(found)]
        return self._ranks

    def strike(self, kill: Kill, within: float = LAUNCHER_SECONDS) -> float:
        """Kill by SIGKILL, and return the time. Ranks outlive a launcher that is killed by `within` seconds at most."""
        ranks = self.ranks()
        self.was_struck, struck_at = True, time.time()
        self.seen = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        if kill.victim == "one rank" and ranks:
            _kill([ranks[int(kill.which * len(ranks))]])
        elif kill.victim == "launcher" and self.wanted > 1:
            self.process.kill()
            time.sleep(kill.which * min(within, LAUNCHER_SECONDS))
            _kill(ranks)
        else:
            _kill(ranks)
            self.process.kill()
        return struck_at

    def end(self, latest: float = LATEST_END_SECONDS) -> float | None:
        """Seconds until all processes had ended by themselves; None if some had to be killed because they took too
        long."""
        began, late = time.time(), False
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(latest)
        while left := self.alive():
            if late := time.time() - began > latest:
                _kill(left)
                break
            time.sleep(0.05)
        self.process.wait(10)
        return None if late else round(time.time() - began, 2)

    def wait(self) -> int | None:
        """The exit status of a launch that is not killed; None if it did not end."""
        try:
            return self.process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            _kill([*self.alive(), psutil.Process(self.process.pid)])
            return None

    def alive(self) -> list[psutil.Process]:
        """All processes of this launch that still run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found


def aimed(launch: Launch, kill: Kill, has_begun: dict[str, Callable[[], bool]]) -> float | None:
    """Wait for the kill's moment, and strike. `has_begun` tells whether a moment has begun; "start" needs none. None if
    the launch ended first."""
    begun = has_begun.get(kill.moment, lambda: True)
    spans = {"start": START_SECONDS, "training": TRAINING_SECONDS, "save": SAVE_SECONDS, "final": SAVE_SECONDS}
    end = time.time() + LONGEST_SECONDS
    while not begun():
        if launch.has_ended() or time.time() > end:
            return None
        time.sleep(LOOK_SECONDS)
    launch.ranks()
    time.sleep(kill.when * spans.get(kill.moment, LOOK_SECONDS))
    return None if launch.has_ended() else launch.strike(kill)


def aimed_at_write(launch: Launch, kill: Kill, saves_to_pass: int) -> float | None:
    """Strike while a checkpoint is being written, at a random moment of the time that the one before took. One that is
    finished sooner is let pass. None if the launch ended first."""
    span, end = SAVE_SECONDS, time.time() + LONGEST_SECONDS
    trains = moments(launch, 0)["training"]
    while not launch.has_ended() and time.time() < end:
        time.sleep(LOOK_SECONDS)
        outer = next(launch.folder.glob("unfinished-checkpoint-*"), None) if trains() else None
        if outer is None:
            continue
        begun = time.time()
        launch.ranks()
        while outer.is_dir() and not launch.has_ended():
            if saves_to_pass <= 0 and time.time() >= begun + kill.when * span:
                return launch.strike(kill, (1 - kill.when) * span)
            time.sleep(LOOK_SECONDS)
        span, saves_to_pass = time.time() - begun, saves_to_pass - 1
    return None


def moments(launch: Launch, saves_to_pass: int) -> dict[str, Callable[[], bool]]:
    """Tests for the moments, by the run folder of one of our recipes."""
    folder, passed = launch.folder, set[str]()

    def names() -> list[str]:
        return os.listdir(folder) if folder.is_dir() else []

    def trains() -> bool:
        return bool(new_steps(folder, launch.began))

    def saves() -> bool:
        passed.update(name for name in names() if name.startswith("unfinished-checkpoint-") and trains())
        return len(passed) > saves_to_pass

    def renames() -> bool:
        return any(folder.glob("unfinished-checkpoint-*/checkpoint-*/manifest.json*")) and trains()

    def rotates() -> bool:
        return any(name.startswith("deleting-") for name in names()) and trains()

    def ends() -> bool:
        return bool({"unfinished-final", "final"} & set(names()))

    return {"training": trains, "save": saves, "rename": renames, "rotation": rotates, "final": ends}


def new_steps(folder: Path, since: float) -> list[tuple[float, int]]:
    """When each training step after `since` was logged; lines that a kill has cut off are skipped."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            row = json.loads(line)
            if "loss" in row and row["time"] > since:
                found.append((row["time"], row["step"]))
    return found


def what_it_hit(launch: Launch, last_step: int) -> str:
    """What a kill hit, judging by the files in the run folder after all processes have ended."""
    folder = launch.folder
    if any((folder / name).is_dir() for name in ("unfinished-final", "final")):
        return "the final model"
    for outer in folder.glob("unfinished-checkpoint-*"):
        (inner,) = list(outer.glob("checkpoint-*")) or [None]
        if inner is None:
            return "save: after the rename"
        if (inner / "manifest.json").is_file():
            return "save: before the rename"
        return "save: the files"
    if any(folder.glob("deleting-*")):
        return "rotation"
    steps = new_steps(folder, launch.began)
    if not steps and launch.went_on_from() is None:
        return "start-up"
    return "after training" if steps and steps[-1][1] == last_step else "training"


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
