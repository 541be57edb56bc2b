"""Language modeling on a stream: documents are read, tokenized and packed on the fly, and never stored.

Every rank reads and tokenizes the whole stream and takes its own rows of each step, so a step holds the same blocks at
any number of ranks. `--dataloader_num_workers 1` does this in parallel to the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from finetune.data.changes import UnchangedFiles, unchanged_rows
from finetune.data.documents import ENDS
from finetune.data.encoding import BATCH_ROWS, Encoder
from finetune.data.packing import Blocks, PackedDataset, Tokens
from finetune.errors import RunError

WINDOW_TOKENS = 1 << 20  # at least this many tokens are packed and shuffled together
SHUFFLE_BUFFER_DOCUMENTS = 10_000


class TokenStream(IterableDataset[dict[str, torch.Tensor]]):
    """Blocks like those of `PackedDataset`, from `documents`, a `datasets.IterableDataset` of rows for `encoder`, read
    from `files`.

    `cut` makes blocks of a window of documents, given their borders. With `carries`, the end of a window that does not
    fill a block starts the next window, as wrapped text needs; otherwise a document cut by the window's end continues
    as a separate document. Seed and epoch determine the order: documents are shuffled in a buffer, blocks in their
    window. The stream never ends, but continues with the next epoch: a resumed Trainer skips the steps of what it takes
    to be one epoch, and finds its place only that way (transformers 5.23, Trainer._run_epoch)."""

    def __init__(
        self,
        documents: Any,
        encoder: Encoder,
        cut: Callable[[Any], Blocks],
        carries: bool,
        mask: bool,
        seed: int,
        files: UnchangedFiles,
    ) -> None:
        is_one_text = ENDS in next(iter(documents), {})  # its pieces must stay in order
        self.documents = documents if is_one_text else documents.shuffle(seed, buffer_size=SHUFFLE_BUFFER_DOCUMENTS)
        self.encoder, self.cut, self.carries, self.mask, self.seed = encoder, cut, carries, mask, seed
        self.files = files

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for epoch in count():
            some = False
            for block in self.blocks(epoch):
                some = True
                yield block
            if not some:
                raise RunError("the stream has less text than one block. Give more, or a smaller --block_size.")

    def blocks(self, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        """The blocks of one epoch."""
        self.documents.set_epoch(epoch)
        random = np.random.default_rng((self.seed, epoch))
        for window in self._windows():
            blocks = window.with_labels()
            for index in random.permutation(len(blocks)).tolist():
                yield blocks[index]

    def _windows(self) -> Iterator[PackedDataset]:
        ids: list[Any] = []
        learnt: list[Any] = []
        starts, size = [0], 0
        for batch, rows in enumerate(unchanged_rows(self.documents.iter(BATCH_ROWS), self.files)):
            made = self.encoder(rows, range(batch * BATCH_ROWS, (batch + 1) * BATCH_ROWS))
            for row, ends in zip(made["ids"], made["ends"], strict=True):
                ids.append(np.asarray(row, dtype=np.uint32))
                size += len(row)
                if ends:
                    starts.append(size)
            learnt += [np.asarray(row, dtype=np.bool_) for row in made.get("learnt", ())]
            if size >= WINDOW_TOKENS:
                window = self._window(ids, starts, learnt)
                yield window
                # The next window begins with the last token that was predicted: there it is an input.
                rest = int(window.lengths.sum()) if self.carries else size
                ids = [window.tokens.ids[rest:]]
                learnt = [] if window.tokens.learnt is None else [window.tokens.learnt[rest:]]
                size -= rest
                starts = [0, *(start - rest for start in starts if start > rest)]
        if size:
            yield self._window(ids, starts, learnt)

    def _window(self, ids: list[Any], starts: list[int], learnt: list[Any]) -> PackedDataset:
        joined = np.concatenate(ids)
        borders = np.asarray(starts if starts[-1] == len(joined) else [*starts, len(joined)], dtype=np.int64)
        tokens = Tokens(joined, borders, np.concatenate(learnt) if learnt else None)
        return PackedDataset(tokens, self.cut(borders), self.mask)
