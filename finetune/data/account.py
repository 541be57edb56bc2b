"""Summary of a corpus and its tokens, for the log and the model card."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finetune.data.columns import CHAT, TEXT
from finetune.data.packing import Tokens


@dataclass(frozen=True)
class CorpusAccount:
    """What was found, for the log and the model card. Counts are of documents, tokens, characters and UTF-8 bytes."""

    source: str
    kind: str
    columns: str  # which are read, and which are ignored; empty if there are none
    notes: tuple[str, ...]  # further remarks
    documents: dict[str, int]
    tokens: dict[str, int]
    characters: dict[str, int]
    bytes: dict[str, int]
    learnt: dict[str, int]  # tokens that are trained on: all, or in conversations the assistant's
    turn_ends: list[int]  # tokens that end the assistant's turns; empty if there are no assistant turns
    blocks: dict[str, int]
    sources: dict[str, dict[str, int]]  # blocks of each file, if there are several
    left_over: int  # tokens at the end of the training text that do not fill a block
    padding_share: float | None  # of the training blocks; None if it depends on how rows are batched
    block_size: int
    packing: str

    @property
    def rates(self) -> tuple[float, float, dict[str, int]]:
        """What evaluation metrics need: `tokens_per_byte`, `tokens_per_character`, and the number of held-out blocks of
        each source, in order."""
        held_out = {name: blocks["validation"] for name, blocks in self.sources.items() if "validation" in blocks}
        return self.tokens_per_byte, self.tokens_per_character, held_out

    @property
    def tokens_per_byte(self) -> float:
        """Trained tokens per byte of the held-out text."""
        return self.learnt["validation"] / max(self.bytes["validation"], 1)

    @property
    def tokens_per_character(self) -> float:
        """Trained tokens per character of the held-out text."""
        return self.learnt["validation"] / max(self.characters["validation"], 1)

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        more = "; --train_file takes your own" if self.source.startswith("built-in") else ""
        counts = ", ".join(f"{count:,} {split}" for split, count in self.tokens.items())
        counts = counts if "train" in self.tokens else f"streamed; {counts}"
        rest = f", {self.left_over} left over" if self.left_over else ""
        known = self.source.startswith("built-in") or not self.columns
        rest += "" if known or self.kind != TEXT else f"; {self.columns}"
        rest += "".join(f"; {note}" for note in self.notes)
        name = self.source if self.kind == TEXT else f"{self.columns}; from {self.source}"
        return f"data: {name} ({counts} tokens{rest}; blocks of {self.block_size}, {self.packing}{more})"


def note_of_cuts(tokens: Tokens, kind: str, learnt: int, block_size: int, packing: str) -> list[str]:
    """Reports how many documents are cut at block ends, and what share of the `learnt` tokens then lacks the start of
    its document. Returns nothing for wrapped text, which is meant to be cut."""
    if packing == "wrapped" and kind == TEXT:
        return []
    starts, ends = tokens.starts[:-1], tokens.starts[1:]
    borders = (starts // block_size + 1) * block_size if packing == "wrapped" else starts + block_size
    cut = np.flatnonzero(borders + 1 < ends)  # the block before a border predicts the first token after it
    if not len(cut):
        return []
    pieces = zip((borders[cut] + 1).tolist(), ends[cut].tolist(), strict=True)
    apart = sum(
        end - start if tokens.learnt is None else int(np.count_nonzero(tokens.learnt[start:end]))
        for start, end in pieces
    )
    unit = "conversations" if kind == CHAT else "documents"
    why = "are longer than --block_size" if packing != "wrapped" else "do not fit into one block of"
    mend = (
        "raise --block_size, or leave such rows out"
        if packing != "wrapped"
        else "--packing bfd does not split what fits"
    )
    return [
        f"{len(cut):,} of {len(starts):,} {unit} {why} {block_size} and are cut: {apart / learnt:.0%} of the "
        f"trained tokens are separated from the beginning of their text ({mend})"
    ]
