"""`finetune chat`: talk to a model in a terminal."""

from __future__ import annotations

import argparse

from finetune.generation.request import check_model, check_numbers


def run(asked: argparse.Namespace) -> int:
    """The exit status."""
    check_numbers(asked)
    check_model(asked.model)
    from finetune.generation.chat import chat

    chat(asked)
    return 0
