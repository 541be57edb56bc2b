"""The schedules of ours against torch's own, and what is wrong with their kwargs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from transformers import get_scheduler

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve
from finetune.run.schedules import rule_of
from finetune.run.snapshot import REQUIRED, snapshot

RATE = 0.3


def rates(optimizer: torch.optim.Optimizer, schedule: LRScheduler, steps: int) -> list[float]:
    found = []
    for left in range(steps, 0, -1):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if left > 1:
            schedule.step()
    return found


def one() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=RATE)


@pytest.mark.parametrize("steps", [2, 3, 17, 100])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"anneal_strategy": "linear"},
        {"pct_start": 0.45, "div_factor": 10, "final_div_factor": 100},
        {"pct_start": 0.4, "three_phase": True},
        {"pct_start": 1.0},
        {"pct_start": 0.0, "anneal_strategy": "linear"},
    ],
    ids=str,
)
def test_one_cycle_is_torchs(kwargs: dict[str, Any], steps: int) -> None:
    optimizer = one()
    schedule = OneCycleLR(optimizer, RATE, steps, cycle_momentum=False, **kwargs)
    rule = rule_of("one_cycle", steps, kwargs)
    assert rule is not None
    assert [RATE * rule(step) for step in range(steps)] == pytest.approx(rates(optimizer, schedule, steps), rel=1e-9)
    assert rule(steps) == rule(steps - 1)


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_one_cycle_has_a_rate_where_torch_divides_by_zero(share: float, steps: int) -> None:
    rule = rule_of("one_cycle", steps, {"pct_start": share})
    assert rule is not None
    assert all(0 < rule(step) <= 1 for step in range(steps + 1))


@pytest.mark.parametrize("kwargs", [{"step_size": 1}, {"step_size": 4, "gamma": 0.5}, {"step_size": 50}], ids=str)
def test_step_is_torchs(kwargs: dict[str, Any]) -> None:
    optimizer = one()
    rule = rule_of("step", 20, kwargs)
    assert rule is not None
    found = rates(optimizer, StepLR(optimizer, **kwargs), 20)
    assert [RATE * rule(step) for step in range(20)] == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("recipe", [SEQ_CLS, CAUSAL_LM, CAUSAL_LM_PIPELINE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("kind", "kwargs", "said"),
    [
        ("step", None, r"--lr_scheduler_type is 'step' .*step_size is missing\. It takes step_size, gamma"),
        ("step", {"step": 3}, "step is unknown"),
        ("step", {"step_size": 0}, "whole number of steps, 1 or more"),
        ("step", {"step_size": 2.5}, "whole number of steps, 1 or more"),
        ("step", {"step_size": 2, "gamma": 0}, "gamma is 0, but must be more"),
        ("step", {"step_size": 2, "gamma": "a"}, "--lr_scheduler_kwargs"),
        ("one_cycle", {"max_lr": 1}, "max_lr is unknown.*It takes pct_start"),
        ("one_cycle", {"pct_start": 2}, "from 0 to 1"),
        ("one_cycle", {"anneal_strategy": "sin"}, "'cos' or 'linear'"),
        ("one_cycle", {"div_factor": 0}, "must be more than 0"),
        ("cosine", {"foo": 1}, "foo is unknown. It takes num_cycles"),
        ("linear", {"foo": 1}, "foo is unknown. It takes none"),
        ("cosine", {"num_cycles": "a"}, "num_cycles is 'a', but must be a number"),
        ("cosine_with_min_lr", None, "it needs one of min_lr and min_lr_rate"),
        ("warmup_stable_decay", {"min_lr_ratio": 0.1}, "num_decay_steps is missing"),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "x"}, "decay_type is 'x', but must be one of"),
        ("polynomial", {"lr_end": 1.0}, "lr_end, which must be less than --learning_rate"),
        ("StepLR", None, "you may mean step"),
        ("OneCycleLR", None, "you may mean one_cycle"),
    ],
)
def test_what_a_schedule_does_not_take_is_refused(recipe: Any, kind: str, kwargs: Any, said: str) -> None:
    words = ["--lr_scheduler_type", kind, *(["--lr_scheduler_kwargs", json.dumps(kwargs)] if kwargs else [])]
    with pytest.raises(RequestError, match=said):
        resolve(recipe, words, Launch(), is_here=False)


FULL = {
    "cosine_with_min_lr": {"min_lr": 0.0},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


@pytest.mark.parametrize("kind", [one for one in snapshot()["schedules"] if not one.startswith("constant")])
def test_what_is_taken_transformers_takes(kind: str) -> None:
    usual = {name: value for name, value in snapshot()["schedules"][kind].items() if value not in (None, REQUIRED)}
    given = usual | FULL.get(kind, {})
    words = ["--lr_scheduler_type", kind, *(["--lr_scheduler_kwargs", json.dumps(given)] if given else [])]
    resolve(SEQ_CLS, words, Launch(), is_here=False)
    get_scheduler(kind, one(), 2, 10, given)


def test_kwargs_of_a_schedule_are_named_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr_scheduler_type: cosine\nlr_scheduler_kwargs: {foo: 1}\n")
    with pytest.raises(RequestError, match=r"--lr_scheduler_kwargs is {'foo': 1} \(.*a\.yaml line 2\): foo is unknown"):
        resolve(SEQ_CLS, ["--config", str(tmp_path / "a.yaml")], Launch(), is_here=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--warmup_steps 500 --max_steps 4", "--warmup_steps is 500.0"),
        ("--warmup_steps 0.5 --max_steps 4", None),
        ("--warmup_steps 500", None),
        ("--learning_rate 0", "--learning_rate is 0.0"),
    ],
)
def test_rates_with_which_nothing_is_learnt_are_said(flags: str, words: str | None, tmp_path: Path) -> None:
    run = resolve_here(SEQ_CLS, [*flags.split(), "--output_dir", str(tmp_path / "run")], Launch())
    assert len(run.notes) == (words is not None)
    assert words is None or words in run.notes[0]
