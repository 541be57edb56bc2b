"""Extractive question answering, from SQuAD or Python's standard library, tokenized into overlapping windows."""

from __future__ import annotations

import ast
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from finetune.data.builtin import by_package
from finetune.data.classification import ClassificationData, Kind, Rows, prepare
from finetune.data.column_names import said_mapping
from finetune.data.columns import Columns, Labels, is_empty, said_data
from finetune.data.files import open_file
from finetune.data.row_answers import (
    ANSWERS,
    START,
    answers_of,
    column_of_answers,
    fault_of,
    has_answer,
    note_of_texts,
)
from finetune.data.splits import hold_out_by, open_splits, refuse_bad_rows, renamed, said_split
from finetune.data.tables import ROW, CleanTables, Table, settle_splits
from finetune.data.tokenizer import train_wordpiece
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.question_answering import QuestionDataArguments

QUESTION, CONTEXT, ID = "question", "context", "id"
TEXTS, STARTS = "answer_texts", "answer_starts"  # of a cleaned row; starts are in characters
NULL = "null"  # the position in a window of the token that stands for "no answer"
FIRST, LAST = "first_characters", "last_characters"  # of a window's tokens; -1 outside the context
SPANS = Labels("question_answering", ())
MOST_STRIDE, LEAST_NEW = 128, 8  # tokens: the largest default stride, and the fewest new tokens of a window
LONGEST_FUNCTION, LONGEST_ANSWER, MOST_LINES, MOST_ASKED = 400, 60, 40, 2  # characters, characters, lines, questions
BUILT_IN = "built-in questions about functions of Python's standard library, held out by package"


@dataclass(frozen=True)
class QuestionData(ClassificationData):
    """Windows: columns `input_ids`, `length` and, if answers are known, `labels`: the answer's first and last token
    (both `null` if it is not in the window) and `length`. Held-out and test windows keep question and context."""

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        cut = sum(self.account.truncated.values())
        said = f"the question of {cut:,} windows cut" if cut else ""
        return said_data(self.account, self.columns, "windows", said)

    @property
    def collator(self) -> Any:
        """Pads windows on the right, whatever the tokenizer's padding side."""
        return partial(collate, self.tokenizer)


