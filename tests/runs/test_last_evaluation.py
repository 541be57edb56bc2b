"""The evaluation that a run ends with: once where no weight has changed since the last, and again where one has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Finished, launch

pytestmark = pytest.mark.usefixtures("built_ops")

STEPS: dict[str, Any] = {
    "max_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "no",
    "max_eval_samples": 32,
    "bf16": False,
    "use_cpu": True,
}
LANGUAGE: dict[str, Any] = {"block_size": 32, "sample_tokens": 4, "max_train_samples": 20}


def evaluations(run: Finished) -> list[dict[str, Any]]:
    rows = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "eval_loss" in row]


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        ("seq_cls", {**TINY, "max_train_samples": 64}),
        pytest.param("token_cls", {**TINY, "max_train_samples": 64}, marks=pytest.mark.nightly),
        ("image_cls", {"max_train_samples": 64}),
        ("image_cls", {"max_train_samples": 64, "model_type": "alexnet", "pipeline_parallel_size": 1}),
        ("causal_lm", LANGUAGE),
        ("causal_lm_pipeline", LANGUAGE),
    ],
    ids=["seq_cls", "token_cls", "image_cls", "image_cls as a pipeline", "causal_lm", "causal_lm_pipeline"],
)
def test_what_was_evaluated_at_the_last_step_is_not_evaluated_again(
    recipe: str, values: dict[str, Any], tmp_path: Path
) -> None:
    launcher = "deepspeed" if "pipeline" in f"{recipe} {values}" else "python"
    run = launch(launcher, tmp_path / "run", {**values, **STEPS}, recipe=f"recipes/{recipe}.py")
    rows = evaluations(run)
    assert [row["step"] for row in rows] == [2, 4]
    closing = run.json("eval_results.json")
    same = {name for name in rows[-1] if name.startswith("eval_")}
    assert {name: closing[name] for name in same} == {name: rows[-1][name] for name in same}
    if "cls" in recipe:
        assert (run.folder / "confusion_matrix.png").is_file()


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        pytest.param({"learning_rate": 0, "load_best_model_at_end": True}, [2, 4, 4], id="the best was before"),
        pytest.param({"eval_steps": 3}, [3, 4], id="not at the last step"),
        pytest.param({"eval_strategy": "no", "eval_steps": None}, [4], id="not while it trained"),
        pytest.param({"bf16_full_eval": True}, [2, 4, 4], id="by weights that are cast"),
    ],
)
def test_what_has_changed_since_is_evaluated_again(values: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2} if "load_best_model_at_end" in values else {}
    asked = {**TINY, "max_train_samples": 64, **STEPS, **saves, **values}
    run = launch("python", tmp_path / "run", {name: value for name, value in asked.items() if value is not None})
    assert [row["step"] for row in evaluations(run)] == steps


def test_the_figures_at_the_end_are_those_of_the_model_that_was_saved(tmp_path: Path) -> None:
    asked = {**TINY, "max_train_samples": 64, **STEPS, "learning_rate": 1e-2}
    run = launch("torchrun", tmp_path / "run", asked, ranks=2)
    alone = {**TINY, "max_train_samples": 64, "do_train": False, "model_name_or_path": run.folder, "bf16": False}
    del alone["max_steps"]
    again = launch("python", tmp_path / "again", {**alone, "max_eval_samples": 32})
    assert again.json("eval_results.json")["eval_loss"] == pytest.approx(run.json("eval_results.json")["eval_loss"])
    assert again.json("confusion_matrix.json") == run.json("confusion_matrix.json")


def test_a_run_says_what_it_reads_and_how(tmp_path: Path) -> None:
    rows = [f"Título {i};déjà vu número {i}: {'bueno' if i % 2 else 'malo'};{i % 2}.0\n" for i in range(60)]
    (tmp_path / "rows.csv").write_bytes("".join(["title;body;category\n", *rows]).encode("cp1252"))
    values = {**TINY, "train_file": tmp_path / "rows.csv", "max_steps": 2, "eval_strategy": "no"}
    first = launch("python", tmp_path / "run", values)
    said = next(line for line in first.output.splitlines() if line.startswith("data: rows.csv"))
    for part in (
        "reads body as text, category as label, not title",
        "2 labels",
        "rows.csv read as cp1252 (--encoding overrides this)",
        "its labels are whole numbers, and so classes (--task regression predicts numbers)",
    ):
        assert part in said
    assert "model: DistilBERT from scratch, size tiny; --model_name_or_path takes any other" in first.output
    card = (first.folder / "README.md").read_text()
    assert "# Text classification on rows.csv" in card
    assert "Reads body as text, category as label, not title." in card
    values |= {"model_name_or_path": first.folder, "task": "classification", "encoding": "cp1252"}
    second = launch("python", tmp_path / "again", {k: v for k, v in values.items() if k != "model_size"})
    assert "takes any other" not in second.output
    assert "read as cp1252" not in second.output
    assert "and so classes" not in second.output
