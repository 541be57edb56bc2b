"""Plans beside real runs, by the real launcher."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPO, tool

pytestmark = pytest.mark.nightly
TINY = {"model_type": "gptlite", "vocab_size": 500, "num_hidden_layers": 3, "hidden_size": 128,
        "num_attention_heads": 4, "max_position_embeddings": 128}  # fmt: skip
HERE = ["--nodes", "1", "--gpus_per_node", "2", "--block_size", "128"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def plan(*words: str) -> str:
    done = subprocess.run([tool("finetune"), "plan", *words], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(text: str, name: str) -> tuple[float, float]:
    found = re.search(rf"^{name}.*? ([\d.]+) +([\d.]+) ", text, re.MULTILINE)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("layout", ["none", "zero1", "zero2", "zero3", "zero3_offload", "pipeline"])
def test_the_plan_is_what_the_run_takes(layout: str, model: str) -> None:
    words = [model, *HERE, "--per_device_train_batch_size", "8", "--deepspeed", layout, "--verify"]
    if layout == "pipeline":
        words += ["--pipeline_parallel_size", "2", "--gradient_accumulation_steps", "4"]
    said = plan(*words)
    planned, measured = figures(said, "between steps")
    assert planned == pytest.approx(measured, rel=0.01)
    planned, measured = figures(said, "peak")
    assert planned == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("vocabulary", "flags"),
    [(500, ["--optim", "sgd"]), (12_000, [])],
    ids=["SGD, which has no states", "a loss in chunks"],
)
@pytest.mark.parametrize("layout", ["none", "zero1"])
def test_the_optimizer_and_the_loss_are_those_that_were_planned(
    layout: str, vocabulary: int, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": vocabulary}))
    words = [*HERE, "--per_device_train_batch_size", "8", "--deepspeed", layout, "--no_search"]
    job = json.loads(plan(str(tmp_path), *words, *flags, "--json"))["job"]
    assert (job["optimizer"], job["loss_chunk_tokens"]) == (("sgd", 0) if flags else ("adam", 512))
    said = plan(str(tmp_path), *words, *flags, "--verify")
    planned, measured = figures(said, "between steps")
    assert planned == pytest.approx(measured, rel=0.01)
    planned, measured = figures(said, "peak")
    assert planned == pytest.approx(measured, rel=0.03)


def test_the_best_are_run_and_the_winner_is_written(model: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    words = ["--global_batch_size", "16", "--layouts", "zero1", "zero2", "--autotune", "2", "--write", str(path)]
    said = plan(model, *HERE, *words)
    measured = [float(speed) for speed in re.findall(r"planned [\d.]+, measured ([\d.]+) samples/s", said)]
    assert len(measured) == 2
    first = re.search(r"^1 .*", said, re.MULTILINE)  # of the table, which is by what was measured
    assert first
    assert f"{max(measured):.4g}" in first[0]
    assert json.loads(path.read_text())["zero_optimization"]["stage"] in (1, 2)


def test_a_run_out_of_memory_is_a_result(model: str) -> None:
    """In an address space of 6 GB, of which a batch of 4,096 would take more than all."""
    words = [model, *HERE, "--per_device_train_batch_size", "4096", "--deepspeed", "none", "--verify"]
    line = f"ulimit -v 6000000; {tool('finetune')} plan {' '.join(words)}"
    done = subprocess.run(["bash", "-c", line], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1
    found = re.search(r"ended: out of memory \(its log: (\S+/log.txt)\)", done.stderr)
    assert found, done.stderr
    assert "memory" in Path(found[1]).read_text()
    shutil.rmtree(Path(found[1]).parent)
