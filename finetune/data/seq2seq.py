"""Source and target texts for text-to-text models: tables with two columns, or functions of Python's standard library
and the first lines of their docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import processors

from finetune.data.builtin import by_package
from finetune.data.classification import ClassificationData, Kind, Rows, prepare
from finetune.data.columns import Columns, Labels, is_empty, said_columns, said_data
from finetune.data.find_columns import TRANSLATION, find_pair
from finetune.data.splits import open_splits, refuse_bad_rows
from finetune.data.tables import ROW, CleanTables, Table, hold_out, settle_splits
from finetune.data.tokenizer import cut_to, has_languages, ready, train_bpe
from finetune.errors import RequestError, plain
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.seq2seq import PairArguments

SOURCE, TARGET = "source", "target"
PAIRS = Labels("text_to_text", ())
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # as in T5, in this order
LEAST_LINE, MOST_BODY = 12, 4_000  # characters
BUILT_IN = "built-in functions of Python's standard library, to the first line of their docstring, held out by package"


@dataclass(frozen=True)
class PairData(ClassificationData):
    """Columns `input_ids`, `labels`, and `length`, the sum of both lengths; also the texts themselves."""

    def cut(self, split: str) -> dict[str, int]:
        """How many sources and targets of a split were truncated."""
        return {side: int(np.sum(self.splits[split][f"{side}_cut"])) for side in (SOURCE, TARGET)}

    @property
    def columns(self) -> str:
        """Which columns are read, and which are ignored; empty for the built-in data."""
        found = self.account.columns
        read = {SOURCE: found.text, TARGET: (found.label,) if found.label else ()}
        return "" if self.account.source == BUILT_IN else said_columns(read, found.others)

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        cut = [self.cut(split) for split in self.splits]
        counts = {side: sum(one[side] for one in cut) for side in (SOURCE, TARGET)}
        said = [f"{n:,} {side}s cut to --max_{side}_length" for side, n in counts.items() if n]
        return said_data(self.account, self.columns, "pairs", *said)


def prepare_pairs(
    arguments: PairArguments, *rest: Any, prefix: str, max_source_length: int, max_target_length: int, **more: Any
) -> PairData:
    """As `finetune.data.classification.prepare`; lengths are in tokens, including the prefix and the end of text."""
    lengths = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    settled = PairArguments(**{**vars(arguments), **lengths, "source_prefix": prefix})
    _, tokenizer, *_ = rest
    kind = Kind(
        name="seq2seq",
        read=load_pairs,
        clean=partial(clean_pairs, has_languages=has_languages(tokenizer)),
        encode=partial(encode_pairs, settled),
        texts=lambda clean: (text for name in (SOURCE, TARGET) for text in clean.splits["train"][name]),
        inputs=lambda clean: (SOURCE,),
        kept=(SOURCE, TARGET, ROW),
        data=PairData,
        train=train_tokenizer,
    )
    return prepare(settled, *rest, max_seq_length=max_source_length, kind=kind, **more)


def load_pairs(arguments: PairArguments) -> tuple[Table, str]:
    """The raw splits given, and a line that says where they come from. Raises RequestError."""
    return open_splits(
        arguments, lambda: {name: Dataset.from_dict(rows) for name, rows in function_rows().items()}, BUILT_IN
    )


def clean_pairs(
    tables: Table,
    arguments: PairArguments,
    cut: PreparationArguments,
    seed: int,
    known: Any = None,
    trained: Any = None,
    has_languages: bool = False,
) -> CleanTables:
    """Columns `source` and `target`; a test split may lack `target`. `has_languages`: the model's tokenizer has
    language codes. Raises RequestError."""
    if not has_languages:
        _refuse_unread_languages(tables, arguments)
    tables = {split: _of_languages(table, arguments, split) for split, table in tables.items()}
    first = "train" if "train" in tables else next(iter(tables))
    columns = find_pair(tables[first].column_names, arguments, f"the {first} data", first != "test")
    cleaned, skipped, notes = {}, {}, []
    for split, table in tables.items():
        cleaned[split], skipped[split] = _without_bad_rows(table, columns, split, cut.skip_bad_rows)
    if alike := sum(a.strip() == b.strip() for a, b in _pairs(cleaned.get("train"))):
        notes.append(f"{alike:,} training pairs have the same text on both sides")
    mend, fraction = "Add --validation_file.", cut.validation_fraction
    cleaned, note = settle_splits(
        cleaned, cut, seed, lambda train: hold_out(np.zeros(len(train)), 0, fraction, seed, mend)
    )
    return CleanTables(cleaned, columns, PAIRS, skipped, tuple(filter(None, (*notes, note))))


def _pairs(table: Dataset | None) -> Iterator[tuple[str, str]]:
    return iter(()) if table is None else zip(table[SOURCE], table[TARGET], strict=True)


def _of_languages(table: Dataset, arguments: PairArguments, split: str) -> Dataset:
    """Splits a `translation` column, an object with a text per language, into a source and a target column."""
    if TRANSLATION not in table.column_names or arguments.source_column_name or arguments.target_column_name:
        return table
    there = list(getattr(table.features[TRANSLATION], "keys", list)())
    said = [lang or "" for lang in (arguments.source_lang, arguments.target_lang)]
    asked = [lang if lang in there else lang.split("_")[0] for lang in said]  # en for the model's en_XX
    if not all(lang in there for lang in asked):
        raise RequestError(
            f"the {split} data has translations of {', '.join(map(plain, there)) or 'no languages'}. Name the language "
            "to read and the one to write with --source_lang and --target_lang."
        )
    rows = table[TRANSLATION][:]
    return Dataset.from_dict(
        {name: [row[lang] for row in rows] for name, lang in zip((SOURCE, TARGET), asked, strict=True)}
    )


def _refuse_unread_languages(tables: Table, arguments: PairArguments) -> None:
    """Raises RequestError if --source_lang or --target_lang would have no effect."""
    asked = [f"--{name}" for name in ("source_lang", "target_lang") if getattr(arguments, name)]
    by_name = arguments.source_column_name or arguments.target_column_name
    if asked and (by_name or not any(TRANSLATION in table.column_names for table in tables.values())):
        data = "columns are chosen by name" if by_name else f"the data has no column {TRANSLATION!r}"
        raise RequestError(
            f"{' and '.join(asked)}: has no effect, because {data}, and the model's tokenizer has no language codes. "
            "Drop it; --source_prefix tells a T5 what to do."
        )


def _without_bad_rows(table: Dataset, columns: Columns, split: str, skip: bool) -> tuple[Dataset, int]:
    """`source` and `target` as text. Pairs with an empty side are refused, or left out with `skip`; a test split may
    have no targets."""
    wanted = {SOURCE: columns.text[0], TARGET: str(columns.label)}
    if missing := [name for name in wanted.values() if name not in table.column_names and (split != "test")]:
        raise RequestError(f"the {split} data has no column {missing[0]!r}. It has: {', '.join(table.column_names)}.")
    found = {name: table[column][:] for name, column in wanted.items() if column in table.column_names}
    if split == "test" and all(map(is_empty, found.get(TARGET, ()))):
        found.pop(TARGET, None)
    for name, values in found.items():
        if wrong := next((i for i, one in enumerate(values) if isinstance(one, list | dict)), None):
            raise RequestError(
                f"the {split} data, row {wrong + 1}: {name} is not text, but {type(values[wrong]).__name__}."
            )
    bad = np.array([any(map(is_empty, row)) for row in zip(*found.values(), strict=True)])
    refuse_bad_rows(f"the {split} data", np.flatnonzero(bad).tolist(), len(table), "pairs with an empty side", skip)
    if (count := int(bad.sum())) == len(table):
        raise RequestError(f"the {split} data has no pair with text on both sides. Check the column names.")
    kept = np.flatnonzero(~bad).tolist()
    texts = {name: [str(values[i]) for i in kept] for name, values in found.items()}
    return Dataset.from_dict(texts | ({ROW: kept} if split == "test" else {})), count


def encode_pairs(
    arguments: PairArguments, tokenizer: Any, columns: Columns, max_length: int, rows: Rows
) -> dict[str, list[Any]]:
    """Encodes prefixed sources and, as `labels`, targets, each truncated to its length. A test row without a target
    gets just the end token, which is not evaluated."""
    most, prefix = int(arguments.max_target_length or 0), arguments.source_prefix or ""
    end = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    sources, source_cut = cut_to(tokenizer, max_length, text=[prefix + text for text in rows[SOURCE]])
    ids = sources["input_ids"]
    targets, target_cut = cut_to(tokenizer, most, text_target=rows.get(TARGET, [""] * len(ids)))
    # Not every tokenizer adds the end, and BART cannot shift an empty row.
    written = [one or [end] for one in targets["input_ids"]]
    return {
        "input_ids": ids,
        "labels": written,
        "length": [len(a) + len(b) for a, b in zip(ids, written, strict=True)],
        "source_cut": source_cut,
        "target_cut": target_cut,
        "truncated": [a or b for a, b in zip(source_cut, target_cut, strict=True)],
    }


def train_tokenizer(texts: Iterator[str], vocab_size: int, max_length: int) -> Any:
    """A lossless byte-level BPE, with an end-of-text token after each text as in T5."""
    tokenizer = train_bpe(texts, vocab_size, [PAD, END, UNKNOWN])
    ends = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=ends)
    known = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    return ready(tokenizer, max_length, clean_up_tokenization_spaces=False, **known)


def function_rows() -> dict[str, dict[str, list[str]]]:
    """Columns `source` (a function's source code without its docstring) and `target` (the docstring's first line) of
    the splits `train` and `validation`, which share no package, function or line. Sources are parsed, never
    imported."""
    splits = by_package(_functions)
    lines = {*splits["validation"], *splits["validation"].values()}
    splits["train"] = {source: line for source, line in splits["train"].items() if line not in lines}
    return {split: {SOURCE: list(found), TARGET: list(found.values())} for split, found in splits.items()}


def _functions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        line = (ast.get_docstring(node) or "").strip().split("\n")[0].strip()
        if len(line) >= LEAST_LINE:
            node.body, node.decorator_list = node.body[1:], []
            yield ast.unparse(node)[:MOST_BODY], line
