"""Who is to blame for a run that stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.training.guards.flight import Joined
from finetune.training.guards.verdict import Heartbeat, Position, judge


def report(rank: int, where: str, collective: str, still: float = 60.0, idle: float = 60.0) -> Heartbeat:
    return Heartbeat(rank, 1, Position(where, collective, "key"), still, idle)


SLEEPS = report(1, "sleep (data.py:3)", "")
WAITS = report(0, "all_reduce (c10d.py:9)", "all_reduce")


@pytest.mark.parametrize(
    ("reports", "ages", "ranks", "said"),
    [
        pytest.param(
            [WAITS, SLEEPS],
            {1: 0},
            (1,),
            r"has not moved for 60 s \(--hang_timeout\), in sleep",
            id="one sleeps",
        ),
        pytest.param([WAITS], {1: 45}, (1,), "rank 1 has not responded", id="one gives no sign"),
        pytest.param(
            [WAITS, report(1, "all_gather (c10d.py:7)", "all_gather")],
            {1: 0},
            (),
            "rank 0 in all_reduce .* and rank 1 in all_gather",
            id="two collectives",
        ),
        pytest.param([WAITS, report(1, "all_reduce (c10d.py:9)", "all_reduce")], {1: 0}, (), "network", id="one place"),
    ],
)
def test_the_rank_that_others_wait_for_is_named(
    reports: list[Heartbeat], ages: dict[int, float], ranks: tuple[int, ...], said: str
) -> None:
    import re

    found = judge({one.rank: one for one in reports}, ages, 40, lambda rank: f"rank {rank}")
    assert found is not None
    assert found.ranks == ranks
    assert re.search(said, found.said)


def test_what_the_flight_recorder_knows_is_added_to_what_is_said() -> None:
    number_2 = Joined("gloo's default group", 2, "all_reduce", "of 8 float32", True)
    number_1 = replace(number_2, number=1, under_way=False)
    beats = {0: replace(WAITS, joined=(number_2,)), 1: replace(SLEEPS, joined=(number_1,))}
    said = "all_reduce number 2 of 8 float32 in gloo's default group"
    stands = judge(beats, {1: 0}, 40, lambda rank: f"rank {rank}")
    assert stands is not None
    assert stands.said.endswith(f"waits for it; rank 1 has not joined {said}")
    silent = judge(beats, {1: 45}, 40, lambda rank: f"rank {rank}")
    assert silent is not None
    assert silent.said.endswith(f"; rank 0 has joined {said}, which has not ended")
    beats[1] = replace(report(1, "all_gather (c10d.py:7)", "all_gather"), joined=(number_1,))
    differ = judge(beats, {1: 0}, 40, lambda rank: f"rank {rank}")
    assert differ is not None
    assert differ.said.endswith(f"; rank 1 has not joined {said}")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(report(1, "write (disk.py:3)", "", idle=0), id="moves bytes or computes"),
        pytest.param(report(1, "sleep (data.py:3)", "", still=39, idle=39), id="has moved of late"),
        pytest.param(Heartbeat(1, 1, SLEEPS.position, 60, 60, has_left=True), id="has left"),
        pytest.param(Heartbeat(1, 1, SLEEPS.position, 60, 60, has_stepped=False), id="has not taken a step yet"),
        pytest.param(Heartbeat(1, 1, Position("fsync", "", "key", "saves"), 60, 60), id="saves"),
    ],
)
def test_a_rank_that_works_or_is_done_is_not_blamed(other: Heartbeat) -> None:
    assert judge({0: WAITS, 1: other}, {1: 0}, 40, lambda rank: f"rank {rank}") is None


@pytest.mark.parametrize(
    ("limit", "age", "is_blamed"), [(300, 41, True), (300, 39, False), (5, 6, True), (5, 4, False)]
)
def test_silence_is_given_forty_seconds_at_most_and_a_rank_that_lives_the_whole_limit(
    limit: float, age: float, is_blamed: bool
) -> None:
    assert bool(judge({0: WAITS}, {1: age}, limit, str)) is is_blamed
    lives = {0: report(0, "all_reduce", "all_reduce", age, age), 1: report(1, "sleep", "", age, age)}
    assert bool(judge(lives, {1: 0}, limit, str)) is (age >= limit)


def test_a_run_in_which_all_ranks_wait_for_the_same_disk_or_network_goes_on() -> None:
    both = {0: report(0, "read (hub.py:3)", ""), 1: report(1, "read (hub.py:3)", "")}
    assert judge(both, {1: 0}, 40, lambda rank: f"rank {rank}") is None
