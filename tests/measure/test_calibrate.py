"""A tiny calibration makes a profile that a plan can use."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from finetune.errors import RequestError
from finetune.host.hardware import cores_here
from finetune.measure import calibrate as module
from finetune.measure import rates
from finetune.measure.calibrate import LARGE, SMALL, calibrate, known_gpu, reference
from finetune.measure.links import disk, fit
from finetune.measure.outcome import DONE, Outcome
from finetune.measure.start import Measured
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine, write_machine
from finetune.plan.model import model_of
from finetune.plan.seconds import plan_seconds

LITE = {
    "model_type": "gptlite",
    "vocab_size": 65,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def test_a_tiny_calibration_is_a_machine_that_can_be_planned_for(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    argv = [sys.executable, "-W", "ignore", "-m", "finetune.measure.calibrate", str(out), "--quick", "--nvme_path"]
    done = subprocess.run([*argv, str(tmp_path)], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    machine = find_machine(str(out))
    measured = ("peak_flops", "memory_bandwidth", "launch_seconds", "intra_node", "host_link")
    assert all(machine.sources[name].startswith("measured") for name in measured)
    assert machine.sources["inter_node"].startswith("assumed")
    assert machine.sources["nvme"].startswith(("measured", "assumed"))  # a folder in memory takes no O_DIRECT
    device = "cpu" if machine.device == "cpu" else "cuda"
    step = plan_seconds(Job(model_of(LITE), world_size=2, tokens=64, device=device), machine)
    assert 0 < step.total < 10


def test_no_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--ranks is 0"):
        calibrate(tmp_path / "here.json", ranks=0)


def test_more_ranks_than_there_are_cores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus_here", lambda: 0)
    with pytest.raises(RequestError, match=rf"this machine has {cores_here()} core\(s\). Give --ranks {cores_here()}"):
        calibrate(tmp_path / "here.json", ranks=cores_here() + 1)
    monkeypatch.setattr(module, "gpus_here", lambda: 1)
    with pytest.raises(RequestError, match=r"this machine has 1 GPU\(s\). Give --ranks 1"):
        calibrate(tmp_path / "here.json", ranks=2)


def test_what_cannot_be_written_or_read_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    for out in (tmp_path, tmp_path / "none" / "here.json"):
        with pytest.raises(RequestError, match="cannot be written"):
            calibrate(out, ranks=1)
    with pytest.raises(RequestError, match=r"--nvme_path .*: there is no such folder"):
        calibrate(old, ranks=1, nvme_path=tmp_path / "none")
    assert old.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [old]


def test_the_disk_is_timed_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    found = disk(tmp_path)
    if found is None:
        pytest.skip(f"the file system of {tmp_path} takes no O_DIRECT")
    assert min(found.bandwidth_read, found.bandwidth_write) > 1e6
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_already_is_neither_followed_nor_written_over(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / f".finetune_calibration_{os.getpid()}"
    mine.write_text("mine")
    link.symlink_to(mine)
    assert disk(tmp_path) is None
    assert mine.read_text() == "mine"
    assert link.is_symlink()


def test_a_gpu_that_is_not_known_says_what_its_figures_are() -> None:
    found = known_gpu("NVIDIA Quadro RTX 6000")
    assert found.name == "NVIDIA Quadro RTX 6000"
    assert found.sources == dict.fromkeys(find_machine("A100-40GB").sources, "assumed: as A100-40GB")
    assert known_gpu("NVIDIA L4").sources == find_machine("L4").sources


@pytest.mark.parametrize(("precision", "wanted"), [("fp32", ["timed"]), ("tf32", [True, "timed", False])])
def test_products_in_tf32_are_rounded_only_while_they_are_timed(
    precision: str, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[Any]()
    monkeypatch.setattr(rates, "enable_tf32", done.append)
    monkeypatch.setattr(rates, "_seconds_in_turn", lambda *_: done.append("timed") or 1.0)
    rates.product_rates("cpu", precision, rates.Budget(layers=1))
    assert list(dict.fromkeys(done)) == wanted


def test_a_gpu_with_tf32_is_measured_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.training.runtime.choose_precision", lambda has_cuda: "bf16" if has_cuda else "fp32")
    for there, wanted in ((True, ("fp32", "bf16", "fp16", "tf32")), (False, ("fp32", "bf16", "fp16"))):
        monkeypatch.setattr("transformers.utils.is_torch_tf32_available", lambda there=there: there)
        assert module._precisions("cuda") == wanted
        assert module._precisions("cpu") == ("fp32",)


@pytest.mark.parametrize(("name", "precision"), [("cpu", "fp32"), ("T4", "fp16"), ("L4", "bf16")])
def test_the_reference_is_a_job_for_this_machine(name: str, precision: str) -> None:
    """On a GPU its products take longer than their launches, so that the device is measured and not the host."""
    machine = find_machine(name)
    job = reference(machine, 2, SMALL if name == "cpu" else LARGE)
    step = plan_seconds(job, machine)
    assert (job.precision, job.world_size, job.device) == (precision, 2, "cpu" if name == "cpu" else "cuda")
    assert job.tokens <= job.model.sizes("max_position_embeddings")
    assert step.launch < step.total / 3


def test_the_factor_is_the_geometric_mean_of_measured_over_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 and 8 times as long as planned: 4 times. What an older profile said of it does not count."""
    machine = replace(find_machine("cpu"), step_factor=1.7)
    ratios = iter((2.0, 8.0))
    tried: list[str] = []

    def attempt(job: Job, config: dict[str, Any] | None, steps: int) -> Measured:
        tried.append(job.engine)
        planned = plan_seconds(job, replace(machine, step_factor=1.0)).total
        return Measured((0, 0), (0, 0), next(ratios) * planned)

    def run(command: list[str], log: Path, patience: float) -> Outcome:
        write_machine(machine, log.with_name("machine.json"))
        return Outcome(DONE)

    monkeypatch.setattr(module, "attempt", attempt)
    monkeypatch.setattr(module, "run", run)
    calibrate(tmp_path / "here.json", ranks=2)
    found: Machine = find_machine(str(tmp_path / "here.json"))
    assert tried == ["trainer", "deepspeed"]
    assert found.step_factor == pytest.approx(4.0)
    assert found.sources["step_factor"].startswith("measured")


