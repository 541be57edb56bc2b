"""Tokens on disk, memory-mapped, and the blocks they are trained in: wrapped, best fit, or one per document.

A block of size T gives `input_ids` (T,) and `shift_labels` (T,): the token after each position, or -100 if it is not
trained on. Each token of the text except the very first is predicted exactly once.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

REAL_TOKENS = "real_tokens"  # number of tokens in each row of a micro-batch, without padding
IGNORED = -100  # the label that torch's cross entropy ignores


def dtype_of(vocab_size: int) -> str:
    """The smallest numpy type that holds every token id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class TokenWriter:
    """Writes documents one by one to a folder: `tokens.bin`, `documents.npy` with the start of each document, and, if
    some tokens are not trained on, `learnt.bin`, a byte per token."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype
        self.starts, self.written = [0], 0
        self.tokens = (folder / "tokens.bin").open("wb")
        self.learnt: Any = None

    def add(
        self, ids: npt.ArrayLike, lengths: npt.ArrayLike, ends: npt.ArrayLike, learnt: npt.ArrayLike | None = None
    ) -> None:
        """Appends rows, concatenated in `ids` (N,), of `lengths` (rows,). Where `ends` (rows,) is true, the row ends a
        document; otherwise the next row continues it. `learnt` (N,) is given for all documents or for none."""
        array = np.asarray(ids, dtype=self.dtype)
        self.tokens.write(array.tobytes())
        borders = self.written + np.cumsum(np.asarray(lengths, dtype=np.int64))
        self.starts += borders[np.asarray(ends, dtype=bool)].tolist()
        self.written += len(array)
        if learnt is not None:
            self.learnt = self.learnt or (self.folder / "learnt.bin").open("wb")
            self.learnt.write(np.asarray(learnt, dtype=np.bool_).tobytes())

    def close(self) -> None:
        if self.starts[-1] != self.written:  # the rows end inside a document
            self.starts.append(self.written)
        for file in filter(None, (self.tokens, self.learnt)):
            file.close()
        np.save(self.folder / "documents.npy", np.asarray(self.starts, dtype=np.int64))
        (self.folder / "dtype").write_text(self.dtype)


@dataclass(frozen=True)
class Tokens:
    """What `TokenWriter` wrote, memory-mapped: only pages that are read take memory."""

    ids: npt.NDArray[Any]  # (N,)
    starts: npt.NDArray[np.int64]  # (documents + 1,)
    learnt: npt.NDArray[np.bool_] | None  # (N,)

    @classmethod
    def open(cls, folder: Path) -> Tokens:
        starts = np.load(folder / "documents.npy")
        if not starts[-1]:
            return cls(np.zeros(0, np.uint16), starts, None)
        ids: npt.NDArray[Any] = np.memmap(folder / "tokens.bin", (folder / "dtype").read_text(), "r")
        mask = folder / "learnt.bin"
        return cls(ids, starts, np.memmap(mask, np.bool_, "r") if mask.exists() else None)


@dataclass(frozen=True)
class Blocks:
    """Which tokens are in which block. Block b consists of pieces `offsets[b]` to `offsets[b + 1]`; each piece is
    `sizes` inputs from token `starts`. Its last label is the next token if the document `goes_on`, else IGNORED."""

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    goes_on: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, numbers: npt.NDArray[np.int64]) -> Blocks:
        """Selects these blocks."""
        parts = [np.arange(self.offsets[n], self.offsets[n + 1]) for n in numbers.tolist()]
        pieces = np.concatenate([np.zeros(0, np.int64), *parts])
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
        return Blocks(self.starts[pieces], self.sizes[pieces], self.goes_on[pieces], offsets)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of inputs in each block."""
        return np.add.reduceat(self.sizes, self.offsets[:-1]) if len(self) else np.zeros(0, np.int64)


def wrapped(documents: npt.NDArray[np.int64], block_size: int, keep_tail: bool) -> tuple[Blocks, int]:
    """Cuts the whole text into blocks of `block_size`. Also returns how many predictions are left over.

    With `keep_tail` the rest forms a last, shorter block. `documents` holds their starts, and the end of the last one.
    """
    full, rest = divmod(max(int(documents[-1]) - 1, 0), block_size)
    sizes: npt.NDArray[np.int64] = np.full(full + bool(keep_tail and rest), block_size, dtype=np.int64)
    if keep_tail and rest:
        sizes[-1], rest = rest, 0
    count = len(sizes)
    starts: npt.NDArray[np.int64] = np.arange(count, dtype=np.int64) * block_size
    return Blocks(starts, sizes, np.ones(count, dtype=bool), np.arange(count + 1)), rest


def one_each(documents: npt.NDArray[np.int64], block_size: int) -> Blocks:
    """One block per document; documents longer than `block_size` are cut into several blocks."""
    starts, sizes, goes_on = _pieces(documents, block_size)
    return Blocks(starts, sizes, goes_on, np.arange(len(starts) + 1))


def best_fit_decreasing(documents: npt.NDArray[np.int64], block_size: int) -> Blocks:
    """Packs documents into few blocks: the longest first, each into the fullest block that has room (Johnson 1973; for
    training texts, Ding et al., arXiv 2404.10830). Documents longer than a block are cut first."""
    starts, sizes, goes_on = _pieces(documents, block_size)
    members: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(block_size + 1)]  # blocks by the room left
    rooms: list[int] = []  # all amounts of room that occur, sorted
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            block, room = len(members), block_size
            members.append([])
        else:
            room = rooms[at]
            block = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        members[block].append(piece)
        room -= size
        if room:
            if not by_room[room]:
                bisect.insort(rooms, room)
            by_room[room].append(block)
    order = np.array([piece for block in members for piece in block], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(block) for block in members], dtype=np.int64)])
    return Blocks(starts[order], sizes[order], goes_on[order], offsets)


