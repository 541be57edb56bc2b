"""How a recipe's process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

ENDS = """
import atexit, os, sys
from finetune.entry.main import run_main

class Torn:  # as gloo's threads may be, once Python itself is taken apart
    def __del__(self):
        os.abort()

def main():
    sys.torn = Torn()
    atexit.register(print, "the tracker is told")
    print("done")
    {last}

run_main(main)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_is_done_does_not_die_over_what_is_torn_down_behind_it(rank: int) -> None:
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "PATH": "", "PYTHONPATH": str(REPO)}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS.format(last="")], env=env, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == (["done", "the tracker is told"] if rank == 0 else ["done"])


def test_a_fault_of_ours_does_not_end_in_0() -> None:
    command = [
        sys.executable,
        "-c",
        ENDS.format(last="sys.torn = None; raise KeyError('x')").replace("os.abort()", "pass"),
    ]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "KeyError" in ended.stderr


INTERRUPTED = """
import os
from finetune.entry.main import run_recipe
from finetune.run.recipes.seq_cls import SEQ_CLS

def main(run):
    {first}
    raise KeyboardInterrupt

run_recipe(SEQ_CLS, main)
"""


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("pass", "stopped. Nothing has been written: start it again."),
        (
            "os.makedirs(run.values['output_dir'])",
            "stopped. {} holds no checkpoint. Start again with --resume allow, or --overwrite_output_dir True.",
        ),
        (
            "[os.makedirs(f'{{run.values[\"output_dir\"]}}/checkpoint-{{step}}') for step in (9, 12)]",
            "stopped. {}/checkpoint-12 is the newest checkpoint; --resume auto continues from the newest valid one.",
        ),
    ],
)
def test_ctrl_c_names_the_newest_checkpoint(tmp_path: Path, first: str, says: str) -> None:
    script = INTERRUPTED.format(first=first.format())
    folder = tmp_path / "run"
    command = [sys.executable, "-c", script, "--output_dir", str(folder)]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (130, says.format(folder))


def test_help_into_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} {REPO / 'recipes' / 'seq_cls.py'} --help | true"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
