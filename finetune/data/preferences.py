"""Preferences as tokens, prepared once and cached: prompts with a chosen and a rejected answer or, for KTO, with one
answer that is desirable or not.

A pair has `chosen_ids` and `rejected_ids` with `chosen_learnt` and `rejected_learnt`, a boolean per token: is it
trained on. A KTO row has `answer_...`, and `other_...`: its prompt with another row's answer. `row` numbers the rows
across all splits and locates the reference model's log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from finetune.data.cache import file_states, folder_for
from finetune.data.charset import encoding_notes
from finetune.data.chat.remarks import notes_of
from finetune.data.chat.templates import DEFAULT_TEMPLATE, INVENTED, UNTEMPLATED, each_rendered, read_template
from finetune.data.columns import said_columns, said_data
from finetune.data.duplicates import notes_of_trained
from finetune.data.find_columns import HEAD_ROWS
from finetune.data.places import Place
from finetune.data.preference_batches import OF_ANSWERS, OF_PAIRS, collate
from finetune.data.preference_columns import find_preferences
from finetune.data.preference_rows import (
    SPLITS,
    Sides,
    encoded,
    fitted,
    open_tables,
    settled,
    sides_of,
    single,
    with_others,
)
from finetune.data.splits import mend_of_bad, renamed
from finetune.data.tokenizer import Tokenized, identity_for_texts, prepare_tokens, train_text_tokenizer
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments
from finetune.run.launch import Launch
from finetune.run.recipes.preference import PreferenceDataArguments

FORMAT = 5  # raise it when what is cached changes


@dataclass(frozen=True)
class PreferenceAccount:
    """What was found, for the log and the model card. Counts are of rows."""

    source: str
    columns: str
    rows: dict[str, int]
    skipped: dict[str, int]
    truncated: dict[str, int]  # rows that were cut
    max_seq_length: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PreferenceData(Tokenized):
    """Tokenized splits with account and tokenizer."""

    splits: dict[str, Dataset]
    account: PreferenceAccount
    tokenizer: Any
    sides: tuple[str, str]  # OF_PAIRS or OF_ANSWERS
    is_chat: bool

    @property
    def lengths(self) -> Any:
        """Tokens of the longer side of each training row, for length grouping."""
        return self.splits["train"]["length"] if "train" in self.splits else None

    @cached_property
    def margins(self) -> torch.Tensor:
        """The target margin between the scores of each pair, for all rows (N,)."""
        found = [split["margin"][:] for split in self.splits.values() if "margin" in split.column_names]
        return torch.tensor([margin for some in found for margin in some], dtype=torch.float32)

    @property
    def collator(self) -> Any:
        """Collates all rows' first sides, then all second sides, padded on the right."""
        return partial(collate, self.sides, self.pad)

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        account, cut = self.account, sum(self.account.truncated.values())
        said = f"{cut:,} rows longer than {account.max_seq_length} tokens, cut equally on both sides" if cut else ""
        return said_data(account, account.columns, "pairs" if self.sides == OF_PAIRS else "answers", said)


def prepare_preferences(
    arguments: PreferenceDataArguments,
    preparation: PreparationArguments,
    tokenizer: Any | None,
    *,
    loss: str,
    block_size: int,
    seed: int,
    launch: Launch,
    kept: Any | None = None,
) -> PreferenceData:
    """The preferences of one run, from the cache or made by the rank that leads its node. `block_size` is the length of
    a prompt with its answer in tokens.

    Without `tokenizer`, one is trained on the training text; a resumed run passes its checkpoint's tokenizer as `kept`.
    Raises RequestError for bad data.
    """
    if arguments.chat_template and tokenizer is not None:
        tokenizer.chat_template = read_template(arguments.chat_template)  # so it is saved with the tokenizer
    job = _Job(arguments, preparation, tokenizer, loss == "kto", loss == "reward", block_size, seed)
    made: _Job = prepare_tokens(job, kept, launch, preparation.data_timeout_seconds)
    return made.load()


