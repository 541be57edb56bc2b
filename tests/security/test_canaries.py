"""What a run must not tell: tokens, passwords, keys of the environment, and whose home folder it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, launch

from finetune.cli import main
from finetune.privacy import without_home

SECRETS = {
    "HF_TOKEN": "hf_CANARYone0000000000000000000000",
    "WANDB_API_KEY": "CANARYtwo" + "0" * 31,
    "AWS_SECRET_ACCESS_KEY": "CANARYthree",
    "MY_SERVICE_KEY": "CANARYfour",
    "DB_PASSWORD": "CANARYfive",
    "HTTPS_PROXY": "http://user:CANARYsix@127.0.0.1:9",
    "GITHUB_TOKEN": "ghp_CANARYseven00000000000000000",
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "seq_cls with DeepSpeed": ("recipes/seq_cls.py", {"deepspeed": "zero2", "bf16": False}),
    "seq_cls alone": ("recipes/seq_cls.py", {"bf16": False}),
    "image_cls": ("recipes/image_cls.py", {"bf16": False}),
    "causal_lm": ("recipes/causal_lm.py", {"bf16": False}),
}


def found_in(folder: Path, word: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path.relative_to(folder).as_posix() for path in files if word.encode() in path.read_bytes()]


def run_with_canaries(name: str, home: Path) -> tuple[Path, str]:
    recipe, values = RUNS[name]
    home.mkdir()
    (home / "train.csv").write_text("text,label\n" + "".join(f"word {i % 7} is {i % 2},{i % 2}\n" for i in range(80)))
    small = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "max_train_samples": 64,
             "max_eval_samples": 16}  # fmt: skip
    if recipe.endswith("seq_cls.py"):
        small = {**TINY, **small, "train_file": home / "train.csv"}
    environment = {**SECRETS, "HOME": str(home), "WANDB_MODE": "offline", "WANDB_DIR": str(home / "wandb")}
    done = launch("python", home / "runs", {**small, **values}, recipe=recipe, env=environment)
    return done.folder, done.output


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_the_environment_is_in_a_run_or_its_output(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    home = tmp_path / "CANARYhome"
    folder, output = run_with_canaries(name, home)
    monkeypatch.setenv("HOME", str(home))
    assert main(["report", str(folder), "--html", str(folder / "report.html")]) == 0
    assert main(["export", str(folder / "checkpoint-2"), str(folder / "exported")]) == 0
    assert found_in(folder, "CANARY") == []
    assert "CANARY" not in output
    assert "~/runs" in (folder / "environment.json").read_text()  # what it is in place of the home folder


@pytest.mark.nightly
def test_the_recorded_flags_start_the_run_again(tmp_path: Path) -> None:
    """recipe.yaml names files below the home folder by "~"."""
    home = tmp_path / "home"
    folder, _ = run_with_canaries("seq_cls alone", home)
    assert "~/train.csv" in (folder / "recipe.yaml").read_text()
    values = {"config": folder / "recipe.yaml"}
    again = launch("python", home / "again", values, env={"HOME": str(home)})
    assert [row["loss"] for row in again.steps] == [
        row["loss"] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in row
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/runs/a", "~/runs/a"),
        ("at /home/ann: full", "at ~: full"),
        ("--output_dir=/home/ann/x", "--output_dir=~/x"),
        ("/home/anna/x", "/home/anna/x"),
        ("/mnt/home/ann/x", "/mnt/home/ann/x"),
    ],
)
def test_the_home_folder_is_shown_as_a_tilde(text: str, shown: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert without_home(text) == shown
    assert without_home({"a": [text, 3]}) == {"a": [shown, 3]}


def test_a_home_that_is_the_root_is_nobodys(monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/")
    assert without_home("/data/x") == "/data/x"


def test_an_error_names_no_home_folder(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) not in said
    assert "~/nothing" in said
