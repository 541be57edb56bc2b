"""Tables with one word per row, and a column that says to which sentence it belongs, as Kaggle's NER data has them.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from finetune.data.columns import is_empty
from finetune.run.flags.text import TokenDataArguments

WORD_NAMES, TAG_NAMES = ("word", "token", "words", "tokens"), ("tag", "ner_tag", "ner", "tags", "ner_tags", "labels")
SENTENCE_NAMES = ("sentence #", "sentence_id", "sentence_idx", "sentence id", "sentence_number", "sent_id")


class WordColumns(NamedTuple):
    word: str
    sentence: str
    tag: str | None


def find_word_columns(names: Sequence[str], arguments: TokenDataArguments) -> WordColumns | None:
    """The columns of a table that may have one word per row; None if none numbers sentences, or has words."""
    lower = {name.lower(): name for name in names}
    word, sentence, tag = (
        next((lower[name] for name in known if name in lower), None)
        for known in (WORD_NAMES, SENTENCE_NAMES, (*TAG_NAMES, "label"))
    )
    word, tag = arguments.tokens_column_name or word, arguments.tags_column_name or tag
    if sentence is None or word not in names:
        return None
    return WordColumns(str(word), sentence, tag if tag in names else None)


def are_words(cells: Sequence[Any]) -> bool:
    """Whether the texts are words, and not whole sentences, most of which have a blank."""
    return 2 * sum(" " in str(cell).strip() for cell in cells) < len(cells)


def joined(table: Mapping[str, Sequence[Any]], sentence: str) -> dict[str, Any]:
    """The other columns as lists, a row per sentence. One begins where the cell in `sentence` is neither empty nor the
    one before, so numbers may begin anew, but a sentence's rows must lie together."""
    begins, last = list[int](), None
    for i, cell in enumerate(table[sentence]):
        if i == 0 or (not is_empty(cell) and cell != last):
            begins.append(i)
        last = last if is_empty(cell) else cell
    rows = list(pairwise([*begins, len(table[sentence])]))
    return {name: [[*cells[begin:end]] for begin, end in rows] for name, cells in table.items() if name != sentence}
