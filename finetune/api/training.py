"""`train`: a recipe from Python, in this process or in several.

One rank without DeepSpeed trains in this process. Several ranks, and any number with DeepSpeed, are started as
`finetune train` starts them. accelerate's `notebook_launcher` would fork this process instead, which is unsafe once a
run has started torch's threads or CUDA here; it refuses if CUDA is initialized, and does not support DeepSpeed
(accelerate 1.15, launchers.py)."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.api.run import LoadedRun, load_run
from finetune.api.words import from_python, words_of
from finetune.cli import parser
from finetune.commands.recipe import find
from finetune.commands.train import started_by
from finetune.entry.main import resolve_here
from finetune.errors import FinetuneError, InterruptedRunError, NothingToDoError, RequestError, RunError
from finetune.measure.processes import all_ended
from finetune.privacy import shown
from finetune.run.choose import recipes
from finetune.run.engine import deepspeed_config_of
from finetune.run.launch import Launch, free_port, read_launch
from finetune.run.recipe import Recipe

ERROR_LINE = re.compile(r"(?:\[rank \d+\] )?error: (.*)")
KINDS: dict[int, type[FinetuneError]] = {one.exit_status: one for one in (RequestError, InterruptedRunError)}


@from_python()
def train(recipe: str, *, ranks: int | None = None, **flags: Any) -> LoadedRun:
    """Run a recipe, such as "seq_cls", with its flags as keyword arguments, and load the result: train("seq_cls",
    train_file="reviews.csv", num_train_epochs=1). `ranks` starts several processes on this machine: one per GPU, or CPU
    processes if there is no GPU.

    Raises RequestError with all mistakes in the request, RunError if the run fails, and InterruptedRunError if a signal
    stopped it after a checkpoint."""
    if "RANK" in os.environ:
        raise RequestError(
            "train() was called in a process of a launcher (RANK is set), and would be called in each of them. Call "
            "it in plain Python, with ranks=N."
        )
    if ranks is not None and ranks < 1:
        raise RequestError(f"ranks is {ranks}, but it must be 1 or more.")
    script, words = find(recipe), words_of(flags)
    known = recipes().get(script.stem)
    if known is None:
        raise RequestError(f"{recipe} is not a recipe that trains. Give one of {', '.join(recipes())}.")
    launch = read_launch() if ranks is None else Launch(0, 0, ranks, ranks, "deepspeed")
    run = resolve_here(known, words, launch)
    if ranks is None and deepspeed_config_of(run) is None:
        _here(known, script, words)
    else:
        _in_processes(known, ranks or 1, words)
    return load_run(run.value("output_dir"))


def _here(recipe: Recipe, script: Path, words: Sequence[str]) -> None:
    from finetune.api.process import left_as_found

    with left_as_found([str(script), *words]):
        try:
            runpy.run_path(str(script))["main"](resolve_here(recipe, words, Launch()))
        except NothingToDoError as error:
            print(shown(str(error)))


def _in_processes(recipe: Recipe, ranks: int, words: Sequence[str]) -> None:
    """Print the processes' output as it comes. Whatever ends this call, including Ctrl-C, ends them too."""
    options = ["--gpus_per_node", str(ranks), "--master_port", str(free_port())]
    command, environment = started_by(parser().parse_args(["train", *options, recipe.name, *words]))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    lines = []
    with (
        all_ended() as mark,
        subprocess.Popen(command, env=environment | mark, start_new_session=True, **pipes) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            sys.stdout.write(line)
        status = process.wait()
    if status:
        raise KINDS.get(status, RunError)(_why(lines, status))


def _why(lines: Sequence[str], status: int) -> str:
    """The error that a rank printed, up to the launcher's own lines; else the last lines of output."""
    for place, line in enumerate(lines):
        if found := ERROR_LINE.match(line):
            rest = [found[1]]
            for more in lines[place + 1 :]:
                if not more.strip() or more.startswith("["):
                    break
                rest.append(more.rstrip("\n"))
            return "\n".join(rest)
    stopped = next((line.strip() for line in lines if line.startswith("stopped by ")), "")
    return stopped or f"the run ended with status {status}:\n{''.join(lines[-20:])}"
