"""Finds the columns of a table with text and label, with words and tags, or with a text pair: as given by flags, or by
name if unambiguous. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.data.columns import LINE, Columns
from finetune.errors import RequestError, plain
from finetune.run.flags.text import TokenDataArguments
from finetune.run.recipes.seq2seq import PairArguments

LABEL_NAMES = ("label", "labels", "sentiment", "class", "category", "target", "y", "score", "stars", "rating")
SURE_LABEL_NAMES = ("label", "labels")  # taken even if other candidates exist
TEXT_NAMES = ("text", "sentence", "review", "content", "document", "body", "comment", "tweet", "message", "question")
# The layouts of the GLUE tasks (transformers, examples/pytorch/text-classification/run_glue.py) and similar ones.
PAIR_NAMES = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("query", "passage"),
)
OURS = "label"  # our name for the label column, which no text column may have
TOKEN_NAMES, TAG_NAMES = ("tokens", "words"), ("tags", "ner_tags", "labels", "label")
# Layouts of common data sets (transformers, examples/pytorch/summarization/run_summarization.py) and similar ones.
SOURCE_NAMES = (
    *(("source", "target"), ("src", "tgt"), ("input", "output"), ("inputs", "targets"), ("input_text", "target_text")),
    *(("document", "summary"), ("article", "highlights"), ("dialogue", "summary"), ("text", "summary")),
    *(("article", "summary"), ("text", "headline"), ("text", "title"), ("report", "summary"), ("review", "title")),
    *(("question", "answer"), ("code", "docstring"), ("prompt", "completion")),
)
TRANSLATION = "translation"  # a column of objects that hold a text per language
SHOWN, SHOWN_CHARACTERS = 30, 60  # columns listed in an error, and characters of each name
HEAD_ROWS = 200  # rows from which columns are detected


def find_columns(
    head: Sequence[dict[str, Any]], text: Sequence[str] | None, label: str | None, where: str, needs_label: bool = True
) -> Columns:
    """Text and label columns of a table, from its first rows `head`. Columns given by flag are only checked.

    Raises RequestError, listing the columns with a sample value each, if the choice is ambiguous.
    """
    names = list(head[0])
    for wanted, flag in [(name, "text_column_names") for name in text or ()] + [(label, "label_column_name")]:
        if wanted is not None and wanted not in names:
            raise RequestError(f"{where} has no column {wanted!r} (--{flag}). {_describe(head)}")
    if text and len(text) > 2:
        raise RequestError(f"--text_column_names takes one column, or two for pairs, but {len(text)} were given.")
    if label is not None and label in (text or ()):
        raise RequestError(
            f"--text_column_names and --label_column_name are both {label!r}. One column cannot be text and label. "
            f"{_describe(head)}"
        )
    label = label or _find_label(head, set(text or ()))
    if label is None and needs_label and len(names) == 1:
        raise RequestError(
            f"{where}: has one column, {names[0][:30]!r}, and no label. Give a csv, tsv, json or parquet file with a "
            "column of texts and one of labels. (In a txt file, tabs separate columns.)"
        )
    if label is None and needs_label:
        raise RequestError(f"{where}: cannot tell which column is the label. {_describe(head)} {_how_to_say_it(head)}")
    found = tuple(text) if text else _find_text(head, label, where)
    if label is not None and OURS in found:
        raise RequestError(
            f"{where}: the column {OURS!r} would be read as text, and {label!r} as label. Swap them with "
            f"--text_column_names and --label_column_name, or rename {OURS!r}."
        )
    return Columns(found, label, tuple(name for name in names if name not in (*found, label)))


def trained_on(columns: Sequence[str], there: Sequence[str], where: str) -> list[str] | None:
    """The text columns of a trained model; None if it does not say. Raises RequestError if one is not `there`."""
    if lacking := [name for name in columns if name not in there]:
        raise RequestError(
            f"{where} has no column {lacking[0]!r}, which the model was trained on. It has: "
            f"{', '.join(map(plain, there[:SHOWN]))}. Name the texts with --text_column_names."
        )
    return list(columns) or None


def _how_to_say_it(head: Sequence[dict[str, Any]]) -> str:
    hot = [name for name in head[0] if {str(row[name]) for row in head} == {"0", "1"}]
    if len(hot) > 1:
        return f"Name it with --label_column_name or, if each is a label, --label_column_names {' '.join(hot)}."
    if {"tokens", "words"} & {name.lower() for name in head[0]}:
        return "Name it with --label_column_name; words with a tag each are for recipes/token_cls.py."
    return "Name it with --label_column_name."


def _find_label(head: Sequence[dict[str, Any]], taken: set[str]) -> str | None:
    lower = {name.lower(): name for name in head[0] if name not in taken}
    named = [name for name in LABEL_NAMES if name in lower]
    if named and (len(named) == 1 or named[0] in SURE_LABEL_NAMES):
        return lower[named[0]]
    if named:
        return None
    if any(name in lower for name in TEXT_NAMES):
        return None
    # No name helps: take the column whose values recur, if it is the only one and not the only column.
    recurring = [name for name in lower.values() if len({str(row[name]) for row in head}) <= max(2, len(head) // 3)]
    return recurring[0] if len(recurring) == 1 and len(lower) > 1 else None


def _find_text(head: Sequence[dict[str, Any]], label: str | None, where: str) -> tuple[str, ...]:
    names = [name for name in head[0] if name != label]
    lower = {name.lower(): name for name in names}
    for first, second in PAIR_NAMES:
        if first in lower and second in lower:
            return lower[first], lower[second]
    by_name = [lower[name] for name in TEXT_NAMES if name in lower]
    strings = [name for name in names if any(isinstance(row[name], str) for row in head)]
    wordy = [name for name in strings if any(" " in str(row[name] or "").strip() for row in head)]
    for found in (by_name, wordy, strings):
        if len(found) == 1:
            return (found[0],)
    raise RequestError(
        f"{where}: cannot tell which column is the text. {_describe(head)} Name it with --text_column_names."
    )


def _describe(head: Sequence[dict[str, Any]]) -> str:
    columns = list(head[0].items())
    shown = "; ".join(f"{name[:SHOWN_CHARACTERS]} (such as {str(value)[:30]!r})" for name, value in columns[:SHOWN])
    more = f"; and {len(columns) - SHOWN:,} more" if len(columns) > SHOWN else ""
    return f"It has the columns: {shown}{more}."


def find_token_columns(names: Sequence[str], arguments: TokenDataArguments, said: str, is_labelled: bool) -> Columns:
    """Columns of words and tags. Raises RequestError."""
    there = [name for name in names if name != LINE]

    def find(flag: str, given: str | None, names: Sequence[str], needed: bool) -> str | None:
        found = given or next((name for name in names if name in there), None)
        if (found is None and needed) or (found is not None and found not in there):
            is_text = flag == "tokens_column_name" and {*TEXT_NAMES, *SURE_LABEL_NAMES} & {one.lower() for one in there}
            other = " Texts with a label each are for recipes/seq_cls.py." if is_text else ""
            mend = f"Name it with --{flag}."
            if found is None and flag == "tokens_column_name" and {"word", "token"} & {one.lower() for one in there}:
                mend = (
                    "If each row is one word, it needs a column that numbers the sentences, called sentence_id; or "
                    "give CoNLL text, with a word and its tag per line and a blank line after each sentence. If each "
                    f"row has a list of words, name their column with --{flag}."
                )
            raise RequestError(
                f"{said}: has no column {found or ' or '.join(names)!r}; it has {', '.join(there)}. {mend}{other}"
            )
        return found

    tokens = find("tokens_column_name", arguments.tokens_column_name, TOKEN_NAMES, True)
    tags = find("tags_column_name", arguments.tags_column_name, TAG_NAMES, is_labelled)
    return Columns((str(tokens),), tags, tuple(name for name in there if name not in (tokens, tags)))


def find_pair(names: Sequence[str], arguments: PairArguments, said: str, is_labelled: bool) -> Columns:
    """The source and target columns. Raises RequestError."""
    lower = {name.lower(): name for name in names}
    found = [(lower[a], lower[b]) for a, b in SOURCE_NAMES if a in lower and b in lower]
    source, target = arguments.source_column_name, arguments.target_column_name
    likely = [(a, b) for a, b in found if source in (None, a) and target in (None, b)]
    if likely:
        source, target = likely[0]
    elif not is_labelled and source is None:
        source = next((lower[a] for a, _ in SOURCE_NAMES if a in lower), None)
    for flag, name in (("source", source), ("target", target)):
        if (name is None and (flag == "source" or is_labelled)) or (name is not None and name not in names):
            other = " Conversations are for recipes/causal_lm.py." if "messages" in lower else ""
            other += " Preferences are for recipes/preference.py." if "chosen" in lower else ""
            what = f"no column {name!r}" if name else f"no two columns with known names to find the {flag}"
            raise RequestError(
                f"{said}: has {what}; it has {', '.join(map(plain, names))}. Name it with --{flag}_column_name.{other}"
            )
    if source == target:
        raise RequestError(f"{said}: {source!r} cannot be source and target. Choose another with --target_column_name.")
    return Columns((str(source),), target, tuple(name for name in names if name not in (source, target)))
