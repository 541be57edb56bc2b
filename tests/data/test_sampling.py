"""The steps of an epoch do not depend on how a global batch is spread over processes and accumulation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from finetune.data.sampling import GlobalBatchSampler


def steps(size: int, micro: int, accumulation: int, ranks: int, lengths: list[int] | None) -> list[list[int]]:
    """The samples of each step as accelerate deals them out: batch i goes to rank i modulo ranks."""
    total = micro * accumulation * ranks
    batches = list(BatchSampler(GlobalBatchSampler(size, total, seed=3, lengths=lengths), micro, drop_last=False))
    assert all(len(batch) == micro for batch in batches)
    of_rank = [batches[rank::ranks] for rank in range(ranks)]
    assert len({len(own) for own in of_rank}) == 1
    return [
        sorted(i for own in of_rank for batch in own[start : start + accumulation] for i in batch)
        for start in range(0, len(of_rank[0]), accumulation)
    ]


@pytest.mark.parametrize("grouped", [True, False])
def test_every_layout_of_a_global_batch_takes_the_same_steps(grouped: bool) -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 1003).tolist() if grouped else None
    truth = steps(1003, 32, 1, 1, lengths)
    for micro, accumulation, ranks in ((16, 1, 2), (8, 2, 2), (4, 2, 4), (1, 32, 1)):
        assert steps(1003, micro, accumulation, ranks, lengths) == truth


@given(size=st.integers(1, 300), batch=st.integers(1, 40), grouped=st.booleans())
def test_every_sample_is_seen_and_every_batch_is_full(size: int, batch: int, grouped: bool) -> None:
    sampler = GlobalBatchSampler(size, batch, 1, list(range(size)) if grouped else None)
    order = list(sampler)
    assert set(order) == set(range(size))
    assert len(order) == len(sampler) == -(-size // batch) * batch


@given(size=st.integers(1, 300), batch=st.integers(1, 40), epoch=st.integers(0, 3))
def test_the_last_batch_is_filled_up_from_the_epochs_first_samples(size: int, batch: int, epoch: int) -> None:
    def order(lengths: list[int] | None) -> list[int]:
        sampler = GlobalBatchSampler(size, batch, 1, lengths)
        sampler.set_epoch(epoch)
        return list(sampler)

    plain = order(None)
    assert sorted(plain[:size]) == list(range(size))
    assert plain == [plain[place % size] for place in range(len(plain))]
    assert Counter(order(list(range(size)))) == Counter(plain), "grouping fills up with the same ones"


@pytest.mark.parametrize(("batches", "are_one"), [(50, True), (51, False)])
def test_fifty_global_batches_are_sorted_together_and_more_apart(batches: int, are_one: bool) -> None:
    """Of lengths that all differ a batch of ten spans nine, if it was cut from all of them."""
    order = np.array(list(GlobalBatchSampler(10 * batches, 10, 0, list(range(10 * batches))))).reshape(-1, 10)
    spans = order.max(axis=1) - order.min(axis=1)
    assert bool((spans == 9).all()) is are_one
    assert np.median(spans) < 40


def test_long_and_short_batches_are_mixed_over_the_epoch() -> None:
    order = np.array(list(GlobalBatchSampler(6400, 16, 0, list(range(6400))))).reshape(-1, 16)
    assert abs(np.corrcoef(order.mean(axis=1), np.arange(len(order)))[0, 1]) < 0.15


def test_epochs_differ_and_a_seed_repeats_them() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        sampler = GlobalBatchSampler(100, 10, seed, list(range(100)))
        sampler.set_epoch(number)
        return list(sampler)

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)
    assert epoch(1, 2) != epoch(2, 1)


def test_an_order_stays_what_it_was_in_earlier_releases() -> None:
    """A run that is resumed goes on with the samples that it has not seen: what was shipped is written down here."""

    def order(epoch: int, lengths: list[int] | None) -> list[int]:
        sampler = GlobalBatchSampler(10, 4, 7, lengths)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, None) == [8, 0, 7, 1, 3, 6, 2, 4, 5, 9, 8, 0]
    assert order(1, None) == [9, 0, 8, 6, 7, 1, 3, 4, 2, 5, 9, 0]
    lengths = [5, 3, 8, 1, 9, 2, 7, 4, 6, 0]
    assert order(0, lengths) == [4, 2, 6, 8, 1, 5, 3, 9, 8, 0, 0, 7]
    assert order(2, lengths) == [4, 2, 6, 8, 0, 7, 1, 1, 5, 5, 3, 9]


def test_grouping_leaves_little_padding_on_long_tailed_lengths() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.2, 0.75, 8000), 20, 512).astype(int)  # reviews of IMDB look like this

    def padding(grouped: bool) -> float:
        order = list(GlobalBatchSampler(8000, 32, 0, lengths.tolist() if grouped else None))
        batches = lengths[np.array(order)].reshape(-1, 16)
        return float(1 - batches.sum() / (batches.max(axis=1).sum() * 16))

    assert padding(grouped=False) > 0.4
    assert padding(grouped=True) < 0.03


def test_the_longest_batch_comes_first_so_that_memory_runs_out_at_once() -> None:
    lengths = list(range(1, 6401))
    first = list(GlobalBatchSampler(6400, 32, 0, lengths))[:32]
    assert max(lengths[i] for i in first) == 6400
