"""The flags of `finetune generate` and `finetune chat`, and their ranges. Imports nothing heavy."""

from __future__ import annotations

import argparse

from finetune.errors import RequestError
from finetune.run.command_line import CommandParser
from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE, Range

RANGES = {
    "max_new_tokens": AT_LEAST_ONE,
    "temperature": NOT_NEGATIVE,
    "top_p": Range(above=0, most=1),
    "seed": NOT_NEGATIVE,
    "batch_size": AT_LEAST_ONE,
}


def generate_parser(described: str | None) -> CommandParser:
    """The parser of a script that generates; `described` is its description."""
    parser = CommandParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_generate(parser)
    return parser


def add_generate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_answering(command)
    add("--prompts", required=True, metavar="FILE", help="jsonl, json, csv or tsv with `prompt`, or `messages` that "
        "end in a user's turn; or txt, each line a prompt")  # fmt: skip
    add("--output", required=True, metavar="FILE", help="the answers, as jsonl, in the prompts' order; an interrupted "
        "command continues if run again")  # fmt: skip
    add("--prompt_column", metavar="NAME", help="the column with the prompts (default: messages, or prompt)")
    add("--batch_size", type=int, default=8, metavar="N", help="prompts at a time on each rank (default 8)")
    add("--truncate_prompts", action="store_true", help="cut off the beginning of prompts too long for the model")
    add("--deepspeed", metavar="CONFIG", help="zero3 or zero3_offload: shard the weights over ranks, or keep them on "
        "the CPU")  # fmt: skip
    add("--overwrite", action="store_true", help="replace --output at the end, whatever it holds")
    add("--local_rank", help=argparse.SUPPRESS)  # added by the deepspeed launcher


def add_chat(command: argparse.ArgumentParser) -> None:
    _add_answering(command)
    command.add_argument("--system", metavar="TEXT", help="the system message")
    command.set_defaults(deepspeed="none")


def _add_answering(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", metavar="RUN_OR_MODEL", help="the folder of a run, a model or an adapter, or a hub id")
    add("--max_new_tokens", type=int, metavar="N", help="tokens per answer at most (default 256, or half of the "
        "model's positions)")  # fmt: skip
    add("--temperature", type=float, metavar="X", help="0 takes the likeliest token (default: as the model's "
        "generation_config.json says, else 0)")  # fmt: skip
    add("--top_p", type=float, metavar="X", help="sample from the likeliest tokens with this total probability")
    add("--seed", type=int, default=42, metavar="N", help="of sampling, independent for each prompt (default 42)")
    add("--stop", action="append", metavar="TEXT", help="end an answer before this text; may be given several times")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="of the weights (default: "
        "bfloat16 on a GPU that has it, float32 on a CPU)")  # fmt: skip
    add("--chat_template", metavar="NAME|FILE", help="as in training; none: plain text (default: the model's own)")
    add("--reasoning", choices=("keep", "strip"), default="keep", help="earlier reasoning in a conversation")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")


def check_numbers(asked: argparse.Namespace) -> None:
    """Raises RequestError for a number out of range, and for flags that contradict each other."""
    for name, allowed in RANGES.items():
        value = getattr(asked, name, None)
        if value is not None and not allowed.holds(value):
            raise RequestError(f"--{name} is {value}, but it must be {allowed}.")
    if asked.top_p is not None and asked.temperature == 0:
        raise RequestError(f"--top_p {asked.top_p} is for sampling, and --temperature 0 does not sample. Drop one.")
    if "" in (asked.stop or ()):
        raise RequestError("--stop '': an empty text matches everywhere. Leave it out.")
