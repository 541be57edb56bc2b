"""The verdicts are upstream's, on configs that are made by a seed."""

from __future__ import annotations

import subprocess
import sys

from conftest import REPO


def test_deepspeed_the_trainer_and_accelerate_say_the_same() -> None:
    command = [sys.executable, "benchmarks/check_truth.py", "--seed", "2", "--count", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused by both") == 4
