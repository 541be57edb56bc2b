"""What a rank that shares texts does on its own: its dropout, and its mask of documents."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from finetune.measure.memory import Allocations
from finetune.training.sequence_parallel import SequenceParallel, document_mask


def test_ranks_that_share_a_text_draw_different_dropout_masks() -> None:
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={})))
    drawn = []
    for rank in range(4):
        SequenceParallel(2, SimpleNamespace(seed=3, process_index=rank, world_size=4), accelerator)
        drawn.append(torch.rand(8))
    assert torch.equal(drawn[0], drawn[2])  # as ranks that read different rows do
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_mask_of_documents_takes_a_byte_for_each_pair_and_no_more() -> None:
    tokens = 1024
    positions = torch.arange(tokens).remainder(400)[None]
    with Allocations() as memory:
        mask = document_mask(positions)
    assert memory.peak <= tokens**2 + 32 * tokens
    for query, key in ((0, 0), (399, 0), (400, 399), (401, 400), (400, 401), (1023, 800)):
        assert bool(mask[0, 0, query, key]) == (key <= query and key // 400 == query // 400)
