"""What a person sees of a run: under each launcher, in a terminal and in a pipe."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import LAUNCHERS, REPO, TIMEOUT_SECONDS, TINY, flags, gate_has, launch
from screen import rows_on_screen, run_on_terminal

from finetune.training.summary import rows_of

pytestmark = pytest.mark.usefixtures("built_ops")

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
VALUES = {**TINY, "max_steps": 3, **EVALUATED, "save_strategy": "steps", "save_steps": 1}
PIPELINE = {
    **dict.fromkeys(("max_seq_length", "dropout", "learning_rate", "warmup_steps")),  # the recipe's own
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=64",
    "max_train_samples": 60,
    "max_eval_samples": 16,
    "sample_tokens": 0,
    "pipeline_parallel_size": 2,
    "gradient_accumulation_steps": 2,
}
HOW = [
    ("python", "seq_cls", 1, {}),
    ("deepspeed", "causal_lm_pipeline", 2, PIPELINE),
    ("deepspeed", "seq_cls", 2, {}),
    ("torchrun", "seq_cls", 2, {}),
    ("accelerate", "seq_cls", 2, {}),
]
COLUMNS = 100
LINE = re.compile(r"step 3/3  loss [\d.]+  [\d,.]+ tokens/s  peak [\d.]+ GiB  in 0:\d\d:\d\d")


def seen(launcher: str, recipe: str, ranks: int, folder: Path, values: dict[str, Any], **env: str) -> list[str]:
    words, known = LAUNCHERS[launcher](ranks), {name: value for name, value in values.items() if value is not None}
    if launcher == "accelerate":
        words.append("--multi_gpu")
    command = [*words, f"recipes/{recipe}.py", *flags({"output_dir": folder, **known})]
    given = {"HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", **env}
    status, written = run_on_terminal(command, given, REPO, COLUMNS, TIMEOUT_SECONDS)
    assert status == 0, written[-6000:]
    return rows_on_screen(written, COLUMNS)


@pytest.mark.parametrize(("launcher", "recipe", "ranks", "more"), gate_has(HOW[0], HOW))
def test_a_run_in_a_terminal_is_one_line_with_tables_and_a_summary(
    launcher: str, recipe: str, ranks: int, more: dict[str, Any], tmp_path: Path
) -> None:
    rows = seen(launcher, recipe, ranks, tmp_path / "run", {**VALUES, **more})
    assert [bool(LINE.fullmatch(row)) for row in rows if "step" in row and "GiB" in row] == [True]  # and none is torn
    assert [row for row in rows if row.startswith("evaluation")] == [
        "evaluation after step 2 of 3", "evaluation after step 3 of 3"
    ]  # fmt: skip
    table = rows[rows.index("evaluation after step 3 of 3") + 1 :]
    assert table[0].split() == ["metric", "before", "now", "best"]
    assert table[2].split()[0] == "loss"
    assert len(table[2].split()) == 4
    done = next(place for place, row in enumerate(rows) if row.startswith("done: "))
    shown = " ".join(rows[done:])
    assert "README.md" in shown
    assert "checkpoint-" in shown
    assert "next: finetune report" in shown
    assert not any("'loss':" in row for row in rows)
    assert [name for name, phrase in rows_of(tmp_path / "run") if phrase == "not of the recipe"] == []


@pytest.mark.parametrize("how", [{"env": {"TERM": "dumb"}}, {"values": {"disable_tqdm": True}}], ids=["dumb", "asked"])
@pytest.mark.nightly
def test_a_terminal_that_cannot_or_shall_not_draw_has_a_line_a_log(how: dict[str, Any], tmp_path: Path) -> None:
    values = {**TINY, "max_steps": 3, **EVALUATED, **how.get("values", {})}
    rows = seen("python", "seq_cls", 1, tmp_path / "run", values, **how.get("env", {}))
    logs = "".join(row + " " * (COLUMNS - len(row)) for row in rows)  # which are longer than a row
    assert len(re.findall(r"\{'loss': [\d.]+", logs)) == 3
    assert not any(row.startswith(("step ", "next: ")) for row in rows)


def test_a_run_in_a_pipe_has_a_line_a_log_and_nothing_else(tmp_path: Path) -> None:
    done = launch("python", tmp_path / "run", {**TINY, "max_steps": 3, **EVALUATED, "disable_tqdm": False})
    logs = [ast.literal_eval(line) for line in done.output.splitlines() if line.startswith("{")]
    assert [log["loss"] for log in logs if "loss" in log] == pytest.approx(done.column("loss"), rel=1e-3)
    assert [log for log in logs if "eval_loss" in log]
    assert "\x1b" not in done.output
    assert "\r" not in done.output
    assert "next: " not in done.output
