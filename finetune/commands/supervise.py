"""`finetune supervise`: run a launcher's command, and again after each failure from which the run can continue."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from finetune.cli import parser
from finetune.commands.train import started_by
from finetune.errors import RequestError
from finetune.supervise.run import supervise


def run(asked: argparse.Namespace) -> int:
    """Returns the exit status of the last attempt."""
    if asked.max_restarts < 0:
        raise RequestError(f"--max_restarts is {asked.max_restarts}, but it must be 0 or more.")
    words = asked.words[1:] if asked.words[:1] == ["--"] else asked.words
    if [Path(word).name for word in words[:2]] == ["finetune", "train"]:
        words, environment = started_by(parser().parse_args(words[1:]))
        os.environ.update(environment)
    return supervise(words, asked.max_restarts)