@pytest.mark.parametrize("times", [1, 3, 9])
def test_on_a_gpu_a_launch_takes_as_long_as_in_a_small_model(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host may take several times as long under the Trainer as in the network that was timed alone."""
    machine = find_machine("H200")
    real = replace(machine, launch_seconds=times * machine.launch_seconds)

    def attempt(job: Job, config: dict[str, Any] | None, steps: int) -> Measured:
        return Measured((0,), (0,), plan_seconds(job, real).total)

    def run(command: list[str], log: Path, patience: float) -> Outcome:
        write_machine(machine, log.with_name("machine.json"))
        return Outcome(DONE)

    monkeypatch.setattr(module, "attempt", attempt)
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "gpus_here", lambda: 1)
    calibrate(tmp_path / "here.json", ranks=1)
    found: Machine = find_machine(str(tmp_path / "here.json"))
    assert found.launch_seconds == pytest.approx(real.launch_seconds, rel=0.01)
    assert found.step_factor == pytest.approx(1.0, abs=0.01)
    assert found.sources["launch_seconds"].startswith("measured")


def test_a_line_is_found_again() -> None:
    """1e-3 s and 1 MB/s."""
    latency, bandwidth = fit([(size, 1e-3 + size / 1e6) for size in (10.0, 1e3, 1e5, 1e7)])
    assert latency == pytest.approx(1e-3)
    assert bandwidth == pytest.approx(1e6)
