"""Plans of the runs that benchmarks/plan_gpu.py has measured on a GPU."""

from __future__ import annotations

import json
import statistics

import pytest
from conftest import REPO
from plan_gpu import CASES, GIB, Case, with_constants

from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.seconds import plan_seconds

FOUND = json.loads((REPO / "docs" / "results" / "plan_gpu.json").read_text(encoding="utf-8"))
MEASURED = {row["name"]: row["peak"][1] for row in FOUND["rows"]}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in MEASURED], ids=lambda case: case.name)
def test_the_peak_of_a_gpus_allocator_is_planned(case: Case) -> None:
    """Of large runs to 1%. In small ones what the allocator leaves in its blocks counts, which plans do not have."""
    measured = MEASURED[case.name]
    planned = plan_memory(case.job, find_machine("H200")).step_peak.bytes
    assert planned == pytest.approx(measured, rel=0.01 if measured >= 10 * GIB else 0.03)


def test_step_times_follow_from_three_constants() -> None:
    """Of one host and chip. Steps that wait for the host vary by a sixth from run to run."""
    machine, jobs = with_constants(find_machine("H200"), FOUND["constants"]), {case.name: case.job for case in CASES}
    errors = [abs(plan_seconds(jobs[row["name"]], machine).total / row["seconds"][1] - 1) for row in FOUND["rows"]]
    assert statistics.median(errors) < 0.09
    assert max(errors) < 0.45


def test_step_times_of_held_out_runs_follow_from_the_other_runs() -> None:
    errors = {row["name"]: row["held_out"] / row["seconds"][1] - 1 for row in FOUND["rows"]}
    assert statistics.median(map(abs, errors.values())) < 0.095
    assert max(map(abs, errors.values())) < 0.44
    joined = [error for name, error in errors.items() if "-zero0" in name or "-zero1" in name or "-zero2" in name]
    assert abs(statistics.median(joined)) < 0.1


def test_every_measured_run_is_planned() -> None:
    assert len(MEASURED) > 30
    assert not MEASURED.keys() - {case.name for case in CASES}


def test_all_runs_fit_into_80_gib() -> None:
    machine = find_machine("H100-80GB")
    assert max(plan_memory(case.job, machine).step_peak.bytes for case in CASES) < 0.9 * machine.memory_bytes
