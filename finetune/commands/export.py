"""`finetune export`: convert a checkpoint of any layout into a model that `from_pretrained` opens."""

from __future__ import annotations

import argparse

from finetune.export.request import check_request


def run(asked: argparse.Namespace) -> int:
    """The exit status."""
    check_request(asked)  # importing torch takes seconds
    from finetune.export.convert import convert

    return convert(asked)
