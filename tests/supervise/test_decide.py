"""When a run that has ended is started again."""

from __future__ import annotations

import pytest

from finetune.supervise.decide import LONGEST_PAUSE_SECONDS, End, Judge


def failed(step: int | None = None, newest: int = 0, status: int = 1, **more: object) -> End:
    return End(status, step, newest, **more)  # type: ignore[arg-type]


def test_restarts_that_bring_no_new_checkpoint_are_bounded_and_wait_ever_longer() -> None:
    judge = Judge(max_restarts=3, fewest_hosts=1, newest=0)
    assert [judge.judge(failed()).pause_seconds for _ in range(4)] == [1.0, 2.0, 4.0, None]


def test_a_new_checkpoint_resets_the_count() -> None:
    judge = Judge(max_restarts=1, fewest_hosts=1, newest=0)
    assert [judge.judge(failed(newest=10 * n)).pause_seconds for n in range(1, 30)] == [1.0] * 29
    assert judge.judge(failed(newest=290)).pause_seconds is None


def test_the_pause_has_a_bound() -> None:
    judge = Judge(max_restarts=50, fewest_hosts=1, newest=0)
    assert max(judge.judge(failed()).pause_seconds or 0 for _ in range(40)) == LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize("status", [2, 130])
def test_a_wrong_request_and_an_interruption_are_not_tried_again(status: int) -> None:
    assert Judge(9, 1, 0).judge(failed(status=status, newest=10)).pause_seconds is None


def test_a_step_that_fails_twice_in_a_row_stops_the_run_and_its_samples_are_named() -> None:
    judge = Judge(9, 1, 0)
    assert judge.judge(failed(57, newest=50)).pause_seconds is not None
    verdict = judge.judge(failed(57, newest=50, samples=list(range(3, 23))))
    assert verdict.pause_seconds is None
    assert "step 57 has failed twice" in verdict.said
    assert "rows 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18 and 4 more" in verdict.said


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(failed(58), id="another step"),
        pytest.param(failed(None), id="no step: while it started, saved or evaluated"),
        pytest.param(failed(57, status=75), id="a signal"),
    ],
)
def test_what_is_between_two_failures_of_a_step_makes_them_two(between: End) -> None:
    judge = Judge(9, 1, 0)
    ends = [failed(57), between, failed(57)]
    assert all(judge.judge(end).pause_seconds is not None for end in ends)


def test_without_a_known_step_nothing_is_blamed_on_samples() -> None:
    judge = Judge(9, 1, 0)
    assert all(judge.judge(failed(None)).pause_seconds is not None for _ in range(4))


def test_a_batch_that_does_not_divide_is_tried_on_fewer_hosts() -> None:
    judge = Judge(9, fewest_hosts=2, newest=0)
    verdict = judge.judge(failed(status=2, most_hosts=2))
    assert (verdict.most_hosts, verdict.pause_seconds) == (2, 1.0)
    assert judge.judge(failed(status=2, most_hosts=1)).pause_seconds is None  # fewer than --nnodes allows
    assert judge.judge(failed(status=2, most_hosts=0)).pause_seconds is None
    assert judge.judge(failed()).most_hosts is None  # after another failure, all that are left again
