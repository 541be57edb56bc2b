"""`finetune train`: run the command that `finetune launch` prints, if it is a single one for this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from finetune.commands.launch import commands_of
from finetune.errors import RequestError
from finetune.launchers import HERE
from finetune.run.environment import path_of_programs


def run(asked: argparse.Namespace) -> int:
    """Print the command, and replace this process by it."""
    words, environment = started_by(asked)
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise RequestError(
            f"{shlex.quote(words[0])} cannot be started: {error.strerror}. Install it, or give another --launcher."
        ) from None


def started_by(asked: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command, which is printed, and its environment. Raises RequestError."""
    if {"-h", "--help"} & set(asked.flags):
        asked.launcher = asked.launcher or "python"  # help needs no ranks
        asked.gpus_per_node = asked.gpus_per_node or 1
    (first, *others), _ = commands_of(asked)
    if others or first.where:
        raise RequestError(
            "`finetune train` starts runs from this machine only, but this one needs a command on each of several "
            "hosts. `finetune launch`, with the same arguments, prints them."
        )
    words = [word.replace(HERE, os.getcwd()) for word in first.words]
    print(f"# {first.line()}", file=sys.stderr, flush=True)
    return words, {**os.environ, **first.environment, "PATH": path_of_programs()}
