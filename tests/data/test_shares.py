"""Ranks of a group read the same rows, each its part of them, and together all tokens once."""

from __future__ import annotations

import torch

from finetune.data.numbered import NUMBER, NumberedCollator
from finetune.data.packing import IGNORED, REAL_TOKENS, Collator
from finetune.data.sampling import GlobalBatchSampler
from finetune.data.shares import WHOLE_POSITIONS, SharedRows, SharedTexts
from finetune.training.experts import mask_of
from finetune.training.sequence_parallel import document_mask


def test_neighbours_read_the_rows_that_one_rank_would() -> None:
    """Micro-batches are dealt to the ranks in turn: of four ranks in two groups, ranks 0 and 1 get the first."""
    plain = GlobalBatchSampler(10, 4, seed=0)
    shared = SharedRows(plain, micro_batch=2, sharing=2)
    shared.set_epoch(3)
    rows, dealt = list(plain), list(shared)
    assert plain.epoch == 3
    assert len(shared) == len(dealt) == 24
    micro = [dealt[at : at + 2] for at in range(0, 24, 2)]
    assert micro[0::2] == micro[1::2]
    assert [row for batch in micro[0::2] for row in batch] == rows


def block(*lengths: int, documents: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 1 + sum(lengths))
    item = {"input_ids": ids, "shift_labels": ids + 1}
    return item | ({"position_ids": torch.cat([torch.arange(n) for n in lengths])} if documents else {})


def test_the_parts_of_a_text_make_it_whole_with_padding_behind() -> None:
    rows = [block(5), block(3)]
    whole = Collator(0)(rows)
    parts = [SharedTexts(Collator(0), 4, rank)(rows) for rank in range(4)]
    assert all(part["input_ids"].shape == (2, 2) for part in parts)
    joined = {
        name: torch.cat([part[name] for part in parts], dim=1) for name in ("input_ids", "labels", "position_ids")
    }
    assert torch.equal(joined["input_ids"][:, :5], whole["input_ids"])
    assert torch.equal(joined["position_ids"], torch.arange(8).expand(2, 8))
    assert (joined["labels"] != IGNORED).sum() == 8
    assert [part[REAL_TOKENS].tolist() for part in parts] == [[2, 2], [2, 1], [1, 0], [0, 0]]
    seen = torch.cat([mask_of(part) for part in parts], dim=1)
    assert torch.equal(seen[:, :5].long(), whole["attention_mask"])
    assert int(seen.sum()) == 8
    assert all("attention_mask" not in part for part in parts)


def test_documents_keep_their_positions_and_all_of_them_are_known_for_the_mask() -> None:
    rows = [block(3, 2, documents=True), block(4, documents=True)]
    parts = [SharedTexts(Collator(0), 2, rank)(rows) for rank in range(2)]
    positions = torch.cat([part["position_ids"] for part in parts], dim=1)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert all(torch.equal(part[WHOLE_POSITIONS], positions) for part in parts)
    seen = torch.cat([mask_of(part) for part in parts], dim=1)
    assert seen.int().tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    mask = document_mask(positions)[:, 0]
    assert mask[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_whole_block_is_real_on_every_rank() -> None:
    parts = [SharedTexts(Collator(0), 2, rank)([block(8)]) for rank in range(2)]
    assert [mask_of(part).all().item() for part in parts] == [True, True]


def test_each_part_has_the_numbers_of_its_rows() -> None:
    rows = [{**block(5), NUMBER: 7}, {**block(3), NUMBER: 2}]
    parts = [SharedTexts(NumberedCollator(Collator(0)), 2, rank)(rows) for rank in range(2)]
    assert [part[NUMBER].tolist() for part in parts] == [[7, 2], [7, 2]]
