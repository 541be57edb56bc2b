"""Sentences with tagged words, from CoNLL text or tables with `tokens` and `tags`.

Tags in any scheme (IOB1, BIO, BILOU or BIOES, or plain types) are converted to BIO, which `pipeline` groups into
entities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, List, Value

from finetune.data.charset import UTF8, as_utf8
from finetune.data.classification import ClassificationData, Kind
from finetune.data.columns import LINE, TOKENS, Columns, Labels, listed, names_of_ids
from finetune.data.files import open_file
from finetune.data.find_columns import find_token_columns
from finetune.data.list_text import are_lists, is_text, lists_of_text, note_of_lists
from finetune.data.odd_labels import note_of_slips
from finetune.data.python_names import name_rows
from finetune.data.splits import HeldOut, hold_out_by, mend_of_bad, open_splits, said_split
from finetune.data.tables import ROW, CleanTables, Table, settle_splits
from finetune.data.tag_ids import check_tag_names, note_of_unused, tags_of_ids
from finetune.data.tag_schemes import (
    OUTSIDE,
    PARSED,
    find_scheme,
    not_named,
    read_conll,
    refuse_untagged,
    spelt_alike,
    to_bio,
)
from finetune.data.tokenizer import train_wordpiece
from finetune.data.word_rows import are_words, find_word_columns, joined
from finetune.data.word_tokens import COUNTED, ENTITY, WORDS, encode_words, numbered_entities, remarks_on_words
from finetune.errors import RequestError, plain
from finetune.run.flags.text import PreparationArguments, TokenDataArguments
from finetune.safe_read.files import open_plain

SHOWN, SHOWN_CHARACTERS = 5, 40


def load_sentences(arguments: TokenDataArguments) -> tuple[Table, str]:
    """The raw splits given, and a line that says where they come from. Raises RequestError."""
    return open_splits(
        arguments,
        lambda: {name: Dataset.from_dict(rows) for name, rows in name_rows().items()},
        "built-in names in the source of Python's standard library, held out by module",
        lambda split, name: _open(split, name, arguments.encoding),
    )


def _open(split: str, name: str, encoding: str | None) -> Dataset:
    flag, path = f"{split}_file", Path(name).expanduser()
    if path.suffix.lower() in PARSED or not path.is_file():
        return open_file(flag, name, encoding=encoding)
    open_plain(path, name=f"--{flag} {name}").close()
    rows = list(read_conll(as_utf8(flag, name, encoding), f"--{flag} {name}"))
    if not rows:
        raise RequestError(f"--{split}_file {name}: the file has no sentences.")
    columns = {"tokens": [words for words, _, _ in rows], LINE: [line for _, _, line in rows]}
    return Dataset.from_dict(columns if rows[0][1] is None else {**columns, "tags": [tags for _, tags, _ in rows]})


def _places(table: Dataset, rows: Sequence[int], arguments: TokenDataArguments, split: str) -> str:
    """Where some rows are in their file, for an error message."""
    name = getattr(arguments, f"{split}_file") or ""
    lines: list[int] = table[LINE][:] if LINE in table.column_names else []
    if name.lower().endswith((".json", ".jsonl")):
        with as_utf8(f"{split}_file", name, arguments.encoding).open(encoding=UTF8, errors="replace") as file:
            lines = [number for number, line in enumerate(file, 1) if line.strip()]
    if len(lines) == len(table):  # not so for a JSON list of objects
        return f"line {', '.join(str(lines[i]) for i in rows)}"
    return f"counted from 1: {', '.join(str(i + 1) for i in rows)}"


def clean_sentences(
    tables: Table,
    arguments: TokenDataArguments,
    cut: PreparationArguments,
    seed: int,
    known: Any = None,
    trained: Labels | None = None,
) -> CleanTables:
    """Columns `tokens` and, if labeled, `label` with the ids of BIO tags. Raises RequestError."""
    if "train" not in tables and trained is None:
        raise RequestError(
            "there is no training data to learn the tags from. Give --train_file. To evaluate or predict only, give "
            "--do_train False and --model_name_or_path with a trained model."
        )
    check_tag_names(arguments.tag_names or ())
    first = "train" if "train" in tables else next(iter(tables))
    if tables[first].column_names == ["tokens", LINE] and first != "test":
        refuse_untagged([word for row in tables[first]["tokens"][:SHOWN] for word in row], said_split(arguments, first))
    tables, arguments, notes = _joined(tables, arguments)
    columns = find_token_columns(tables[first].column_names, arguments, said_split(arguments, first), first != "test")
    cleaned, skipped = {}, {}
    for split, table in tables.items():
        cleaned[split], skipped[split] = _without_bad_rows(table, columns, split, arguments, cut.skip_bad_rows)
    tags = {split: table["tags"][:] for split, table in cleaned.items() if "tags" in table.column_names}
    said = " and ".join(said_split(arguments, split) for split in tags)
    if arguments.tag_names:
        notes.append(note_of_unused(arguments.tag_names, chain(*tags.values())))
    every, spelt = spelt_alike([row for rows in tags.values() for row in rows], said)
    scheme, note = find_scheme(every, said)
    found = iter(every)
    bio = {split: [to_bio(next(found), scheme) for _ in rows] for split, rows in tags.items()}
    labels = _labels(bio.get("train", []), trained, said_split(arguments, "train"))
    for split, rows in bio.items():
        ids = _ids(rows, labels, said_split(arguments, split))
        cleaned[split] = cleaned[split].remove_columns("tags").add_column("label", ids)
        cleaned[split] = cleaned[split].add_column(ENTITY, [numbered_entities(row) for row in rows])
    notes += [*(note_of_lists(tables[first], name) for name in (*columns.text, str(columns.label))), spelt, note]
    kinds = Counter(tag[2:] for row in bio.get("train", ()) for tag in row if tag != OUTSIDE)
    notes.append(note_of_slips(kinds, "entities"))

    def held_out(train: Dataset) -> HeldOut:
        said = said_split(arguments, "train")
        if len(tables["train"]) == 1 and LINE in tables["train"].column_names:
            said += ": is a single sentence, because no blank line ends one"
        return hold_out_by(
            [tuple(words) for words in train["tokens"][:]], cut.validation_fraction, seed, said, "sentences"
        )

    cleaned, note = settle_splits(cleaned, cut, seed, held_out)
    return CleanTables(cleaned, columns, labels, skipped, tuple(filter(None, (*notes, note))))


def _joined(tables: Table, arguments: TokenDataArguments) -> tuple[Table, TokenDataArguments, list[str]]:
    """The tables with a row per sentence; the arguments, which name the columns of a first one that had a row per word;
    and notes of those joined."""
    made, notes = Table(), list[str]()
    for split, table in tables.items():
        columns = find_word_columns(table.column_names, arguments)
        cells = table[columns.word][:] if columns and is_text(table, columns.word) else []
        if columns and are_words(cells) and not are_lists(cells):
            rows, words = joined(table.to_dict(), columns.sentence), len(table)
            table = Dataset.from_dict(rows, Features({name: List(table.features[name]) for name in rows}))
            if not made:  # all splits are read by the columns of the first one
                tag = columns.tag or arguments.tags_column_name
                arguments = replace(arguments, tokens_column_name=columns.word, tags_column_name=tag)
            count = f"{words:,} {split} rows of one word each are joined into {len(table):,} sentences"
            notes.append(f"{count} by {columns.sentence!r}")
        made[split] = table
    return made, arguments, notes


def _without_bad_rows(
    table: Dataset, columns: Columns, split: str, arguments: TokenDataArguments, skip: bool
) -> tuple[Dataset, int]:
    """Columns `tokens` and, if labeled, `tags` as names. A row without words, with an empty word or tag, or with a
    different number of tags is refused or left out."""
    said = said_split(arguments, split)
    if columns.text[0] not in table.column_names:
        raise RequestError(
            f"{said}: has no column {columns.text[0]!r}, as the other data has; it has "
            f"{', '.join(table.column_names)}. Name it alike in all files."
        )
    for column in filter(None, (columns.text[0], columns.label)):
        table = lists_of_text(table, column, said)
    words = table[columns.text[0]][:]
    if not _holds_texts(table, columns.text[0]):
        raise RequestError(
            f"{said}: {columns.text[0]!r} holds no lists of words{_such_as(words)}. Give one list per row, CoNLL text "
            "(a word and its tag per line), or one word per row beside a column sentence_id. Whole texts are for "
            "recipes/seq_cls.py."
        )
    tags = _named(table, columns, split, arguments) if columns.label in table.column_names else None
    if split == "test" and tags is not None and not any(tags):
        tags = None
    if tags is None and split != "test":
        raise RequestError(f"{said}: has no column {columns.label!r}. Give a tag for each word.")
    good = [
        i for i, row in enumerate(words)
        if row and all(word and word.strip() for word in row)
        and (tags is None or (len(tags[i] or ()) == len(row) and all(tags[i] or ())))
    ]  # fmt: skip
    bad = len(words) - len(good)
    if bad and not skip:
        rows = sorted(set(range(len(words))) - set(good))[:SHOWN]
        raise RequestError(
            f"{said}: has {bad:,} of {len(words):,} sentences without words, with an empty word or tag, or with "
            f"a different number of tags ({_places(table, rows, arguments, split)}). {mend_of_bad(bad, len(words))}"
        )
    if not good:
        raise RequestError(f"{said}: has no sentence with a tag for each word. Check the column names.")
    content: dict[str, Any] = {"tokens": [[str(word).strip() for word in words[i]] for i in good]}
    features: dict[str, Any] = {"tokens": List(Value("string"))}
    if split == "test":
        content |= {WORDS: content["tokens"], ROW: good}
        features |= {WORDS: List(Value("string")), ROW: Value("int64")}
    if tags is not None:
        content["tags"], features["tags"] = [tags[i] for i in good], List(Value("string"))
    return Dataset.from_dict(content, Features(features)), bad


def _holds_texts(table: Dataset, column: str) -> bool:
    """Whether the column holds lists of texts, or only empty lists."""
    inside = getattr(table.features[column], "feature", None)
    return isinstance(inside, Value) and ("string" in inside.dtype or inside.dtype == "null")


def _such_as(rows: Sequence[Any]) -> str:
    first = next((row for row in rows if row is not None), None)
    return "" if first is None else f", but {plain(str(first)[:SHOWN_CHARACTERS])}"


def _named(table: Dataset, columns: Columns, split: str, arguments: TokenDataArguments) -> Sequence[list[str] | None]:
    label, said, names = str(columns.label), said_split(arguments, split), arguments.tag_names
    inside, rows = getattr(table.features[label], "feature", None), table[label][:]
    if isinstance(inside, ClassLabel):
        if names and names != inside.names:
            own = listed(inside.names)
            raise RequestError(f"{said}: {label!r} names its ids itself ({own}), and not as --tag_names does. Drop it.")
        return [names_of_ids(row, inside.names, f"{split} data, row {i + 1}") for i, row in enumerate(rows)]
    if names and inside is not None:
        return tags_of_ids(rows, names, said, label)
    if _holds_texts(table, label):
        return [row and [(tag or "").strip() for tag in row] for row in rows]
    if not any(rows):
        return [None] * len(rows)
    what = "lists of tags" if inside is None else "names of tags"
    raise not_named(said, label, what, _such_as(rows))


def _labels(train: Sequence[Sequence[str]], trained: Labels | None, said: str) -> Labels:
    found = {tag for row in train for tag in row}
    if trained and found <= set(trained.names):
        return Labels(TOKENS, trained.names)
    kinds = sorted({tag[2:] for tag in found if tag != OUTSIDE})
    if not kinds:
        raise RequestError(f"{said}: every word is tagged O, so there is no entity to learn. Check the tags.")
    return Labels(TOKENS, (OUTSIDE, *(prefix + kind for kind in kinds for prefix in ("B-", "I-"))))


def _ids(rows: Sequence[Sequence[str]], labels: Labels, said: str) -> list[list[int]]:
    unknown = Counter(tag[2:] for row in rows for tag in row if tag not in labels.ids)
    if unknown:
        shown = ", ".join(f"{name!r} ({count} words)" for name, count in unknown.most_common(SHOWN))
        raise RequestError(
            f"{said}: has entities that are not in the training data: {shown}. Check that both use the same names."
        )
    return [[labels.ids[tag] for tag in row] for row in rows]


def _tag_counts(tables: Table, labels: Labels) -> dict[str, int]:
    """The number of training words with each tag."""
    counts = Counter(i for row in (tables["train"]["labels"][:] if "train" in tables else ()) for i in row)
    return {name: counts[i] for i, name in enumerate(labels.names) if counts[i]}


SENTENCES = Kind(
    name=TOKENS,
    read=load_sentences,
    clean=clean_sentences,
    encode=encode_words,
    texts=lambda clean: (" ".join(words) for words in clean.splits["train"]["tokens"]),
    inputs=lambda clean: ("tokens",),
    count=_tag_counts,
    kept=(ROW, WORDS),
    counted=COUNTED,
    remarks=remarks_on_words,
    data=ClassificationData,
    train=partial(train_wordpiece, lowercase=False),  # capital letters mark names
)
