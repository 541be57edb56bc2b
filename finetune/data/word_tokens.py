"""Aligns words and their labels with the tokens of any tokenizer, and counts the words and entities that no token
stands for: they are neither learned nor scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from finetune.data.classification import Account, Rows
from finetune.data.columns import IGNORED, Columns

WORDS = "words"  # the words of a test row, for its prediction
ENTITY = "entity"  # for each word the number of its entity in the sentence, from 1; 0 outside
# Counts of a row: words that the tokenizer drops, entities, and, where labels are known, what has no scored word.
TOKENLESS, ENTITIES = "words_without_token", "entities"
NOT_SCORED = ("words_not_scored", "entities_not_scored")
COUNTED = (TOKENLESS, ENTITIES, *NOT_SCORED)
Spans = Sequence[tuple[int, int]]  # the characters of each token, up to the second number


def encode_words(tokenizer: Any, columns: Columns, max_length: int, rows: Rows) -> dict[str, list[Any]]:
    """Tokenizes words joined by spaces, as the tokenizer sees them in `pipeline`, whether or not spaces belong to its
    tokens. A word's label goes to its first token. For test rows `first` gives that token's position, or -1 for a word
    that was cut off or has no token."""
    texts = [" ".join(words) for words in rows["tokens"]]
    found = tokenizer(
        texts, truncation=True, max_length=max_length, return_attention_mask=False, return_offsets_mapping=True
    )
    offsets = found.pop("offset_mapping")
    firsts = [
        _first_tokens(words, text, spans) for words, text, spans in zip(rows["tokens"], texts, offsets, strict=True)
    ]
    lost = [[*chain.from_iterable(part.offsets for part in one.overflowing)] for one in found.encodings]
    lengths = [len(ids) for ids in found["input_ids"]]
    encoded = {**found, "length": lengths, "truncated": [bool(spans) for spans in lost]}
    encoded[TOKENLESS] = [
        sum(place < 0 and cut < 0 for place, cut in zip(first, _first_tokens(words, text, spans), strict=True))
        if -1 in first
        else 0
        for words, text, first, spans in zip(rows["tokens"], texts, firsts, lost, strict=True)
    ]
    if "label" in rows:
        encoded["labels"] = [
            _labels_of_tokens(ids, first, length)
            for ids, first, length in zip(rows["label"], firsts, lengths, strict=True)
        ]
        encoded |= _not_scored(rows[ENTITY], firsts)
    return {**encoded, "first": firsts} if WORDS in rows else encoded


def _first_tokens(words: Sequence[str], text: str, spans: Spans) -> list[int]:
    """For each word its first token, by the tokens' character spans without leading spaces; -1 if it has none."""
    word_at = [i for i, word in enumerate(words) for _ in range(len(word) + 1)]
    first = [-1] * len(words)
    for place, (start, end) in enumerate(spans):
        while start < end and text[start].isspace():
            start += 1
        if start < end and first[word_at[start]] < 0:
            first[word_at[start]] = place
    return first


def _labels_of_tokens(ids: Sequence[int], first: Sequence[int], length: int) -> list[int]:
    labels = [IGNORED] * length
    for label, place in zip(ids, first, strict=True):
        if place >= 0:
            labels[place] = label
    return labels


def numbered_entities(tags: Sequence[str]) -> list[int]:
    """For each of a sentence's BIO tags the number of its entity, from 1; 0 outside entities."""
    number, found = 0, []
    for tag in tags:
        number += tag.startswith("B-")
        found.append(number if tag[1:2] == "-" else 0)
    return found


def _not_scored(numbers: Sequence[Sequence[int]], firsts: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """The counts of each row. Of an entity that is partly cut, the rest is scored."""
    entities = [max(row, default=0) for row in numbers]
    scored = [
        len({number for number, place in zip(row, first, strict=True) if number and place >= 0})
        for row, first in zip(numbers, firsts, strict=True)
    ]
    words = [sum(place < 0 for place in first) for first in firsts]
    left = [there - kept for there, kept in zip(entities, scored, strict=True)]
    return {ENTITIES: entities, **dict(zip(NOT_SCORED, (words, left), strict=True))}


def remarks_on_words(account: Account) -> list[str]:
    """Notes on words without a token, and on entities that no figure counts."""
    dropped = sum(counts.get(TOKENLESS, 0) for counts in account.counts.values())
    notes = [f"words that the tokenizer drops, and which are not learned or scored: {dropped:,}"] * bool(dropped)
    for split in ("validation", "test"):
        counts = account.counts.get(split, {})
        if left := counts.get(NOT_SCORED[1], 0):
            within = f" within {account.max_seq_length} tokens (--max_seq_length)" if account.truncated[split] else ""
            notes.append(f"{left:,} of {counts[ENTITIES]:,} {split} entities have no token{within}, and no score")
    return notes


def not_scored(account: Account) -> dict[str, Mapping[str, int]]:
    """By split, the counts of labeled words and of entities that its figures leave out; only those that are not 0."""
    return {
        split: {name: counts[name] for name in NOT_SCORED if counts.get(name)}
        for split, counts in account.counts.items()
    }
