"""The search against a plan of the same job, and what it proposes where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.plan.advice import _changes, mends
from finetune.plan.answers import flags_of
from finetune.plan.job import DEEPSPEED, Job
from finetune.plan.machine import find_machine
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.plan import plan
from finetune.plan.search import Limits, laid_out, search

GIB = 2**30
A100 = find_machine("A100-80GB")
GPT2 = model_of(find_model_config("gpt2"))


@pytest.mark.parametrize("eval_batch", [0, 4, 64])
@pytest.mark.parametrize("layout", ["none", "zero2", "zero3"])
def test_the_table_has_the_figures_of_the_plan_of_the_same_job(layout: str, eval_batch: int) -> None:
    """With an evaluation whose batch is the larger one, too: a run that does not survive it does not fit."""
    job = laid_out(Job(GPT2, world_size=2, micro_batch=4, tokens=512, eval_batch=eval_batch, precision="bf16"), layout)
    asked = plan(job, A100)
    assert (asked.fullest.peak.phase == "evaluation") == (eval_batch == 64)
    found = search(job, A100, Limits(job.global_batch, (layout,)))
    (same,) = (one.plan for one in found.fitting if one.plan.job == job)
    assert (same.peak_bytes, same.host_bytes, same.seconds) == (asked.peak_bytes, asked.host_bytes, asked.seconds)


def test_what_fails_in_an_evaluation_alone_does_not_fit_and_is_proposed_with_a_smaller_one() -> None:
    small = replace(A100, memory_bytes=6 * GIB)
    job = Job(GPT2, micro_batch=1, tokens=512, eval_batch=64, precision="bf16", engine=DEEPSPEED)
    asked = plan(job, small)
    assert not asked.fits
    assert plan(replace(job, eval_batch=1), small).fits
    proposed = search(job, small, Limits(1, ("zero2",))).fitting[0]
    assert (proposed.plan.job.micro_batch, proposed.plan.job.eval_batch) == (1, 1)
    assert proposed.plan.fits
    assert "evaluation batch 1" in proposed.words
    assert "--per_device_eval_batch_size 1" in flags_of(proposed.plan.job)
    mend = mends(asked)[0]
    assert mend.layout.startswith("--per_device_eval_batch_size ")
    assert mend.plan.fits
    assert not plan(replace(job, eval_batch=2 * mend.plan.job.eval_batch), small).fits


def test_an_evaluation_batch_that_fits_is_kept() -> None:
    job = Job(GPT2, micro_batch=1, tokens=512, eval_batch=16, precision="bf16")
    found = search(job, A100, Limits(8))
    assert len(found.fitting) > 8
    assert {one.plan.job.eval_batch for one in found.fitting} == {16}
    assert not any("evaluation batch" in one.words for one in found.fitting)


def test_a_change_to_nvme_names_a_folder_unless_the_run_has_one() -> None:
    job = Job(GPT2, micro_batch=4, tokens=512, precision="bf16", engine=DEEPSPEED)
    for has_one in (False, True):
        changes = (one for kind in _changes(laid_out(job, "zero3_nvme") if has_one else job) for one in kind)
        proposed = [
            words for words, changed in changes if changed.zero.offload_param == "nvme" and "zero3_nvme" in words
        ]
        assert proposed
        assert all(("--nvme_path FOLDER" in words) != has_one for words in proposed)
