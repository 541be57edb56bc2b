"""`plan` and `check` from Python: the command line's answers as frozen dataclasses, without torch."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from page_reader import is_plain

from finetune import check, plan
from finetune.cli import main
from finetune.errors import RequestError


def test_plan_is_callable_whatever_was_imported_before() -> None:
    code = (
        "import sys, finetune.plan.job; from finetune import plan; import finetune.plan.search as search; "
        "print(plan('gpt2', gpu='A100-80GB', search=False).fits, search.__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.split() == ["True", "finetune.plan.search", "False"]
    assert "gpus_per_node" in inspect.signature(plan).parameters
    assert "gpus_per_node" in pydoc.render_doc(plan)
    assert "Raises RequestError" in pydoc.render_doc(plan)


def test_a_plan_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan("gpt2", gpu="A100-80GB", nodes=2, per_device_train_batch_size=2, search=False)
    words = ["plan", "gpt2", "--gpu", "A100-80GB", "--nodes", "2", "--per_device_train_batch_size", "2"]
    assert main([*words, "--no_search", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(found.to_dict())) == told
    assert found.plan.job.world_size == told["job"]["world_size"] == 16
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.fits = False  # type: ignore[misc]


def test_a_recipe_or_a_model_may_be_planned() -> None:
    alone = plan("causal_lm", gpu="H100-80GB", search=False)
    assert alone.plan.job.model.family == "gptlite"
    named = plan("causal_lm", model="gpt2", gpu="H100-80GB", search=False)
    assert named.plan.job.model.family == "gpt2"
    assert plan(model="gpt2", gpu="H100-80GB", search=False).peak_bytes == named.peak_bytes
    assert "It fits" in str(named)


def test_a_question_returns_the_plan_of_its_answer() -> None:
    found = plan("gpt2", gpu="T4", gpus_per_node=1, largest_batch=True, search=False, price_per_gpu_hour=0.4)
    answer, cost = found.outcome.answer, found.outcome.cost
    assert answer is not None
    assert cost is not None
    assert answer.found == found.plan.job.micro_batch
    assert found.fits
    assert found.layouts is None
    assert str(found).startswith("The largest batch that fits: ")
    assert found.to_dict()["answer"]["found"] == answer.found
    assert found.to_dict()["cost"]["price"] == cost.price
    assert is_plain(found._repr_html_())
    assert plan("gpt2", gpu="T4", one_more_gpu=True, search=False).outcome.one_more is not None


def test_a_yaml_is_planned_with_a_model_beside_it_by_its_path_or_its_shipped_name() -> None:
    asked: dict[str, Any] = {"gpu": "RTX4090", "gpus_per_node": 1, "search": False}
    found = [plan(name, model="Qwen3-8B", **asked) for name in ("recipes/configs/lora_24gb.yaml", "lora_24gb")]
    assert [one.peak_bytes for one in found] == [plan("Qwen3-8B", config="lora_24gb", **asked).peak_bytes] * 2


def test_a_plan_shows_itself_with_its_layouts() -> None:
    found = plan(model="gpt2", gpu="A100-80GB", layouts=["zero2", "zero3"])
    assert found.layouts is not None
    page = found._repr_html_()
    assert "Layouts that fit" in page
    assert is_plain(page)
    assert len(page) < 12_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"target": "causal_lm", "learning_rat": 1}, "Did you mean --learning_rate"),
        ({"target": "gpt2", "gpu": "A1OO-80GB"}, "Did you mean A100-80GB"),
        ({"target": "gpt2", "model": "gpt2"}, "Keep one"),
        ({"target": "gpt2", "ranks": 1}, "--gpus_per_node sets the ranks"),
        ({"target": "gpt2", "bf16": "maybe"}, r"--bf16 is 'maybe' \(an argument\)"),
        ({}, "nothing to plan"),
    ],
)
def test_a_plan_that_cannot_be_is_an_exception(words: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        plan(**words)


def test_a_config_is_checked_by_name_by_path_and_as_a_dict(tmp_path: Path) -> None:
    shipped = check("zero2", world_size=2)
    assert shipped.ok
    assert str(shipped) == "0 errors, 0 warnings in 1 file for 2 ranks"
    mistyped = {"gradient_cliping": 1.0, "zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    found = check(mistyped, world_size=2)
    (tmp_path / "mine.json").write_text(json.dumps(mistyped, indent=2))
    assert check(tmp_path / "mine.json", world_size=2).findings == found.findings
    assert [one.finding.code for one in found.errors] == ["DS101"]
    assert not found.ok
    assert "gradient_clipping" in str(found)
    assert check(mistyped, world_size=2, disable=["DS101"]).ok


def test_the_config_of_a_recipes_yaml_is_checked() -> None:
    assert check("lora_zero3", world_size=2).name == "lora_zero3"


def test_a_finding_is_escaped() -> None:
    page = check({"<script>": 1, "zero_optimization": {"stage": 2}})._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert is_plain(page)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"config": "zero9"}, "Did you mean"),
        ({"config": "zero2", "world_size": 0}, "but it must be 1 or more"),
        ({"config": {}, "gpu_name": "X9"}, "not known"),
        ({"config": {}, "disable": ["nonsense"]}, "is not a code"),
    ],
)
def test_a_check_that_cannot_be_is_an_exception(words: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check(**words)