@dataclass(frozen=True)
class _Job:
    """Everything that determines the rows, and how to make them."""

    arguments: PreferenceDataArguments
    preparation: PreparationArguments
    tokenizer: Any | None
    is_single: bool  # single answers, for KTO
    is_whole: bool  # for a reward model: with what a chat template writes after the answer
    block_size: int
    seed: int

    @cached_property
    def folder(self) -> Path:
        given, known = self.arguments, None if self.tokenizer is None else identity_for_texts(self.tokenizer)
        files = file_states(given.dataset_name, given.train_file, given.validation_file)
        by_content = replace(given, chat_template=None)  # the tokenizer's identity includes the template's content
        more = [known, self.is_single, self.block_size, self.seed, *(["whole"] if self.is_whole else [])]
        return folder_for("preference", FORMAT, files, by_content, self.preparation, more)

    def make(self, folder: Path) -> None:
        """Read, clean, split, tokenize and save."""
        tables, source = open_tables(self.arguments)
        sides, columns, skipped = {}, "", {}
        for split, table in renamed(self.arguments, tables).items():
            sides[split], skipped[split], said = self._sides(split, table)
            columns = columns or said
        sides, note = settled(sides, self.preparation, self.seed)
        twice = notes_of_trained({split: [row.inputs for row in rows] for split, rows in sides.items()})
        notes = [*encoding_notes(self.arguments, SPLITS), note, *twice]
        if self.is_single:
            sides = {split: single(rows, split == "train") for split, rows in sides.items()}
        is_chat = any(row.is_chat for rows in sides.values() for row in rows)
        tokenizer = self.tokenizer or self._train_tokenizer(sides, is_chat)
        if is_chat and not tokenizer.chat_template:
            notes.append(INVENTED.format(end=tokenizer.eos_token or "nothing"))
        if self.tokenizer is not None and tokenizer.chat_template and not is_chat:
            notes.append(UNTEMPLATED.format(rows="prompts and answers", mend="a prompt of turns"))
        truncated, first, rows_of = {}, 0, {}
        remarks: list[list[int]] = []
        for split, rows in sides.items():
            made, truncated[split] = self._encoded(tokenizer, rows, first, remarks)
            rows_of[split], first = len(made), first + len(made)
            made.save_to_disk(str(folder / split))
        if is_chat:
            notes += notes_of([sum(said) for said in zip(*filter(None, remarks), strict=True)], first)
        tokenizer.save_pretrained(str(folder / "tokenizer"))
        said = "" if source.startswith("built-in") else columns
        notes = [note for note in notes if note]
        account: dict[str, Any] = {"source": source, "columns": said, "rows": rows_of, "skipped": skipped}
        account |= {"truncated": truncated, "max_seq_length": self.block_size, "notes": notes, "is_chat": is_chat}
        (folder / "account.json").write_text(json.dumps(account, indent=1))

    def _sides(self, split: str, table: Dataset) -> tuple[list[Sides], int, str]:
        """The rows of a split, the number of bad rows left out, and which columns are read. Raises RequestError."""
        file = getattr(self.arguments, f"{split}_file")
        place = Place.of_file(file) if file else Place(f"the {split} data")
        head = table.select(range(min(HEAD_ROWS, len(table)))).to_list()
        kind, read = find_preferences(table.column_names, head, place.name, self.is_single)
        columns = [*chain.from_iterable(read.values())]
        found, bad = [], {}
        for number, row in enumerate(table.select_columns(columns)):
            try:
                found.append(replace(sides_of(kind, row), number=number))
            except RequestError as error:
                bad[number] = str(error)
        if bad and not self.preparation.skip_bad_rows:
            number, why = next(iter(bad.items()))
            raise RequestError(
                f"{place.of(number)}: {why} There are {len(bad):,} such rows of {len(table):,}. "
                f"{mend_of_bad(len(bad), len(table))}"
            )
        if not found:
            raise RequestError(f"{place.name}: has no usable row. The first: {bad.get(0, 'none')}")
        others = [name for name in table.column_names if name not in columns]
        return found, len(bad), said_columns(read, others)

    def _train_tokenizer(self, sides: Mapping[str, Sequence[Sides]], is_chat: bool) -> Any:
        if is_chat:
            raise RequestError(
                "the data has conversations, which a tokenizer trained from scratch does not support. Give a model's "
                "tokenizer with --model_name_or_path or --tokenizer_name."
            )
        texts = [text for row in sides["train"] for text in (row.prompt, *row.answers)]
        kind, size = self.arguments.tokenizer, self.arguments.bpe_vocab_size
        return train_text_tokenizer(kind, texts, size, self.block_size, with_end=True)

    def _encoded(
        self, tokenizer: Any, rows: Sequence[Sides], first: int, remarks: list[list[int]]
    ) -> tuple[Dataset, int]:
        """A table of token ids, and how many rows were cut; adds each row's remarks to `remarks`. Rows are sorted by
        length, because it saves padding and metrics do not depend on order."""
        template = tokenizer.chat_template if any(row.is_chat for row in rows) else None
        cut_to = []
        for found, said in each_rendered(partial(encoded, tokenizer, whole=self.is_whole), rows, template):
            cut_to.append(fitted(found, self.block_size))
            remarks.append(said)
        names = OF_ANSWERS if self.is_single else OF_PAIRS
        if self.is_single:
            cut_to = with_others(rows, cut_to, self.block_size)
        table: list[dict[str, Any]] = []
        for i in sorted(range(len(rows)), key=lambda i: -max(len(ids) for ids, _ in cut_to[i][0])):
            (one, other), was_cut = cut_to[i]
            table.append({
                f"{names[0]}_ids": one[0], f"{names[0]}_learnt": one[1],
                f"{names[1]}_ids": other[0], f"{names[1]}_learnt": other[1],
                "length": max(len(one[0]), len(other[0])), "margin": rows[i].margin, "label": rows[i].label,
                "row": first + len(table), "was_cut": was_cut,
            })  # fmt: skip
        cut = sum(row.pop("was_cut") for row in table)
        return Dataset.from_list(table), cut

    def load(self) -> PreferenceData:
        found = json.loads((self.folder / "account.json").read_text())
        is_chat = found.pop("is_chat")
        tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(str(self.folder / "tokenizer"))
        if is_chat and not tokenizer.chat_template:
            tokenizer.chat_template = DEFAULT_TEMPLATE  # saved with the model, which was trained with it
        splits = {name: Dataset.load_from_disk(str(self.folder / name)) for name in SPLITS if name in found["rows"]}
        account = PreferenceAccount(**{**found, "notes": tuple(found["notes"])})
        sides = OF_ANSWERS if self.is_single else OF_PAIRS
        return PreferenceData(splits, account, tokenizer, sides, is_chat)
