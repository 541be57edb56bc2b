"""Blocks hold every token once, whatever the packing, and documents stay apart where that is asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.mixture import Joined
from finetune.data.numbered import Numbered
from finetune.data.packing import (
    IGNORED,
    Blocks,
    Collator,
    PackedDataset,
    Tokens,
    TokenWriter,
    best_fit_decreasing,
    dtype_of,
    one_each,
    wrapped,
)


def corpus(lengths: list[int]) -> Tokens:
    """Tokens that are all different, so that each can be found again."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Tokens(np.arange(starts[-1], dtype=np.uint32), starts, None)


def learnt(tokens: Tokens, blocks: Blocks, document_mask: bool = False) -> Counter[int]:
    seen: Counter[int] = Counter()
    for item in PackedDataset(tokens, blocks, document_mask):
        kept = item["shift_labels"] != IGNORED
        assert torch.equal(item["shift_labels"][kept], item["input_ids"][kept] + 1), "a label is the token that follows"
        seen.update(item["shift_labels"][kept].tolist())
    return seen


DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.integers(2, 16))
def test_wrapped_blocks_predict_every_token_once_but_the_first_and_a_counted_rest(
    lengths: list[int], size: int
) -> None:
    tokens = corpus(lengths)
    blocks, rest = wrapped(tokens.starts, size, keep_tail=False)
    total = sum(lengths)
    assert learnt(tokens, blocks) == Counter(range(1, total - rest))
    assert rest < size
    assert set(blocks.lengths.tolist()) <= {size}, "no padding"
    whole, none = wrapped(tokens.starts, size, keep_tail=True)
    assert none == 0
    assert learnt(tokens, whole) == Counter(range(1, total))


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.integers(2, 16))
def test_whole_documents_predict_every_token_once_but_the_first_of_each(lengths: list[int], size: int) -> None:
    tokens = corpus(lengths)
    wanted = Counter(set(range(sum(lengths))) - set(tokens.starts[:-1].tolist()))
    for blocks in (one_each(tokens.starts, size), best_fit_decreasing(tokens.starts, size)):
        assert learnt(tokens, blocks) == wanted
        assert blocks.lengths.max() <= size
        assert learnt(tokens, blocks, document_mask=True) == wanted


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.integers(2, 16))
def test_wrapped_with_a_document_mask_predicts_no_first_token(lengths: list[int], size: int) -> None:
    tokens = corpus(lengths)
    blocks, _ = wrapped(tokens.starts, size, keep_tail=True)
    assert learnt(tokens, blocks, document_mask=True) == Counter(
        set(range(sum(lengths))) - set(tokens.starts[:-1].tolist())
    )
    for item in PackedDataset(tokens, blocks, True):
        begins = np.isin(item["input_ids"].numpy(), tokens.starts)
        begins[0] = True
        assert (item["position_ids"].numpy() == 0).tolist() == begins.tolist()


def test_best_fit_puts_documents_where_they_fill_a_block_best() -> None:
    tokens = corpus([6, 3, 5, 2, 4])
    blocks = best_fit_decreasing(tokens.starts, 10)
    made = [sorted(blocks.sizes[a:b].tolist()) for a, b in zip(blocks.offsets[:-1], blocks.offsets[1:], strict=True)]
    assert made == [[4, 6], [2, 3, 5]]


def test_best_fit_pads_little_on_a_real_spread_of_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 0.9, 4000).astype(int) + 1
    blocks = best_fit_decreasing(corpus(lengths.tolist()).starts, 1024)
    assert 1 - blocks.lengths.mean() / 1024 < 0.03
    alone = one_each(corpus(lengths.tolist()).starts, 1024)
    assert 1 - alone.lengths.mean() / 1024 > 0.5, "the same documents one a block"


@pytest.mark.parametrize(("vocabulary", "kind"), [(65, np.uint16), (70_000, np.uint32)])
def test_tokens_come_back_from_disk_with_what_is_learnt(vocabulary: int, kind: type, tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, dtype_of(vocabulary))
    writer.add([1, 2, 3], [2, 1], [False, True], [False, True, True])
    writer.add([vocabulary - 1, 5], [2], [True], [False, True])
    writer.close()
    tokens = Tokens.open(tmp_path)
    assert tokens.ids.dtype == kind
    assert tokens.ids.tolist() == [1, 2, 3, vocabulary - 1, 5]
    assert tokens.starts.tolist() == [0, 3, 5]
    (first, second) = PackedDataset(tokens, one_each(tokens.starts, 8), False)
    assert first["shift_labels"].tolist() == [2, 3, IGNORED]
    assert second["shift_labels"].tolist() == [5, IGNORED]
    (block,) = PackedDataset(tokens, wrapped(tokens.starts, 4, False)[0], False)
    assert block["shift_labels"].tolist() == [2, 3, IGNORED, 5], "a token that is not learnt is no label"


def test_short_blocks_are_padded_and_masked() -> None:
    tokens = corpus([5, 3])
    batch = Collator(99)([*PackedDataset(tokens, one_each(tokens.starts, 8), False)])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 99, 99]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist()[1] == [6, 7, IGNORED, IGNORED, IGNORED]


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("some", [None, [True, False]])
def test_a_batch_is_its_rows(document_mask: bool, some: list[bool] | None) -> None:
    """Of wrapped blocks, among them a short last one, and of packed ones."""
    tokens = corpus([7, 12, 30, 3])
    if some is not None:
        tokens = Tokens(tokens.ids, tokens.starts, np.resize(some, len(tokens.ids)))
    for blocks in (wrapped(tokens.starts, 8, True)[0], best_fit_decreasing(tokens.starts, 8)):
        rows = PackedDataset(tokens, blocks, document_mask)
        for numbers in ([3, 0, 2], [1, len(rows) - 1], [2]):
            got = rows.__getitems__(numbers)
            assert len(got) == len(numbers)
            for row, number in zip(got, numbers, strict=True):
                wanted = rows[number]
                assert {name: value.tolist() for name, value in row.items()} == {
                    name: value.tolist() for name, value in wanted.items()
                }


def test_a_batch_of_several_files_is_its_rows_and_each_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for first in (0, 100):
        tokens = corpus([30])
        tokens = Tokens(tokens.ids + first, tokens.starts, None)
        parts.append(PackedDataset(tokens, wrapped(tokens.starts, 8, True)[0], False))
    rows, order = Numbered(Joined(parts)), [5, 0, 2, 4, 0]
    wanted = [{name: torch.as_tensor(value).tolist() for name, value in rows[number].items()} for number in order]
    read, asked = PackedDataset.__getitems__, list[list[int]]()
    monkeypatch.setattr(PackedDataset, "__getitems__", lambda part, some: asked.append(some) or read(part, some))
    got = [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in rows.__getitems__(order)]
    assert got == wanted
    assert asked == [[0, 2, 0], [1, 0]]
    assert wanted[0]["input_ids"][0] == 108


def test_wrapped_rows_of_one_length_take_a_single_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = corpus([30])
    rows, asked = PackedDataset(tokens, wrapped(tokens.starts, 8, True)[0], False), list[int]()
    monkeypatch.setattr(PackedDataset, "__getitem__", lambda _, index: asked.append(index))
    assert [row["input_ids"].tolist() for row in rows.__getitems__([2, 1])] == [[*range(16, 24)], [*range(8, 16)]]
    assert asked == []
    rows.__getitems__([2, 3])
    assert asked == [2, 3], "the last block is shorter"
