"""--profile and DeepSpeed's profilers by real launches of the recipes."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, launch

CAUSAL, PIPELINE = "recipes/causal_lm.py", "recipes/causal_lm_pipeline.py"
SHAPE = "num_hidden_layers=4,hidden_size=32,num_attention_heads=2,max_position_embeddings=32"
TINY = {
    "config_overrides": SHAPE,
    "max_steps": 7,
    "logging_steps": 1,
    "do_eval": False,
    "save_strategy": "no",
    "bf16": False,
    "sample_tokens": 0,
    "max_train_samples": 60,
    "per_device_train_batch_size": 4,
}
PROFILE = {"profile": 2, "profile_first_step": 5}


def summary_of(run: Finished, ranks: int) -> dict[str, Any]:
    """The run's parts, once what holds for every run has been looked at: its files, and that the parts add up."""
    found = run.json("profile/summary.json")
    names = {path.name for path in (run.folder / "profile").iterdir()}
    assert names == {"README.md", "parts.png", "summary.json", *(f"rank-{rank}.json.gz" for rank in range(ranks))}
    assert [rank["rank"] for rank in found["ranks"]] == list(range(ranks))
    for rank in found["ranks"]:
        assert [step["step"] for step in rank["steps"]] == found["steps"] == [5, 6]
        for step in rank["steps"]:
            parts = step["parts_nanoseconds"]
            assert sum(parts.values()) == step["nanoseconds"]
            assert min(parts.values()) >= 0
            assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
            assert (sum(transfer["calls"] for transfer in step["transfers"].values()) > 0) == (ranks > 1)
        with gzip.open(run.folder / "profile" / rank["trace"], "rt") as file:
            assert len(json.load(file)["traceEvents"]) > 100
    assert "(profile/parts.png)" in (run.folder / "README.md").read_text()
    assert run.output.count("profile: steps 5 to 6") == 1  # one rank speaks
    assert "USDT" not in run.output  # nor does the profiler's library
    return dict(found)


def transfers(summary: dict[str, Any]) -> set[str]:
    return {name for rank in summary["ranks"] for step in rank["steps"] for name in step["transfers"]}


def test_one_process_communicates_with_nobody(tmp_path: Path) -> None:
    run = launch("python", tmp_path / "run", {**TINY, **PROFILE}, recipe=CAUSAL, env={"OMP_NUM_THREADS": "1"})
    found = summary_of(run, ranks=1)
    assert transfers(found) == set()
    assert found["ranks"][0]["steps"][0]["parts_nanoseconds"]["data"] > 0


def test_the_classifier_under_ddp_shows_its_all_reduce(tmp_path: Path) -> None:
    values = {"max_steps": 7, "max_train_samples": 192, "max_seq_length": 32, "do_eval": False, "save_strategy": "no"}
    run = launch("torchrun", tmp_path / "run", {**values, "bf16": False, **PROFILE}, ranks=2)
    assert "gloo:all_reduce" in transfers(summary_of(run, ranks=2))


@pytest.mark.nightly
def test_zero3_gathers_weights_where_zero2_does_not_in_the_forward_pass(tmp_path: Path) -> None:
    calls = {}
    for config in ("zero2", "zero3"):
        values = {**TINY, **PROFILE, "deepspeed": config}
        found = summary_of(launch("torchrun", tmp_path / config, values, ranks=2, recipe=CAUSAL), ranks=2)
        calls[config] = found["ranks"][0]["steps"][0]["transfers"]["gloo:all_gather"]["calls"]
    assert calls["zero3"] > calls["zero2"] > 0


def test_a_pipeline_shows_its_sends(tmp_path: Path) -> None:
    values = {**TINY, **PROFILE, "pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}
    found = summary_of(launch("torchrun", tmp_path / "run", values, ranks=2, recipe=PIPELINE), ranks=2)
    assert {"gloo:send", "gloo:recv"} <= transfers(found)


def test_a_resumed_run_counts_from_where_it_goes_on(tmp_path: Path) -> None:
    values = {**TINY, "max_steps": 3, "save_strategy": "steps", "save_steps": 3, "resume": "allow"}
    launch("python", tmp_path, values, recipe=CAUSAL)
    (tmp_path / "README.md").unlink()  # as if it had been cut off
    run = launch("python", tmp_path, {**values, **PROFILE, "max_steps": 9}, recipe=CAUSAL)
    assert run.json("profile/summary.json")["steps"] == [8, 9]


def test_deepspeeds_profilers_write_into_the_run_folder(tmp_path: Path) -> None:
    asked = {"flops_profiler": True, "profile_first_step": 3, "comms_logger": True, "ds_monitor": "csv"}
    run = launch("torchrun", tmp_path / "run", {**TINY, "deepspeed": "zero2", **asked}, ranks=2, recipe=CAUSAL)
    assert "Profile Summary at step 3" in (run.folder / "flops.txt").read_text()
    assert "all_reduce" in (run.folder / "comms.txt").read_text()
    ranks = run.json("comms.json")["ranks"]
    assert len(ranks) == 2
    assert all(size["count"] > 0 for rank in ranks for sizes in rank.values() for size in sizes.values())
    with (run.folder / "monitor" / "csv" / "Train_Samples_lr.csv").open() as file:
        header, *lines = csv.reader(file)
    assert header == ["step", "lr"]
    assert len(lines) == TINY["max_steps"]
    config = run.json("ds_config.json")
    assert all(config[name]["enabled"] for name in ("flops_profiler", "comms_logger", "csv_monitor"))


def test_a_run_that_is_too_short_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    run = launch("python", tmp_path / "run", {**TINY, "profile": 3}, recipe=CAUSAL, check=False)
    assert run.status == 2
    (error,) = run.errors
    assert "3 step(s) from --profile_first_step 6 end with step 8, but this run ends with step 7." in error
    assert not (tmp_path / "run").exists()
