"""`recipes/generate.py` under every launcher: the same answers on any number of ranks, whole or by ZeRO-3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import LAUNCHERS, gate_has, run_warm, tool
from generation.tiny_models import saved

RECIPE = "recipes/generate.py"
# 11 prompts in batches of 2 on 2 ranks: the last round has a rank without a batch, and one prompt leaves less room
# than it asks for.
TEXTS = ["x" * (3 * number % 17 + 1) + str(number) for number in range(10)] + ["y" * 80]
WORDS = ("--max_new_tokens", "20", "--batch_size", "2")
DRAWN = ("--temperature", "0.8", "--seed", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers end at tokens of their own, so that some ranks are done before others."""
    folder = saved(tmp_path_factory.mktemp("model"), end=True)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": list(range(0, 257, 7))}))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    place.write_text("\n".join(TEXTS))
    return place


def generate(launcher: str, ranks: int, model: Path, prompts: Path, output: Path, *words: str) -> list[dict[str, Any]]:
    command = [*LAUNCHERS[launcher](ranks)]
    if launcher == "accelerate" and ranks > 1:
        command.append("--multi_gpu")
    script = [RECIPE, str(model), "--prompts", str(prompts), "--output", str(output), *WORDS, *words]
    status, said = run_warm([*command, *script], ranks, {**os.environ, "HF_HUB_OFFLINE": "1"})
    assert status == 0, said[-4000:]
    assert said.count("generate: ") == 1, said
    return [json.loads(line) for line in output.read_text().removesuffix("\n").split("\n")]


@pytest.fixture(scope="module")
def alone(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return {
        "greedy": generate("python", 1, model, prompts, folder / "greedy"),
        "drawn": generate("python", 1, model, prompts, folder / "drawn", *DRAWN),
    }


def test_the_reference_has_answers_of_many_lengths(alone: dict[str, Any]) -> None:
    assert [row["index"] for row in alone["greedy"]] == list(range(len(TEXTS)))
    assert len({row["tokens"] for row in alone["greedy"]}) > 3
    assert alone["greedy"] != alone["drawn"]


CASES = [
    ("torchrun", 2, "none"),
    ("deepspeed", 2, "zero3"),
    ("torchrun", 2, "zero3_offload"),
    ("deepspeed", 2, "none"),
    ("accelerate", 2, "none"),
    ("torchrun", 3, "zero3"),
    ("python", 1, "zero3"),
]


@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize(("launcher", "ranks", "deepspeed"), gate_has(CASES[:2], CASES))
def test_any_number_of_ranks_answers_as_one_process(
    launcher: str, ranks: int, deepspeed: str, model: Path, prompts: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    words = ("--deepspeed", deepspeed)
    assert generate(launcher, ranks, model, prompts, tmp_path / "greedy", *words) == alone["greedy"]
    if ranks > 1:
        assert generate(launcher, ranks, model, prompts, tmp_path / "drawn", *words, *DRAWN) == alone["drawn"]


def test_what_is_done_is_done_on_every_rank(model: Path, prompts: Path, tmp_path: Path) -> None:
    first = generate("torchrun", 2, model, prompts, tmp_path / "a")
    script = [RECIPE, str(model), "--prompts", str(prompts), "--output", str(tmp_path / "a"), *WORDS]
    status, said = run_warm([*LAUNCHERS["torchrun"](2), *script], 2, {**os.environ, "HF_HUB_OFFLINE": "1"})
    assert status == 0, said[-4000:]
    assert said.count(f"all {len(TEXTS)} answers are there") == 1
    assert [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()] == first


@pytest.mark.nightly
def test_accelerate_brings_its_own_config_of_zero3(
    model: Path, prompts: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    launch = [tool("accelerate"), "launch", "--config_file", "recipes/launch/accelerate_zero3.yaml"]
    script = [RECIPE, str(model), "--prompts", str(prompts), "--output", str(tmp_path / "a"), *WORDS]
    done = subprocess.run([*launch, *script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ZeRO-3 over 2 rank(s)" in done.stdout
    assert [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()] == alone["greedy"]


@pytest.mark.nightly
def test_a_process_that_is_killed_goes_on(model: Path, prompts: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.txt"
    many.write_text("\n".join(f"{text} {number}" for number in range(15) for text in TEXTS))
    words = [tool("finetune"), "generate", str(model), "--prompts", str(many), *WORDS, "--output"]
    subprocess.run([*words, str(tmp_path / "uncut")], check=True, timeout=300, capture_output=True)
    unfinished, kills = tmp_path / "cut.unfinished", 0
    for _ in range(4):
        before = unfinished.stat().st_size if unfinished.exists() else 0
        with subprocess.Popen([*words, str(tmp_path / "cut")], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and kills < 3:
                if unfinished.exists() and unfinished.stat().st_size > before + 2_000:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    break
                time.sleep(0.01)
        assert process.returncode in (0, -signal.SIGKILL)
    assert kills == 3
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "uncut").read_bytes()
