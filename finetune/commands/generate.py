"""`finetune generate`: write a language model's answers to a file of prompts."""

from __future__ import annotations

import argparse

from finetune.generation.request import answer_file
from finetune.run.launch import read_launch


def run(asked: argparse.Namespace) -> int:
    """The exit status."""
    answer_file(asked, read_launch())
    return 0
