"""DeepSpeed's estimators beside the plan: the arithmetic of its documentation, and what the plan says of the same."""

from __future__ import annotations

import pytest

from finetune.cli import main
from finetune.errors import RequestError
from finetune.measure.estimator import estimates, largest_layer
from finetune.plan.job import PIPELINE, Job
from finetune.plan.machine import find_machine
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config

A100 = find_machine("A100-80GB")
JOB = Job(model_of(find_model_config("gpt2")), world_size=16, tokens=128, precision="bf16")
PARAMETERS, EMBEDDING = 124_439_808, 50_257 * 768


def test_theirs_are_the_sums_that_deepspeed_documents() -> None:
    """ZeRO-2: 2 bytes a weight and 18 / ranks; offloaded 2. ZeRO-3: 18 / ranks and 4 of the largest layer."""
    assert largest_layer(JOB) == EMBEDDING
    found = {one.layout: one for one in estimates(JOB, A100)}
    assert found["zero2"].their_gpu == 2 * PARAMETERS + int(18 * PARAMETERS / 16)
    assert found["zero2_offload"].their_gpu == 2 * PARAMETERS
    assert found["zero3"].their_gpu == 4 * EMBEDDING + int(18 * PARAMETERS / 16)
    assert found["zero3_offload"].their_gpu == 4 * EMBEDDING


def test_the_plan_s_states_are_theirs_less_the_gradients_in_fp32() -> None:
    """At rest ZeRO-2 holds 2 bytes a weight, and of master and two moments 12 / ranks."""
    one = estimates(JOB, A100)[0]
    assert one.at_rest == pytest.approx(2 * PARAMETERS + 12 * PARAMETERS / 16, rel=0.3)  # and cuBLAS's workspace
    assert one.at_peak > one.at_rest


def test_it_prints_a_row_for_each_layout_and_refuses_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "--gpu", "A100-80GB", "--nodes", "2", "--estimator"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("zero")] == [
        "zero2", "zero2_offload", "zero3", "zero3_offload",
    ]  # fmt: skip
    with pytest.raises(RequestError, match="none for pipelines"):
        estimates(Job(JOB.model, PIPELINE, world_size=2, stages=2), A100)
