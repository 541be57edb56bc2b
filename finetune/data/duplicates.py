"""Finds exact and near-duplicate training documents, training documents that overlap with held-out ones, and held-out
rows whose inputs are also trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from datasets import Dataset

MOST_CHARACTERS = 20_000_000  # of training text searched, unless duplicates are dropped: then all of it is
# Words and punctuation marks; in Japanese and Chinese, which put no spaces between words, single characters.
WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\s\w]|[\u3040-\u30ff\u3400-\u9fff]")
SHINGLE, RUN = 5, 13  # words; GPT-3 (arXiv 2005.14165, appendix C) looked for runs of 13
COMMON = 10  # documents; a run found in more of them is a stock phrase and does not count, as in GPT-3
BANDS, ROWS = 16, 8  # of a 128-hash MinHash: LSH finds 95 of 100 pairs with a Jaccard similarity of 0.8
ALIKE = 0.8
Hashes: TypeAlias = npt.NDArray[np.uint64]
STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Found:
    """`keep` covers the documents searched and is False for those to drop; the other fields count documents."""

    keep: npt.NDArray[np.bool_]
    exact: int
    near: int
    overlapping: int  # held-out documents

    def note(self, training: int, held_out: int, dropped: bool) -> str:
        """Returns "" if there is nothing to report."""
        if not (self.exact or self.near or self.overlapping):
            return ""
        some = f" (of the first {len(self.keep):,})" if len(self.keep) < training else ""
        what = f"{self.exact:,} exact and {self.near:,} near duplicates among {training:,} training documents{some}"
        overlap = f"{self.overlapping:,} of {held_out:,} held-out documents share {RUN} words in a row with them"
        end = f"{int((~self.keep).sum()):,} dropped" if dropped else "--drop_duplicates True drops these from training"
        return f"{what}; {overlap}; {end}"


def find_duplicates(training: Iterable[str], held_out: Iterable[str], most: int | None = MOST_CHARACTERS) -> Found:
    """Keeps the first of any duplicates. Also drops a document that shares a run of RUN words with a held-out document
    (all its words, if it has fewer), unless more than COMMON training documents contain that run."""
    known: dict[str, int] = {}
    texts = []
    for text in training:
        if most is not None and most < 0:
            break
        texts.append(_words(text, known))
        most = None if most is None else most - len(text)
    runs = [np.unique(_runs(words, RUN)) for words in texts]
    owned, counts = np.unique(np.concatenate([*runs, np.zeros(0, np.uint64)]), return_counts=True)
    telling = owned[counts <= COMMON]
    others = [np.unique(_runs(_words(text, known), RUN)) for text in held_out]
    asked = np.intersect1d(np.concatenate([*others, np.zeros(0, np.uint64)]), telling)
    overlapping = sum(_has(run, asked) for run in others)
    exact, near = _twice(texts)
    in_both = np.array([_has(run, asked) for run in runs], dtype=bool)
    return Found(~(exact | near | in_both), int(exact.sum()), int(near.sum()), overlapping)


def _twice(texts: list[Hashes]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which texts are exact, and which near duplicates of an earlier one. MinHash agreement estimates similarity."""
    random = np.random.default_rng(0)
    factors = random.integers(1, 2**63, (BANDS * ROWS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    exact: npt.NDArray[np.bool_] = np.zeros(len(texts), dtype=bool)
    near: npt.NDArray[np.bool_] = exact.copy()
    seen: set[bytes] = set()
    signatures: dict[int, Hashes] = {}
    bands: dict[bytes, int] = {}
    for number, words in enumerate(texts):
        name = xxhash.xxh3_128_digest(words.tobytes())
        exact[number] = name in seen
        seen.add(name)
        if exact[number] or len(words) < SHINGLE:
            continue
        shingles = _runs(words, SHINGLE)
        own = ((shingles[None] ^ (shingles[None] >> np.uint64(31))) * factors).min(axis=1)
        keys = [bytes([band]) + own[band * ROWS : (band + 1) * ROWS].tobytes() for band in range(BANDS)]
        candidates = {bands[key] for key in keys if key in bands}
        near[number] = any(float((own == signatures[one]).mean()) >= ALIKE for one in candidates)
        if not near[number]:
            signatures[number] = own
            for key in keys:
                bands.setdefault(key, number)
    return exact, near


def _has(run: Hashes, asked: Hashes) -> bool:
    """Whether any hash in `run` is in `asked`, which is sorted."""
    places = np.searchsorted(asked, run)
    return bool(len(asked)) and bool((asked[np.minimum(places, len(asked) - 1)] == run).any())


def _words(text: str, known: dict[str, int]) -> Hashes:
    """One hash per word, ignoring case."""
    found = WORD.findall(text.lower())
    for word in found:
        if word not in known:
            known[word] = xxhash.xxh3_64_intdigest(word.encode())
    return np.fromiter(map(known.__getitem__, found), dtype=np.uint64, count=len(found))


def _runs(words: Hashes, size: int) -> Hashes:
    """One hash per run of `size` words; a shorter text is a single run."""
    size = min(size, len(words))
    found: Hashes = np.zeros(len(words) - size + 1 if size else 0, dtype=np.uint64)
    for place in range(size):
        found = found * STEP + words[place : len(words) - size + place + 1]
    return found


def inputs_of(table: Dataset, columns: Sequence[str]) -> Iterator[Any]:
    """What `columns` hold of each row."""
    for batch in table.select_columns([*columns]).iter(batch_size=1000):
        yield from zip(*batch.values(), strict=True)


def notes_of_trained(inputs: Mapping[str, Iterable[Any]]) -> list[str]:
    """How many rows of each held-out split have the same inputs as a training row; `inputs` are each split's."""
    digests = {
        split: (xxhash.xxh3_64_intdigest(repr(one).encode()) for one in found) for split, found in inputs.items()
    }
    trained, held_out = digests.pop("train", ()), {split: list(found) for split, found in digests.items()}
    known = {digest for found in held_out.values() for digest in found}.intersection(trained)
    counts = {split: sum(digest in known for digest in found) for split, found in held_out.items()}
    return [
        f"{count:,} of {len(held_out[split]):,} {split} rows have the same inputs as a training row, which makes "
        "scores too good"
        for split, count in counts.items()
        if count
    ]
