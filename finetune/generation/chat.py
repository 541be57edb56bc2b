"""`finetune chat`: a conversation in a terminal, with its answers as they come."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from transformers import TextStreamer

from finetune.errors import JOINERS, RequestError
from finetune.generation.answering import answerer_of, most_new_of
from finetune.generation.batches import Batch
from finetune.generation.encode import encode, settle_template
from finetune.generation.model import meet, open_writer
from finetune.generation.prompts import Prompt
from finetune.privacy import shown
from finetune.run.launch import Launch

RESET, QUIT = "/reset", "/quit"


def chat(asked: argparse.Namespace) -> None:
    """Until the input ends, or says /quit. Raises RequestError for a model without a chat template."""
    launch = Launch()
    writer = open_writer(asked, launch)
    how = settle_template(writer.tokenizer, asked.chat_template)
    if not writer.tokenizer.chat_template:
        raise RequestError(
            f"{asked.model}: has no chat template, and so no turns. Give one by --chat_template (chatml, llama3, "
            "...), or have it go on with texts: finetune generate."
        )
    meet(launch, writer)
    answerer, most_new = answerer_of(asked, writer, launch), most_new_of(asked, writer.positions)
    print(shown(f"chat: {writer.source.description} {how}; {answerer.decoding}; {RESET} forgets what was said, {QUIT} "
                "ends"), flush=True)  # fmt: skip
    first = [{"role": "system", "content": asked.system}] if asked.system else []
    turns = list(first)
    for number, line in enumerate(_lines()):
        if line == QUIT:
            return
        if line == RESET:
            turns = list(first)
            continue
        said = [*turns, {"role": "user", "content": line}]
        try:
            (ids,) = encode(writer.tokenizer, [Prompt("the conversation", said)])
            limit = min(most_new, writer.positions - len(ids))
            if limit < 1:
                raise RequestError(
                    f"the conversation has {len(ids):,} tokens, but the model reads {writer.positions:,}. {RESET} "
                    "begins anew."
                )
        except RequestError as error:
            print(shown(str(error)), file=sys.stderr, flush=True)
            continue
        streamer = _Screen(writer.tokenizer, skip_prompt=True, skip_special_tokens=True)
        (row,) = answerer.answer([ids], Batch([number], limit), streamer)
        turns = [*said, {"role": "assistant", "content": row["text"]}]


def _lines() -> Iterator[str]:
    """What is typed, without blank lines."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            print(flush=True)
            return
        if line:
            yield line


class _Screen(TextStreamer):  # type: ignore[misc]
    """Without what would move a terminal's cursor: a stranger's model may write it."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        plain = "".join(one if one.isprintable() or one in f"\n\t{JOINERS}" else "?" for one in text)
        super().on_finalized_text(plain, stream_end)
