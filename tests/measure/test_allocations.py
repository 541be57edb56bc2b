"""Bytes counted by hand, and by the counter."""

from __future__ import annotations

import torch

from finetune.measure.memory import Allocations


def test_storages_count_once_however_many_views_look_at_them() -> None:
    with Allocations() as memory:
        a = torch.ones(1000)  # 4,000 bytes
        b = a.view(10, 100).t()[2:5]
        assert memory.live == 4000
        del a
        assert memory.live == 4000
        del b
        assert memory.live == 0


def test_what_autograd_keeps_lives_until_the_backward_pass() -> None:
    with Allocations() as memory:
        x = torch.ones(1000, requires_grad=True)
        loss = x.exp().sum()  # exp keeps its result; sum is one number
        assert memory.live == 4000 + 4000 + 4
        loss.backward()
        del loss
        assert memory.live == 4000 + 4000  # x, and its gradient


def test_the_peak_of_each_phase_is_kept() -> None:
    with Allocations() as memory:
        kept = torch.ones(100)
        memory.phase = "work"
        memory.forget_peaks()
        torch.ones(2000)
        torch.ones(500)
    assert memory.peaks == {"work": 8400}
    assert kept.numel() == 100


def test_what_is_freed_later_is_counted_as_freed() -> None:
    with Allocations() as memory:
        a = torch.ones(1000)
    assert memory.live == 4000
    del a
    assert memory.live == 0


def test_tensors_that_were_there_before_are_counted_on_demand() -> None:
    before = torch.ones(123_457)
    with Allocations() as memory:
        memory.count_existing()
        counted = memory.live
        del before
        assert counted - memory.live == 123_457 * 4
