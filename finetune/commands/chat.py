"""`finetune chat`: talk to a model in a terminal."""

from __future__ import annotations

import argparse

from finetune.generation.flags import check_numbers
from finetune.generation.request import check_model


def run(asked: argparse.Namespace) -> int:
    """The exit status."""
    check_numbers(asked)
    check_model(asked.model)
    from finetune.generation.chat import chat

    chat(asked)
    return 0
