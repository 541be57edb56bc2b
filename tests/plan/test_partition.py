"""Cutting a list of layers: never worse than any other cut, within memory, and right where a person can see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import RequestError
from finetune.plan import partition
from finetune.plan.partition import balanced_bounds


def slowest(seconds: list[float], bounds: list[int]) -> float:
    return max(sum(seconds[first:last]) for first, last in pairwise(bounds))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_quicker_slowest_stage(seconds: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    bounds = balanced_bounds(seconds, stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(seconds)
    assert len(bounds) == stages + 1
    assert all(first < last for first, last in pairwise(bounds))
    every = ([0, *inner, len(seconds)] for inner in combinations(range(1, len(seconds)), stages - 1))
    assert slowest(seconds, bounds) == pytest.approx(min(slowest(seconds, cut) for cut in every))


def test_a_head_that_outweighs_the_layers_gets_a_stage_of_its_own() -> None:
    assert balanced_bounds([1, 1, 1, 1, 1, 5], 2) == [0, 5, 6]


def test_among_cuts_of_one_pace_the_one_with_less_memory_wins() -> None:
    """Both cuts of 2 | 1 and 1 | 2 take 2 s; the first stage holds two micro-batches, so it should have one layer."""
    kwargs = {"activation_bytes": [10, 10, 10], "in_flight": [2, 1]}
    assert balanced_bounds([1, 1, 1], 2, **kwargs) == [0, 1, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_of_the_quickest_cuts_none_has_a_smaller_largest_stage(
    layers: list[tuple[int, int]], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    seconds, kept = [float(s) for s, _ in layers], [b for _, b in layers]
    flights = [stages - stage for stage in range(stages)]

    def largest(bounds: list[int]) -> int:
        return max(n * sum(kept[a:b]) for n, (a, b) in zip(flights, pairwise(bounds), strict=True))

    bounds = balanced_bounds(seconds, stages, activation_bytes=kept, in_flight=flights)
    every = [[0, *inner, len(layers)] for inner in combinations(range(1, len(layers)), stages - 1)]
    quickest = min(slowest(seconds, cut) for cut in every)
    assert slowest(seconds, bounds) == quickest
    assert largest(bounds) == min(largest(cut) for cut in every if slowest(seconds, cut) == quickest)


def test_memory_overrules_pace() -> None:
    kwargs = {"state_bytes": [1, 1, 1, 6], "limit_bytes": 7}
    assert balanced_bounds([1, 1, 4, 1], 2) == [0, 2, 4]
    assert balanced_bounds([1, 1, 4, 1], 2, **kwargs) == [0, 2, 4]
    assert balanced_bounds([1, 1, 4, 1], 2, **{**kwargs, "limit_bytes": 6}) == [0, 3, 4]


def test_no_stage_is_left_without_weights() -> None:
    """A layer that has none, however slow, goes with one that has."""
    assert balanced_bounds([1, 9, 1], 2, parameters=[5, 0, 5]) == [0, 1, 3]
    assert balanced_bounds([1, 9, 9, 1], 3) == [0, 1, 2, 4]
    assert balanced_bounds([1, 9, 9, 1, 1], 3, parameters=[5, 0, 0, 5, 5])[1:3] != [1, 2]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stages": 3}, "3 pipeline stages, but the model has 2 layers"),
        ({"stages": 0}, "give 1 to 2 stages"),
        ({"stages": 2, "parameters": [5, 0]}, "too few layers have weights"),
        ({"stages": 2, "state_bytes": [5, 5], "limit_bytes": 4}, "no cut into 2 stages stays within"),
    ],
)
def test_what_cannot_be_cut_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        balanced_bounds([1.0, 1.0], **kwargs)  # type: ignore[arg-type]


def test_the_search_for_a_cut_looks_at_few_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, search = Counter[str](), partition._least_worst

    def counted(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[float, list[int]]:
        return search(layers, stages, lambda *cut: asked.update(["stage"]) or cost(*cut))

    monkeypatch.setattr(partition, "_least_worst", counted)
    balanced_bounds([1.0] * 200, 16, state_bytes=[1] * 200, limit_bytes=20)
    assert asked["stage"] < 3 * 200**2