def prepare_questions(arguments: QuestionDataArguments, *rest: Any, max_seq_length: int, **more: Any) -> QuestionData:
    """As `finetune.data.classification.prepare`."""
    stride = arguments.doc_stride or min(MOST_STRIDE, max_seq_length // 3)
    settled = QuestionDataArguments(**{**vars(arguments), "doc_stride": stride})
    kind = Kind(
        name="question_answering",
        read=load_questions,
        clean=clean_questions,
        encode=partial(encode_windows, stride),
        texts=lambda clean: (text for name in (QUESTION, CONTEXT) for text in clean.splits["train"][name]),
        data=QuestionData,
        train=partial(train_wordpiece, lowercase=False),
    )
    return prepare(settled, *rest, max_seq_length=max_seq_length, kind=kind, **more)


def load_questions(arguments: QuestionDataArguments) -> tuple[Table, str]:
    """The raw splits given, one row per question, and a line that says where they come from. Raises RequestError."""
    return open_splits(
        arguments,
        lambda: {name: Dataset.from_list(rows) for name, rows in function_questions().items()},
        BUILT_IN,
        lambda split, name: _flat(open_file(f"{split}_file", name, encoding=arguments.encoding)),
    )


def _flat(table: Dataset) -> Dataset:
    """Flattens SQuAD's own JSON: `data` holds articles, these paragraphs, these questions; or `data` is flat."""
    if "data" not in table.column_names or QUESTION in table.column_names:
        return table
    articles = [*chain.from_iterable(found or () for found in table["data"])]
    if not any("paragraphs" in article for article in articles):
        return Dataset.from_list(articles)
    return Dataset.from_list([
        {ID: one.get(ID), QUESTION: one.get(QUESTION), CONTEXT: paragraph.get(CONTEXT),
         ANSWERS: [] if one.get("is_impossible") else one.get(ANSWERS)}
        for article in articles for paragraph in article.get("paragraphs") or () for one in paragraph.get("qas") or ()
    ])  # fmt: skip


def clean_questions(
    tables: Table,
    arguments: QuestionDataArguments,
    cut: PreparationArguments,
    seed: int,
    known: Any = None,
    trained: Any = None,
) -> CleanTables:
    """Rows of `question`, `context` and, if known, the answers. Raises RequestError."""
    cleaned, skipped = Table(), {}
    others, located = tuple[str, ...](), ""
    for split, table in renamed(arguments, tables).items():
        said = said_split(arguments, split)
        wanted = (QUESTION, CONTEXT, *(() if split == "test" else (ANSWERS,)))
        _refuse_missing([name for name in wanted if name not in table.column_names], table.column_names, said)
        given = table.to_list()
        rows, bad = _checked(given, said, split, arguments.version_2_with_negative)
        located = located or note_of_texts(given)
        read = (*wanted, ID, ANSWERS, *((START,) if any(isinstance(row.get(ANSWERS), str) for row in given) else ()))
        others = others or tuple(sorted(set(table.column_names).difference(read)))
        why = f"rows that are bad: {bad[0][1]}" if bad else ""
        refuse_bad_rows(said, [number for number, _ in bad], len(table), why, cut.skip_bad_rows)
        if not rows:
            raise RequestError(f"{said}: has no good row.")
        cleaned[split], skipped[split] = Dataset.from_list(rows), len(bad)
    said, fraction = said_split(arguments, "train"), cut.validation_fraction
    cleaned, note = settle_splits(
        cleaned, cut, seed, lambda train: hold_out_by(train[CONTEXT][:], fraction, seed, said, "contexts")
    )
    notes = [note, located]
    for split, table in cleaned.items():
        if TEXTS in table.column_names and (none := sum(not texts for texts in table[TEXTS])):
            notes.append(f"{none:,} of {len(table):,} {split} questions have no answer")
    cleaned |= {"train": cleaned["train"].remove_columns(ID)} if "train" in cleaned else {}
    columns = Columns((QUESTION, CONTEXT), ANSWERS, others)
    return CleanTables(cleaned, columns, SPANS, skipped, tuple(filter(None, notes)))


def _refuse_missing(missing: Sequence[str], there: Sequence[str], said: str) -> None:
    old = column_of_answers(there) if [*missing] == [ANSWERS] else None
    more = f" Texts without a column {START} are located, if the context has each once." if old else ""
    if missing:
        raise RequestError(
            f"{said}: has no column {missing[0]!r}; it has {', '.join(there)}. Rename one with "
            f"{said_mapping({old or 'OLD': missing[0]})}.{more}"
        )


def _checked(
    rows: Sequence[Mapping[str, Any]], said: str, split: str, takes_none: bool
) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Returns the good rows, and the number and fault of each bad one."""
    good, bad = list[dict[str, Any]](), list[tuple[int, str]]()
    is_known = split != "test" or any(has_answer(row.get(ANSWERS)) for row in rows)
    for i, row in enumerate(rows):
        found, why = answers_of(row if is_known else {**row, ANSWERS: None}, said)
        if is_empty(row[QUESTION]) or is_empty(row[CONTEXT]):
            why = "a question or a context is empty"
        elif is_known and found and not found[0] and not takes_none:
            raise RequestError(
                f"{said}: row {i + 1} has no answer. If that is intended, as in SQuAD 2, add --version_2_with_negative "
                "True."
            )
        if (why := why or fault_of(row[CONTEXT], found or ([], []))) or not found:
            bad.append((i, why))
            continue
        known = {TEXTS: found[0], STARTS: found[1]} if is_known else {}
        name = str(i if is_empty(row.get(ID)) else row[ID])
        good.append({QUESTION: str(row[QUESTION]).strip(), CONTEXT: str(row[CONTEXT]), ROW: i, ID: name, **known})
    return good, bad


def encode_windows(stride: int, tokenizer: Any, columns: Columns, max_length: int, rows: Rows) -> dict[str, list[Any]]:
    """Windows of at most `max_length` tokens: the question and a part of the context that shares `stride` tokens with
    the next window. A question that is too long is cut. Raises RequestError if windows have no room for a question."""
    special = tokenizer.num_special_tokens_to_add(pair=True)
    most = max_length - special - stride - LEAST_NEW  # tokens of a question
    if most < LEAST_NEW:
        raise RequestError(
            f"--doc_stride {stride}: windows of {max_length} tokens (--max_seq_length) have no room for a question, "
            f"the stride and {LEAST_NEW} new tokens. Give at most {max_length - special - 2 * LEAST_NEW}."
        )
    given = rows[QUESTION]
    spans = tokenizer(given, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    asked = [text[: at[most - 1][1]] if len(at) > most else text for text, at in zip(given, spans, strict=True)]
    found = tokenizer(
        asked,
        rows[CONTEXT],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    of = found.pop("overflow_to_sample_mapping")
    sides = [np.asarray([side == 1 for side in found.sequence_ids(i)])[:, None] for i in range(len(of))]
    pairs = found.pop("offset_mapping")
    offsets = [np.where(side, np.asarray(one), -1).T for side, one in zip(sides, pairs, strict=True)]
    made: dict[str, list[Any]] = {**found, "length": [len(ids) for ids in found["input_ids"]]}
    made["truncated"] = [asked[i] != given[i] for i in of]
    null = tokenizer.cls_token_id
    nulls = [ids.index(null) if null in ids else 0 for ids in made["input_ids"]]
    if TEXTS in rows:
        answers = [(rows[TEXTS][i][0], rows[STARTS][i][0]) if rows[TEXTS][i] else ("", -1) for i in of]
        made["labels"] = [
            [*_span(answer, firsts, lasts, place), length]
            for answer, (firsts, lasts), place, length in zip(answers, offsets, nulls, made["length"], strict=True)
        ]
    if ID in rows:
        made |= {name: [rows[name][i] for i in of] for name in (ROW, ID, QUESTION, CONTEXT, TEXTS) if name in rows}
        made |= {
            NULL: nulls,
            **{name: [one[i].tolist() for one in offsets] for i, name in enumerate((FIRST, LAST))},
        }
    return made


def _span(answer: tuple[str, int], firsts: Any, lasts: Any, null: int) -> tuple[int, int]:
    """The first and last token of the answer; `null` twice if the window does not contain all of it."""
    text, start = answer
    start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    begins = np.flatnonzero((firsts >= 0) & (firsts <= start) & (lasts > start))
    ends = np.flatnonzero((firsts >= 0) & (firsts < end) & (lasts >= end))
    return (int(begins[0]), int(ends[-1])) if len(begins) and len(ends) else (null, null)


def collate(tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` (B, T), `token_type_ids` if the model uses them, and `labels` (B, 3)."""
    read = [{name: row[name] for name in ("input_ids", "token_type_ids") if name in row} for row in rows]
    batch = dict(pad_without_fast_tokenizer_warning(tokenizer, read, padding_side="right", return_tensors="pt"))
    return batch | ({"labels": torch.tensor([row["labels"] for row in rows])} if "labels" in rows[0] else {})


def function_questions() -> dict[str, list[dict[str, Any]]]:
    """Rows of the splits `train` and `validation`, which share no package and no function. Nothing is imported."""
    return {split: [*chain(*found.values())] for split, found in by_package(_asked).items()}


def _asked(tree: ast.Module) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Questions about short functions, without docstring and decorators, that exactly one place answers."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or (node.end_lineno or 0) - node.lineno > MOST_LINES:
            continue
        node.decorator_list, body = [], node.body
        node.body = body[1:] if ast.get_docstring(node) and body[1:] else body
        text = ast.unparse(node)
        if len(text) <= LONGEST_FUNCTION and text.isascii() and (rows := _rows(text)):
            yield text, rows


def _rows(text: str) -> list[dict[str, Any]]:
    begins = [0, *np.cumsum([len(line) + 1 for line in text.split("\n")]).tolist()]
    asked: dict[str, list[tuple[int, int]]] = {}
    for question, node in _places(ast.parse(text).body[0]):
        ends = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        start, end = (begins[line - 1] + column for line, column in ends)
        asked.setdefault(question, []).append((start, end))
    rows = [
        {QUESTION: question, CONTEXT: text, ANSWERS: {"text": [text[start:end]], "answer_start": [start]}}
        for question, [(start, end), *more] in asked.items()
        if not more and end - start <= LONGEST_ANSWER
    ]
    return sorted(rows, key=lambda row: zlib.crc32(f"{row[QUESTION]}{text}".encode()))[:MOST_ASKED]


def _places(function: Any) -> Iterator[tuple[str, ast.expr]]:
    """Questions and the nodes that answer them."""
    arguments, name = function.args, function.name
    for argument, default in zip(arguments.args[::-1], arguments.defaults[::-1], strict=False):
        yield f"What is the default of {argument.arg}?", default
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value:
            yield f"What does {name} return?", node.value
        elif isinstance(node, ast.Raise) and node.exc:
            yield f"What does {name} raise?", node.exc
        elif isinstance(node, ast.For):
            yield f"What does {ast.unparse(node.target)} run over?", node.iter
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield f"What is {node.targets[0].id} set to?", node.value
