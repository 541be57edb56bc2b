"""Loops over tokens in recordings, cut down to the iterations that a plan needs."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.measure.loops import KEPT, fold
from finetune.measure.recording import Recording

BODY = ("select", "mul", "add")


def recorded(iterations: int, body: tuple[str, ...] = BODY) -> Recording:
    """A loop whose state is multiplied, and whose iterations' last results are stacked when it is over."""
    run = Recording({})

    def op(name: str, *given: int, size: int = 1) -> int:
        run.facts.append([size, 4, len(run.last), 1])
        run.last.append(len(run.ops) + 1)
        for number in given:
            run.last[number] = max(run.last[number], len(run.ops))
        run.ops.append({"name": name, "in": [*given], "out": [len(run.facts) - 1], "saved": [*given], "weights": [],
                        "gemms": [], "segment": 1, "part": False, "inside": False})  # fmt: skip
        return len(run.facts) - 1

    whole = op("linear", size=10 * iterations)
    state, made = op("zeros"), []
    for _ in range(iterations):
        found: list[int] = []
        for name in body:
            found.append(op(name, *found[-1:], state if name == body[1] else whole))
        state = found[1]
        made.append(found[-1])
    stacked = op("stack", *made, size=iterations)
    run.result = op("sum", op("silu", stacked))
    return run


def test_all_iterations_but_five_are_cut_and_one_stands_for_them() -> None:
    runs = [recorded(many) for many in (6, 8, 30)]
    assert fold(runs)
    for run, many in zip(runs, (6, 8, 30), strict=True):
        assert [op["name"] for op in run.ops] == ["linear", "zeros", *BODY * KEPT, "stack", "silu", "sum"]
        assert {op["times"] for op in run.ops if "times" in op} == {many - KEPT + 1}
        assert [place for place, op in enumerate(run.ops) if "times" in op] == [8, 9, 10]
    first, *others = runs
    assert all((one.last, one.result) == (first.last, first.result) for one in others)
    assert all([{**op, "times": 0} for op in one.ops] == [{**op, "times": 0} for op in first.ops] for one in others)
    assert [[run.facts[0][0], run.facts[-3][0]] for run in runs] == [[60, 6], [80, 8], [300, 30]]


def test_only_what_outlives_the_loop_is_held_and_what_is_cut_is_read_of_what_stands_for_it() -> None:
    runs = [recorded(many) for many in (6, 9)]
    assert fold(runs)
    stack = next(op for op in runs[1].ops if op["name"] == "stack")
    kept = [op["out"][0] for op in runs[1].ops if op["name"] == "add"]
    assert stack["in"] == kept
    assert [op["held"] for op in runs[1].ops if "held" in op] == [[], [], [kept[2]]]
    last = runs[1].ops[2 + 3 * len(BODY) + 1]
    assert last["name"] == "mul"
    assert last["in"][1] == next(op["out"][0] for op in runs[1].ops if op.get("times") and op["name"] == "mul")


def test_recordings_without_loops_stay_as_they_are() -> None:
    runs = [recorded(7), recorded(7)]
    before = [dict(op) for op in runs[0].ops]
    assert fold(runs)
    assert runs[0].ops == before


@pytest.mark.parametrize("runs", [(2, 3), (7, (7, "other")), ((7, "other"), (9, "select"))], ids=str)
def test_what_differs_by_more_than_loops_is_not_folded(runs: tuple[Any, Any]) -> None:
    made = [recorded(one) if isinstance(one, int) else recorded(one[0], (one[1], "mul", "add")) for one in runs]
    assert not fold(made)
