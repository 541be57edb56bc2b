"""--push_to_hub, by a real run against a hub on this machine: private, with the run's own card, and no token left."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, TINY, Finished, gate_has, launch
from fake_hub import TOKEN, FakeHub, fake_hub
from huggingface_hub.utils import filter_repo_objects

from finetune.training.hub import LEFT_OUT

NIGHTLY = pytest.mark.nightly  # a true start, for the hub's address is read when its client is imported
PUSH = {**TINY, "max_steps": 2, "push_to_hub": True, "hub_model_id": "my-model"}


def push(hub: FakeHub, folder: Path, ranks: int = 1, env: dict[str, str] | None = None, **values: Any) -> Finished:
    launcher = "python" if ranks == 1 else "torchrun"
    every = {**hub.environment(), **(env or {})}
    return launch(launcher, folder, {**PUSH, **values}, ranks=ranks, env=every, recipe=RECIPE, check=False)


@pytest.mark.parametrize("ranks", gate_has(1, [1, 2]))
def test_a_run_is_pushed_once_privately_with_its_card(ranks: int, tmp_path: Path) -> None:
    with fake_hub() as hub:
        run = push(hub, tmp_path / "run", ranks, save_strategy="steps", save_steps=1)
        left = [name for name in hub.files if any(fnmatch(name, pattern) for pattern in LEFT_OUT)]
        assert left == []
        assert (run.folder / "_lock").is_file()
    assert run.status == 0, run.output[-3000:]
    assert hub.repos == {"me/my-model": True}
    assert "pushed to me/my-model" in run.output
    assert hub.commits == ["End of training"]
    assert hub.files["README.md"] == (run.folder / "README.md").read_bytes()
    assert b"pipeline_tag: text-classification" in hub.files["README.md"]
    assert hub.files["model.safetensors"] == (run.folder / "model.safetensors").read_bytes()
    assert not any(name.startswith(("checkpoint-", "_")) for name in hub.files)
    assert hub.tokens - {""} == {f"Bearer {TOKEN}"}  # large files go to addresses that are signed
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in run.output
    assert not [name for name, content in hub.files.items() if TOKEN.encode() in content]


@pytest.mark.parametrize(
    ("hub", "env", "values", "message"),
    [
        pytest.param(
            {},
            {"HF_TOKEN": "", "HF_HOME": "/nonexistent"},
            {},
            "nobody is logged in",
            id="no token",
            marks=NIGHTLY,
        ),
        pytest.param({}, {"HF_HUB_OFFLINE": "1"}, {}, "HF_HUB_OFFLINE is set", id="offline"),
        pytest.param(
            {},
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            {},
            "--push_to_hub is True (command line): ",
            id="no hub",
            marks=NIGHTLY,
        ),
        pytest.param({"role": "read"}, {}, {}, "the token is read-only", id="read only", marks=NIGHTLY),
        pytest.param({}, {}, {"hub_token": "hf_CANARY"}, "everyone on this machine", id="token by flag"),
        pytest.param(
            {},
            {},
            {"hub_strategy": "every_save"},
            "--hub_strategy is 'every_save' (command line): ",
            id="at each save",
            marks=NIGHTLY,
        ),
        pytest.param(
            {"repos": {"me/my-model": False}}, {}, {}, "already exists and is public", id="public", marks=NIGHTLY
        ),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(
    hub: dict[str, Any], env: dict[str, str], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with fake_hub(**hub) as one:
        run = push(one, tmp_path / "run", env=env, **values)
    assert run.status == 2, run.output[-3000:]
    assert len(run.errors) == 1
    assert message in run.errors[0]
    assert "{" not in run.errors[0]
    assert "CANARY" not in run.output
    assert one.commits == []
    assert not list((tmp_path / "run").glob("*"))


def test_a_push_that_fails_loses_nothing_and_says_how_to_try_again(tmp_path: Path) -> None:
    with fake_hub(broken=True) as hub:
        run = push(hub, tmp_path / "run")
    assert run.status == 1
    assert "pushing it failed" in run.errors[0]
    assert f'hf upload me/my-model {run.folder} --private --exclude "_*" --exclude "*checkpoint-*" ' in run.errors[0]
    assert (run.folder / "model.safetensors").is_file()
    assert (run.folder / "README.md").is_file()


def test_what_of_a_run_folder_is_no_model_is_not_pushed() -> None:
    names = (
        "_lock checkpoint-4/model.safetensors superseded-checkpoint-4/a/b deleting-checkpoint-4/a unfinished-final/a"
    )
    names += " unfinished-checkpoint-8/checkpoint-8/a replaced-checkpoint-4/a _nan/step-5/batch.pt final/config.json"
    models = "model.safetensors model-00001-of-00002.safetensors README.md predictions.csv plots/loss.png finale.txt"
    assert set(filter_repo_objects([*names.split(), *models.split()], ignore_patterns=LEFT_OUT)) == set(models.split())


def asked_of_the_hub(hub: FakeHub, home: Path) -> str:
    """By a process of its own, for the client reads the hub's address when it is imported."""
    words = (
        "from finetune.models.sentence_folder import read_sentence_model as read; print(read('me/model', 'main', None))"
    )
    environment = {**os.environ, **hub.environment(), "HF_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@NIGHTLY
def test_a_model_of_the_hub_without_the_file_is_told_from_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    with fake_hub(broken=True) as hub:
        assert "the hub could not be searched for it" in asked_of_the_hub(hub, tmp_path)
    with fake_hub() as hub:
        assert "SentenceModel(pooling=None" in asked_of_the_hub(hub, tmp_path)