def _pieces(documents: npt.NDArray[np.int64], block_size: int) -> tuple[Any, Any, Any]:
    """Cuts each document into runs of at most `block_size` inputs: starts, sizes, and whether the document goes on."""
    lengths = np.diff(documents)
    counts = -(-lengths // block_size)
    document: npt.NDArray[np.int64] = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1, ... in each document
    starts = documents[:-1][document] + place * block_size
    sizes = np.minimum(block_size, documents[1:][document] - starts)
    return starts, sizes, starts + sizes < documents[1:][document]


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Blocks as a torch data set: `input_ids` (T,), `shift_labels` (T,) and, with `document_mask`, `position_ids` (T,),
    which restart at 0 with each document."""

    def __init__(self, tokens: Tokens, blocks: Blocks, document_mask: bool) -> None:
        self.tokens, self.blocks, self.document_mask = tokens, blocks, document_mask

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.blocks.lengths

    def with_labels(self) -> PackedDataset:
        """Drops blocks without any trained token, if `learnt` is recorded: a step of only such blocks would have a loss
        of 0 / 0."""
        learnt, blocks = self.tokens.learnt, self.blocks
        if learnt is None or not len(blocks):
            return self
        ends = blocks.starts + blocks.sizes + blocks.goes_on
        pieces = zip((blocks.starts + 1).tolist(), ends.tolist(), strict=True)
        some = np.logical_or.reduceat([bool(learnt[start:end].any()) for start, end in pieces], blocks.offsets[:-1])
        return PackedDataset(self.tokens, blocks.take(np.flatnonzero(some)), self.document_mask)

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """A batch, as torch's loader asks for it. Wrapped text, the common case, takes a single read."""
        tokens, blocks = self.tokens, self.blocks
        first, last = blocks.offsets[indices], blocks.offsets[np.add(indices, 1)]
        starts, sizes = blocks.starts[first], blocks.sizes[first]
        is_wrapped = np.all(last == first + 1) and np.all(blocks.goes_on[first]) and np.all(sizes == sizes[0])
        if not is_wrapped or tokens.learnt is not None or self.document_mask:
            return [self[index] for index in indices]
        runs = torch.from_numpy(tokens.ids[starts[:, None] + np.arange(sizes[0] + 1)].astype(np.int64))
        pairs = zip(runs[:, :-1].unbind(), runs[:, 1:].unbind(), strict=True)
        return [{"input_ids": ids, "shift_labels": labels} for ids, labels in pairs]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, blocks = self.tokens, self.blocks
        first, last = int(blocks.offsets[index]), int(blocks.offsets[index + 1])
        inputs, labels, positions = [], [], []
        for piece in range(first, last):
            start, size = int(blocks.starts[piece]), int(blocks.sizes[piece])
            follows = int(blocks.goes_on[piece])
            inputs.append(tokens.ids[start : start + size].astype(np.int64))
            after: npt.NDArray[np.int64] = np.full(size, IGNORED, dtype=np.int64)
            after[: size - 1 + follows] = tokens.ids[start + 1 : start + size + follows]
            if tokens.learnt is not None:
                after[: size - 1 + follows][~tokens.learnt[start + 1 : start + size + follows]] = IGNORED
            if self.document_mask:
                after, place = self._apart(start, size, after)
                positions.append(place)
            labels.append(after)
        found = {"input_ids": inputs, "shift_labels": labels} | ({"position_ids": positions} if positions else {})
        return {name: torch.from_numpy(np.concatenate(pieces)) for name, pieces in found.items()}

    def _apart(self, start: int, size: int, after: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Positions that restart where a document begins inside a piece, and no labels across such borders."""
        place = np.arange(size)
        bounds = self.tokens.starts
        first, last = (int(np.searchsorted(bounds, token, side="left")) for token in (start + 1, start + size))
        for bound in bounds[first:last].tolist():
            place[bound - start :] = np.arange(size - (bound - start))
            after[bound - start - 1] = IGNORED
        if start + size == bounds[min(last, len(bounds) - 1)]:
            after[-1] = IGNORED
        return after, place


def padded(rows: Iterable[Sequence[int]], value: int) -> torch.Tensor:
    """(B, longest), padded on the right."""
    whole = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(whole, batch_first=True, padding_value=value)


def mask_of(rows: Iterable[Sequence[int]]) -> torch.Tensor:
    """(B, longest): 1 for each element of `rows`, 0 for their padding."""
    return padded(([1] * len(row) for row in rows), 0)


class Collator:
    """Stacks blocks, and adds `labels`, by which the Trainer counts: the same as `shift_labels`. If some blocks are
    shorter than the longest, or than `length`, they are padded with label IGNORED, and an attention mask is added."""

    def __init__(self, pad_token_id: int, length: int | None = None) -> None:
        self.length = length
        self.fill = {"input_ids": pad_token_id, "shift_labels": IGNORED, "position_ids": 0}

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        sizes = [len(row["input_ids"]) for row in rows]
        longest = self.length or max(sizes)
        is_padded = min(sizes) < longest
        batch = {}
        for name in rows[0]:
            columns = [row[name] for row in rows]
            if is_padded:
                columns = [pad(one, (0, longest - len(one)), value=self.fill[name]) for one in columns]
            batch[name] = torch.stack(columns)
        batch["labels"] = batch["shift_labels"]
        if is_padded and "position_ids" in batch:
            batch[REAL_TOKENS] = torch.tensor(sizes)  # there is no mask to count by; the Trainer removes it
        elif is_padded:
            batch["attention_mask"] = (torch.arange(longest)[None] < torch.tensor(sizes)[:, None]).long()
        return batch
