"""`finetune generate`: what a language model answers to a file of prompts."""

from __future__ import annotations

import argparse

from finetune.generation.answers import Answers
from finetune.generation.prompts import read_prompts
from finetune.generation.request import check_model, check_numbers, identity_of
from finetune.run.launch import read_launch


def run(asked: argparse.Namespace) -> int:
    """The exit status, on every rank. What is wrong with the request is mostly found before torch is imported."""
    launch = read_launch()
    check_numbers(asked)
    check_model(asked.model)
    prompts = read_prompts(asked.prompts, asked.prompt_column, asked.reasoning)
    answers = Answers(asked.output, identity_of(asked, prompts), len(prompts), asked.overwrite)
    from finetune.generation.answering import answer_all

    answer_all(asked, prompts, answers, launch)
    return 0
