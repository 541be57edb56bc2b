"""Hosts come and go while a run goes on: it shrinks, grows back, and takes the steps of a run that was never cut. Each
host is a supervisor with a torchrun of its own on this machine, under an address of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import NOT_JUDGED, RECIPE, REPO, TINY, Finished, flags, kill_family, launch, steps_of

from finetune.run.supervised import told

pytestmark = pytest.mark.nightly

STEPS = 160
FAULTY, PIPELINE = "tests/runs/faulty.py", "recipes/causal_lm_pipeline.py"
RUN = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 20,
    "save_total_limit": 2,
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-5,  # a small rate, so that rounding does not grow over the steps
}
CLASSIFIER = {**TINY, **NOT_JUDGED, "per_device_train_batch_size": 8}
OF_THREE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}  # 24 samples divide among two as well
PIPED = {
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=32",
    "max_train_samples": 20,
    "sample_tokens": 0,
    "schedule_step": 0,
    "pipeline_parallel_size": 2,
    "partition_method": "parameters",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "eval_strategy": "no",
    "bf16": False,
    "warmup_steps": 0,
}
SECONDS = 240


@dataclass(frozen=True)
class Layout:
    """`fewest` to `most` hosts with `ranks` each; `lost` is the number of the host that is killed and comes back."""

    flags: dict[str, Any] = field(default_factory=dict)
    lost: int = 0
    fewest: int = 1
    most: int = 2
    ranks: int = 1
    recipe: str = RECIPE

    @property
    def values(self) -> dict[str, Any]:
        return {**(CLASSIFIER if self.recipe == RECIPE else PIPED), **self.flags, **RUN}

    @contextmanager
    def host(self, number: int, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A supervisor and what comes of it; nothing of it is left."""
        torchrun = ["torchrun", "--nnodes", f"{self.fewest}:{self.most}", "--nproc_per_node", str(self.ranks)]
        torchrun += ["--local_addr", f"127.0.0.{number + 1}", "--rdzv_conf", "last_call_timeout=3"]
        words = [*torchrun, FAULTY, *flags({"output_dir": folder, **self.values})]
        # The steps of fewer hosts take longer, so that the lost one is back before the last.
        slow = {"kind": "few", "rank": 0, "ranks": self.fewest * self.ranks, "seconds": 0.25, "recipe": self.recipe}
        with log.open("ab") as out:
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FAULT": json.dumps(slow)}
            command = [sys.executable, "-m", "finetune.cli", "supervise", "--", *words]
            process = subprocess.Popen(command, cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                kill_family(process.pid)
                process.wait()


def trainings(folder: Path) -> list[dict[str, Any]]:
    return [one for one in told(folder / "_supervise") if one["event"] == "training"]


def wait_for(condition: Callable[[], Any], said: Callable[[], str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.1)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(), id="the host of rank 0 is lost"),
        pytest.param(Layout(lost=1), id="the other host is lost"),
        pytest.param(Layout({"deepspeed": "zero2"}), id="ZeRO-2"),
        pytest.param(Layout({"deepspeed": "zero3"}, lost=1), id="ZeRO-3"),
        pytest.param(Layout({"fsdp": True, **OF_THREE}, fewest=2, most=3), id="FSDP, which needs two ranks"),
        pytest.param(Layout(ranks=2, recipe=PIPELINE), id="pipelines"),
    ],
)
@pytest.mark.usefixtures("built_ops")
def test_a_lost_host_takes_no_run_down_and_may_come_back(layout: Layout, tmp_path: Path) -> None:
    folder, most, fewer = tmp_path / "run", layout.most, layout.most - 1
    logs = [tmp_path / f"host-{number}" for number in range(most)]

    def said() -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in logs)

    def host(number: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return layout.host(number, folder, logs[number])

    with ExitStack() as stack:
        stay = [stack.enter_context(host(number)) for number in range(most) if number != layout.lost]
        with host(layout.lost):
            wait_for(lambda: len(steps_of(folder)) >= 25, said)
        wait_for(lambda: len(trainings(folder)) == 2, said)
        with host(layout.lost) as back:
            for one in (*stay, back):
                assert one.wait(SECONDS) == 0, said()
    batch = trainings(folder)[0]["global_batch_size"]
    assert [(one["hosts"], one["ranks"], one["global_batch_size"]) for one in trainings(folder)] == [
        (some, some * layout.ranks, batch) for some in (most, fewer, most)
    ], said()
    shrunk, grown = trainings(folder)[1:]
    assert shrunk["step"] >= 20  # from a checkpoint
    assert grown["step"] > shrunk["step"]
    # The ranks saved first, so no step is repeated.
    ends = [one for one in told(folder / "_supervise") if one["event"] == "rank ended" and one["status"] == 75]
    assert [one["said"] for one in ends if f"after step {grown['step']}." in one["said"]], said()
    uncut = launch("torchrun", tmp_path / "uncut", layout.values, ranks=most * layout.ranks, recipe=layout.recipe)
    survived = Finished(0, "", folder)
    assert [row["step"] for row in survived.steps] == list(range(1, STEPS + 1))
    assert survived.column("loss") == pytest.approx(uncut.column("loss"), rel=1e-6)
