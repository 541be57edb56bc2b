"""`finetune train`: start what `finetune launch` prints, where that is one line for this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from finetune.commands.launch import commands_of
from finetune.errors import RequestError
from finetune.launchers import HERE


def run(asked: argparse.Namespace) -> int:
    """Say the line, and become its process."""
    words, environment = started_by(asked)
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise RequestError(
            f"{shlex.quote(words[0])} cannot be started: {error.strerror}. Install it, or take another --launcher."
        ) from None


def started_by(asked: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The words that start it, which are said, and its environment. Programs are found beside this Python first, in an
    environment that is not activated as well. Raises RequestError."""
    if {"-h", "--help"} & set(asked.flags):
        asked.launcher = asked.launcher or "python"  # which the answer needs no ranks for
        asked.gpus_per_node = asked.gpus_per_node or 1
    (first, *others), _ = commands_of(asked)
    if others or first.where:
        raise RequestError(
            "`finetune train` starts a run from this machine alone, and this one has a line for each of several hosts. "
            "`finetune launch`, with the same words, prints them."
        )
    words = [word.replace(HERE, os.getcwd()) for word in first.words]
    print(f"# {first.line()}", file=sys.stderr, flush=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return words, {**os.environ, **first.environment, "PATH": path}
