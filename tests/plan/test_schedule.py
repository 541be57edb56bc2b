"""Schedules: the formulas they must obey, and the order in which DeepSpeed's engine really goes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.plan.schedule import BACKWARD, FORWARD, bubble_share, instructions, simulate

stage_counts, micro_counts = st.integers(1, 6), st.integers(1, 12)
durations = st.floats(0.1, 5)


@given(stages=stage_counts, micro_batches=micro_counts)
def test_equal_stages_have_the_bubble_of_the_formula(stages: int, micro_batches: int) -> None:
    plan = simulate(micro_batches, [1.0] * stages, [2.0] * stages)
    assert plan.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert plan.bubble_share == pytest.approx(bubble_share(stages, micro_batches))
    assert plan.makespan == pytest.approx(3.0 * (micro_batches + stages - 1))


@given(stages=stage_counts, micro_batches=micro_counts)
def test_a_stage_holds_as_many_micro_batches_as_stages_follow(stages: int, micro_batches: int) -> None:
    held = simulate(micro_batches, [1.0] * stages, [2.0] * stages).in_flight
    assert held == [min(stages - stage, micro_batches) for stage in range(stages)]


@given(
    micro_batches=micro_counts, times=st.lists(st.tuples(durations, durations), min_size=1, max_size=5), data=st.data()
)
def test_a_schedule_keeps_the_order_of_work(
    micro_batches: int, times: list[tuple[float, float]], data: st.DataObject
) -> None:
    """Uneven stages and slow transfers: each micro-batch goes down, then up; no stage does two things at once."""
    transfer = data.draw(st.floats(0, 1))
    forward, backward = [f for f, _ in times], [b for _, b in times]
    plan = simulate(micro_batches, forward, backward, transfer)
    stages = len(times)
    at = {(e.kind, e.stage, e.micro_batch): e for e in plan.events if e.kind in (FORWARD, BACKWARD)}
    assert len(at) == 2 * stages * micro_batches
    for m in range(micro_batches):
        for s in range(1, stages):
            assert at[FORWARD, s, m].start >= at[FORWARD, s - 1, m].end + transfer - 1e-9
            assert at[BACKWARD, s - 1, m].start >= at[BACKWARD, s, m].end + transfer - 1e-9
        assert at[BACKWARD, stages - 1, m].start >= at[FORWARD, stages - 1, m].end - 1e-9
    for s in range(stages):
        own = sorted((e for e in plan.events if e.stage == s), key=lambda e: (e.start, e.end))
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))
    slowest = max(f + b for f, b in times)
    assert plan.makespan >= micro_batches * slowest - 1e-9
    assert plan.makespan >= sum(forward) + sum(backward) + 2 * transfer * (stages - 1) - 1e-9


def test_a_slow_stage_sets_the_pace() -> None:
    """Worked by hand: stage 1 works 10 x 4 s without a pause, from 1 s on, and stage 0 ends with the last backward."""
    plan = simulate(10, [1.0, 2.0], [1.0, 2.0])
    assert plan.makespan == 1.0 + 10 * 4.0 + 1.0
    assert plan.seconds(1, FORWARD, BACKWARD) == 40.0


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_the_order_is_that_of_deepspeeds_engine(stages: int, micro_batches: int) -> None:
    from deepspeed.runtime.pipe import schedule as deepspeed

    names = {
        FORWARD: deepspeed.ForwardPass,
        BACKWARD: deepspeed.BackwardPass,
        "send down": deepspeed.SendActivation,
        "receive down": deepspeed.RecvActivation,
        "send up": deepspeed.SendGrad,
        "receive up": deepspeed.RecvGrad,
    }
    for stage in range(stages):
        theirs = [
            type(command)
            for commands in deepspeed.TrainSchedule(micro_batches, stages, stage)
            for command in commands
            if type(command) in names.values()
        ]
        assert [names[kind] for kind, _ in instructions(stage, stages, micro_batches)] == theirs
