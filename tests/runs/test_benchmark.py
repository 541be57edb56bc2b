"""Real benchmarks: real launches, of which some fail, and one that is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import REPO, run_to_its_end

from finetune.bench.result import read_rows
from finetune.bench.table import losses_apart

FINETUNE = [sys.executable, "-m", "finetune.cli", "bench"]
DEEP = {"layers": 4, "width": 64}
TOO_WIDE = {"layers": 1, "width": 400_000}  # one weight of 640 GB
ROOM_KIB = 64 * 2**20  # of addresses: some kernels promise more memory than there is, and kill whoever takes it
WAIT_SECONDS = 120


def grid(folder: Path, *blocks: dict[str, Any], **settings: Any) -> str:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"steps": 3, **settings, "grid": list(blocks)}))
    return str(path)


def bench(*words: str) -> tuple[int, str]:
    return run_to_its_end([*FINETUNE, *words], {"HF_HUB_OFFLINE": "1"})


def going_on(out: Path) -> list[str]:
    return ["--resume"] if out.is_dir() else []


def test_a_cell_that_runs_and_one_that_has_too_little_memory_are_both_results(tmp_path: Path) -> None:
    block = {"models": ["deep", "wide"], "layouts": "none", "micro_batches": 4}
    path = grid(tmp_path, block, models={"deep": DEEP, "wide": TOO_WIDE})
    in_less = ["sh", "-c", f'ulimit -v {ROOM_KIB}; exec "$@"', "sh"]
    status, output = run_to_its_end([*in_less, *FINETUNE, path, "--output_dir", str(tmp_path / "out")])
    assert status == 0, output
    done, failed = read_rows(tmp_path / "out")
    assert (done.status, failed.status, failed.reason) == ("done", "oom", "out of memory"), output
    assert len(done.step_seconds) == 3
    assert len(done.losses) == 3 + 1 + 3  # watched, warm, timed
    assert done.parameters == 4 * (64 * 64 + 64) + 64 * 10 + 10
    kinds = done.memory["by_kind"]
    weights = done.parameters * 4
    assert (kinds["parameters"], kinds["gradients"]) == (weights, weights)
    assert 2 * weights <= kinds["optimizer states"] < 2 * weights + 100
    assert sum(kinds.values()) == done.memory["peak_bytes"][0]
    assert 3 * weights < done.memory["average_bytes"][0] <= done.memory["peak_bytes"][0]
    assert done.planned is not None
    assert done.planned["peak_bytes"] == pytest.approx(done.peak_bytes, rel=0.05)
    assert "can't allocate memory" in (tmp_path / "out" / str(failed.log)).read_text()


@pytest.mark.nightly
def test_a_cell_that_is_late_is_a_result_and_resuming_goes_on_behind_it(tmp_path: Path) -> None:
    block = {"models": "deep", "layouts": "none", "micro_batches": [4, 8]}
    settings = {"models": {"deep": DEEP}}
    out = ["--output_dir", str(tmp_path / "out")]
    assert (
        bench(grid(tmp_path, block, **settings, timeout_seconds=1), *out, "--only", "1x4")[0] == 1
    )  # none was measured
    status, output = bench(grid(tmp_path, block, **settings, timeout_seconds=200), *out, "--resume")
    assert status == 0, output
    assert [(row.cell, row.status) for row in read_rows(tmp_path / "out")] == [
        ("deep-none-1x4", "timeout"),
        ("deep-none-1x8", "done"),
    ]


def test_a_cell_alone_tells_where_its_time_goes(tmp_path: Path) -> None:
    sizes = ["--model", "deep", "--model_changes", '{"layers": 2, "width": 64}', "--use_cpu", "True"]
    asked = ["--profile", "2", "--output_dir", str(tmp_path / "out"), "--result_dir", str(tmp_path)]
    status, output = run_to_its_end([sys.executable, "recipes/benchmark.py", *sizes, *asked])
    assert status == 0, output
    assert json.loads((tmp_path / "out" / "profile" / "summary.json").read_text())
    assert len(json.loads((tmp_path / "rank-0.json").read_text())["seconds"]) == 5


@pytest.mark.nightly
def test_losses_are_those_of_one_process_in_every_layout(tmp_path: Path, built_ops: None) -> None:
    layouts = ["none", "ddp", "checkpointing", "zero1", "zero2", "zero3", "pipeline"]
    every = {"layouts": layouts, "world_sizes": 2, "micro_batches": 4, "global_batch": 8}
    alike = {"models": "gptlite", **every, "layouts": ["none", "zero2", "fsdp", "pipeline"], "stages": 2}
    small = {"num_hidden_layers": 2, "hidden_size": 64, "sequence_tokens": 32}
    out = tmp_path / "out"
    path = grid(tmp_path, {"models": "deep", **every}, alike, models={"deep": DEEP, "gptlite": small},
                learning_rate=0.01)  # fmt: skip
    for only in (
        "none,ddp",
        "checkpointing,zero1",
        "zero2,zero3",
        "*",
    ):  # each within the time that a test's process has
        status, output = bench(path, "--output_dir", str(out), *going_on(out), "--only", only)
        assert status == 0, output
    rows = read_rows(out)
    assert {row.status for row in rows} == {"done"}, [(row.cell, row.reason) for row in rows]
    assert losses_apart(rows) < 0.01
    assert all(row.losses[0] != row.losses[-1] for row in rows)


@pytest.mark.nightly
def test_a_bench_that_is_ended_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    block = {"models": "deep", "layouts": "ddp", "world_sizes": 2, "micro_batches": 4}
    path, out = grid(tmp_path, block, models={"deep": DEEP}), tmp_path / "out"
    command = [*FINETUNE, path, "--output_dir", str(out)]
    for number in (signal.SIGTERM, signal.SIGINT):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*command, *going_on(out)], cwd=REPO, **quiet) as process:
            _wait_for(lambda: len(_ranks(out)) >= 2)
            os.kill(process.pid, number)
            assert process.wait(WAIT_SECONDS) == 128 + number
        assert _ranks(out) == []
        assert not (out / "results.jsonl").exists()
    status, output = bench(path, "--output_dir", str(out), "--resume")
    assert status == 0, output
    assert [row.status for row in read_rows(out)] == ["done"]


def _ranks(out: Path) -> list[int]:
    """Processes of the recipe for this benchmark."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word.endswith("benchmark.py") for word in words) and any(str(out) in word for word in words):
            found.append(process.pid)
    return found


def _wait_for(holds: Any) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "it has not begun"
        time.sleep(0.2)
