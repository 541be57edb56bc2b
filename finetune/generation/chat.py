"""`finetune chat`: a conversation in a terminal, with streamed answers."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from transformers.generation.streamers import BaseStreamer

from finetune.data.chat.turns import ASSISTANT, turns_of
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
    """Chat until the input ends or is /quit. Ctrl-C during an answer stops it and forgets it with its question; between
    answers it ends the chat. Raises RequestError for a model without a chat template."""
    launch = Launch()
    writer = open_writer(asked, launch)
    how = settle_template(writer.tokenizer, asked.chat_template)
    if not writer.tokenizer.chat_template:
        raise RequestError(
            f"{asked.model}: has no chat template. Give one with --chat_template (chatml, llama3, ...), or have the "
            "model continue texts: finetune generate."
        )
    meet(launch, writer)
    answerer, most_new = answerer_of(asked, writer, launch), most_new_of(asked.max_new_tokens, writer.positions)
    print(shown(f"chat: {writer.source.description} {how}; {answerer.decoding}; {RESET} starts over, {QUIT} "
                "ends"), flush=True)  # fmt: skip
    first = [{"role": "system", "content": asked.system}] if asked.system else []
    turns = list(first)
    for number, line in enumerate(_lines()):
        if line == QUIT:
            return
        if line == RESET:
            turns = list(first)
            continue
        try:
            said = turns_of([*turns, {"role": "user", "content": _readable(line)}], asked.reasoning)
            (ids,) = encode(writer.tokenizer, [Prompt("the conversation", said)], writer.embedded)
            limit = min(most_new, writer.positions - len(ids))
            if limit < 1:
                raise RequestError(
                    f"the conversation has {len(ids):,} tokens, but the model reads {writer.positions:,}. {RESET} "
                    "starts over."
                )
            row = answerer.answer([ids], Batch([number], limit), Screen(writer.tokenizer, answerer.stop))[0]
        except RequestError as error:
            print(shown(str(error)), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("\n(stopped, and forgotten)", file=sys.stderr, flush=True)
        else:
            turns = [*said, {"role": ASSISTANT, "content": row["text"]}]


def _lines() -> Iterator[str]:
    """The typed lines, without blank ones."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # undecodable input fails only its own line, not the chat
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            print(flush=True)
            return
        if line:
            yield line


def _readable(line: str) -> str:
    try:
        return line.encode().decode()
    except UnicodeEncodeError as error:
        encoding = getattr(sys.stdin, "encoding", "UTF-8")
        raise RequestError(f"this line is not valid {encoding}, and is ignored: {line[:80]!a}.") from error


class Screen(BaseStreamer):  # type: ignore[misc]
    """Prints an answer as it comes, up to where a `stop` text may begin, and replaces control characters: an untrusted
    model may write some. transformers' TextStreamer prints both, and only up to the last blank."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.ids: list[int] | None = None  # None until the prompt has come
        self.written = 0  # characters

    def put(self, value: Any) -> None:
        if self.ids is None:
            self.ids = []
            return
        self.ids += value.tolist()
        text = self._text()
        whole = text.rstrip("\ufffd")  # stands for letters whose bytes are incomplete
        self._write(whole[: len(whole) - max((len(one) - 1 for one in self.stop), default=0)])

    def end(self) -> None:
        self._write(self._text())
        print(flush=True)

    def _text(self) -> str:
        text = str(self.tokenizer.decode(self.ids or [], skip_special_tokens=True))
        return text[: min((text.find(one) for one in self.stop if one in text), default=len(text))]

    def _write(self, text: str) -> None:
        new = text[self.written :]
        self.written += len(new)
        plain = "".join(one if one.isprintable() or one in f"\n\t{JOINERS}" else "?" for one in new)
        print(plain, end="", flush=True)
