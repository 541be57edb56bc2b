"""What a rank that shares texts does on its own: its dropout, and its mask of documents."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from finetune.measure.memory import Allocations
from finetune.training.sequence_parallel import SequenceParallel, document_mask

STATE = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={}))


def drawn_in_the_first_step(rank: int, every: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What one of four ranks draws, two to a text, whose state before the step is that of seed 3; `every` makes what
    all ranks would draw from what this one would."""
    args = SimpleNamespace(process_index=rank, world_size=4, device="cpu")
    shared = SequenceParallel(2, args, SimpleNamespace(state=STATE, gather=every))
    torch.manual_seed(3)
    shared.on_step_begin(args, None, None)
    first = torch.rand(8)
    shared.on_step_begin(args, None, None)  # the second step goes on
    assert not torch.equal(torch.rand(8), first)
    return first


def test_ranks_that_share_a_text_draw_different_dropout_masks() -> None:
    """Their states are the same in a new run, and after resuming from one process or ranks that did not share."""
    drawn = [drawn_in_the_first_step(rank, lambda one: one.repeat(4)) for rank in range(4)]
    assert torch.equal(drawn[0], drawn[2])  # as ranks that read different rows do
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


def test_different_random_states_go_on() -> None:
    found = drawn_in_the_first_step(0, lambda one: torch.cat([one, one + 1, one, one + 1]))
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(8))


def test_a_mask_of_documents_takes_a_byte_for_each_pair_and_no_more() -> None:
    tokens = 1024
    positions = torch.arange(tokens).remainder(400)[None]
    with Allocations() as memory:
        mask = document_mask(positions)
    assert memory.peak <= tokens**2 + 32 * tokens
    for query, key in ((0, 0), (399, 0), (400, 399), (401, 400), (400, 401), (1023, 800)):
        assert bool(mask[0, 0, query, key]) == (key <= query and key // 400 == query // 400)
