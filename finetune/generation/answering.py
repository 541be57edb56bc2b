"""From prompts to answers: batch by batch on every rank, collected and written by rank 0."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from finetune.errors import NothingToDoError, RunError
from finetune.generation.answers import Answers
from finetune.generation.batches import Batch, batches_of, rounds_of
from finetune.generation.encode import encode, fit, settle_template
from finetune.generation.model import Writer, device_of, meet, open_writer
from finetune.generation.prompts import Prompt
from finetune.generation.sampling import Decoding, Stops, settle_decoding
from finetune.privacy import shown
from finetune.run.launch import Launch

MOST_NEW = 256  # tokens, without --max_new_tokens; fewer if the model has few positions
REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class Answerer:
    """A model with all that its answers depend on."""

    model: Any
    tokenizer: Any
    decoding: Decoding
    stop: Sequence[str]
    device: torch.device
    ends: frozenset[int]
    synced: bool | None = None  # whether finished ranks continue until the last is done; None: transformers decides

    def answer(self, ids: Sequence[list[int]], batch: Batch, streamer: Any = None) -> list[dict[str, Any]]:
        """The answers to prompts with these token ids and the batch's numbers. Padding is on the left, so that all
        answers start in the same column; every transformers model derives positions from the mask."""
        width = max(map(len, ids))
        pad = self.model.generation_config.pad_token_id
        padded = torch.tensor([[pad] * (width - len(one)) + one for one in ids], device=self.device)  # (B, width)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in ids], device=self.device)
        pads = [width - len(one) for one in ids]
        stops = Stops(self.tokenizer, self.stop, width, len(ids)) if self.stop else None
        try:
            with torch.no_grad():  # not inference mode: training could not use its tensors, such as gathered weights
                made = self.model.generate(
                    input_ids=padded,
                    attention_mask=mask,
                    max_new_tokens=batch.limit,
                    logits_processor=self.decoding.processors(batch.numbers, pads, self.device),
                    stopping_criteria=[stops] if stops else [],
                    streamer=streamer,
                    synced_gpus=self.synced,
                )
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"the GPU's memory does not hold {len(ids)} prompts of up to {width:,} tokens and {batch.limit:,} new "
                "tokens each. Lower --batch_size, which keeps the answers so far, or --max_new_tokens."
            ) from error
        after = stops.after if stops else [None] * len(ids)
        rows = zip(batch.numbers, ids, made[:, width:].tolist(), after, strict=True)
        return [self._row(number, len(one), new, stopped) for number, one, new, stopped in rows]

    def _row(self, number: int, read: int, new: list[int], stopped: int | None) -> dict[str, Any]:
        ended = next((i + 1 for i, token in enumerate(new) if token in self.ends), None)
        if ended is not None and (stopped is None or ended <= stopped):
            new, reason = new[:ended], "end"
        elif stopped is not None:
            new, reason = new[:stopped], "stop"
        else:
            reason = "length"
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        places = [text.find(one) for one in self.stop if one in text] if reason == "stop" else []
        text = text[: min(places)] if places else text
        return {"index": number, "text": text, "finish_reason": reason, "tokens": len(new), "prompt_tokens": read}


def answerer_of(asked: argparse.Namespace, writer: Writer, launch: Launch) -> Answerer:
    """Call it after `meet`."""
    return settled_answerer(
        asked, writer.build(launch), writer.tokenizer, writer.embedded, device_of(launch, writer.has_cuda)
    )


def settled_answerer(
    asked: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    embedded: int,
    device: torch.device,
    synced: bool | None = None,
) -> Answerer:
    """An answerer with `model`, which embeds `embedded` tokens and gets a new generation config: as `asked`, and with a
    padding token."""
    config = model.generation_config = copy.copy(model.generation_config)
    stop = [*(asked.stop or ()), *([config.stop_strings] if isinstance(config.stop_strings, str) else
            config.stop_strings or ())]  # fmt: skip
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    # The tokenizer's as well: a chat model's folder may name only the end of a text, not that of a turn.
    ends = [end for end in dict.fromkeys([*known, tokenizer.eos_token_id]) if end is not None]
    config.eos_token_id = ends or None
    # Padding is masked before a prompt and cut off after an answer, so any token will do.
    pads = (i for i in (tokenizer.pad_token_id, *ends) if i is not None and i < embedded)
    config.pad_token_id = next(pads, 0)
    decoding = settle_decoding(asked, model)
    return Answerer(model, tokenizer, decoding, stop, device, frozenset(ends), synced)


def most_new_of(given: int | None, positions: int) -> int:
    """The token limit of an answer, for a model with `positions` positions."""
    return given or min(MOST_NEW, max(1, positions // 2))


def answer_all(asked: argparse.Namespace, prompts: Sequence[Prompt], answers: Answers | None, launch: Launch) -> None:
    """`answers` is None on all ranks but the first. Raises RequestError for what only the model shows, RunError, and
    NothingToDoError on every rank."""
    writer = open_writer(asked, launch)
    how = settle_template(writer.tokenizer, asked.chat_template)
    ids = encode(writer.tokenizer, prompts, writer.embedded)
    most_new = most_new_of(asked.max_new_tokens, writer.positions)
    cut = fit(ids, prompts, writer.positions, most_new, asked.truncate_prompts)
    there: Any = [(answers.open(), answers.is_done) if answers else None]
    meet(launch, writer)
    if launch.world_size > 1:
        distributed.broadcast_object_list(there, device=device_of(launch, writer.has_cuda))
    numbers, is_done = there[0]
    if is_done:
        raise NothingToDoError(answers.all_there if answers else "")  # only the first rank prints it
    done = set(numbers)
    answerer = answerer_of(asked, writer, launch) if len(done) < len(prompts) else None
    if answers:
        decoding = answerer.decoding if answerer else "nothing is left to answer"
        what = f"generate: {counted(len(prompts), 'prompt')} {how} to {writer.source.description}; {decoding}"
        print(shown(f"{what}; at most {most_new:,} new tokens; {writer.place(launch)}"),
              *([f"{counted(cut, 'prompt')} too long: the beginning is cut off"] if cut else []),
              *([f"{counted(len(done), 'answer')} there already"] if done else []), sep="\n", flush=True)  # fmt: skip
    batches = batches_of([len(one) for one in ids], writer.positions, most_new, asked.batch_size)
    left = [Batch([n for n in batch.numbers if n not in done], batch.limit) for batch in batches]
    report = _Report(len(prompts), len(done), launch.speaks)
    for some in rounds_of([batch for batch in left if batch.numbers], launch.world_size):
        assert answerer is not None
        rows = answer_round(answerer, ids, some, launch, writer.shards)
        if answers:
            answers.add([_named(row, prompts[row["index"]]) for row in rows])
        report.add(rows)
    if answers:
        answers.finish()
        print(shown(f"{answers.path}: {counted(len(prompts), 'answer')}; {report}"), flush=True)
    if distributed.is_initialized():
        distributed.barrier()  # no rank leaves while others still communicate with it


def answer_round(
    answerer: Answerer, ids: Sequence[list[int]], some: Sequence[Batch], launch: Launch, shards: bool
) -> list[dict[str, Any]]:
    """Answer one batch per rank; returns all answers on the first rank, and nothing on the others. All ranks call it
    with the same `some`, of one limit. If there are fewer batches than ranks and weights are sharded (`shards`), a rank
    without a batch repeats the first one, since the others wait for its part of each layer."""
    mine = some[launch.rank] if launch.rank < len(some) else some[0] if shards else None
    rows = answerer.answer([ids[number] for number in mine.numbers], mine) if mine else []
    rows = rows if launch.rank < len(some) else []
    if launch.world_size == 1:
        return rows
    found: Any = [None] * launch.world_size if launch.speaks else None
    distributed.gather_object(rows, found)
    return [row for one in found or () for row in one]


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _named(row: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    return row if prompt.id is None else {"index": row["index"], "id": prompt.id, **row}


class _Report:
    """Progress on stderr every `REPORT_SECONDS`, and the summary at the end."""

    def __init__(self, prompts: int, done: int, speaks: bool) -> None:
        self.prompts, self.done, self.speaks = prompts, done, speaks
        self.reasons: Counter[str] = Counter()
        self.tokens = 0
        self.start = self.said = time.monotonic()

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.done += len(rows)
        self.tokens += sum(row["tokens"] for row in rows)
        self.reasons.update(row["finish_reason"] for row in rows)
        if self.speaks and time.monotonic() - self.said > REPORT_SECONDS:
            self.said = time.monotonic()
            print(f"{self.done:,} of {self.prompts:,} prompts; {self._rate()}", file=sys.stderr, flush=True)

    def _rate(self) -> str:
        return f"{self.tokens:,} tokens, {self.tokens / max(time.monotonic() - self.start, 1e-9):,.0f} a second"

    def __str__(self) -> str:
        ended = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.reasons.items()))
        return f"{self._rate()}; finished by {ended}" if ended else self._rate()
