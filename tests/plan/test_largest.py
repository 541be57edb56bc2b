"""The largest that fits: the answer fits, the next size does not, and no other layout searched allows more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.errors import RequestError
from finetune.plan.answers import Answer, most_that_fits
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.model import Model, model_of
from finetune.plan.named import find_model_config
from finetune.plan.plan import plan
from finetune.plan.questions import BLOCK_STEP, largest_batch, largest_model
from finetune.plan.search import Limits, laid_out

MACHINES = [find_machine(name) for name in ("T4", "RTX4090", "A100-40GB", "H100-80GB", "MI300X")]
NAMES = ["gpt2", "Llama-3.2-1B", "gemma-2-2b", "Qwen2.5-0.5B"]
LAYOUTS = ["none", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
machines, names, layouts = st.sampled_from(MACHINES), st.sampled_from(NAMES), st.sampled_from(LAYOUTS)
ranks, intervals = st.sampled_from([1, 2, 8]), st.sampled_from([0, 1])
FAR = 2**19


@cache
def model(name: str) -> Model:
    return model_of(find_model_config(name))


def job(name: str, machine: Machine, world: int = 1, layout: str = "none", tokens: int = 512) -> Job:
    precision = next(one for one in ("bf16", "fp16") if one in machine.peak_flops)
    one = Job(model(name), world_size=world, ranks_per_node=world, tokens=tokens, precision=precision,
              loss_chunk_tokens=2048, eval_batch=1)  # fmt: skip
    return laid_out(one, layout)


def longest_block(job_at: Callable[[int], Job], most: int, machine: Machine, limits: Limits | None = None) -> Answer:
    sizes = range(BLOCK_STEP, most + 1, BLOCK_STEP)
    return most_that_fits("longest", "block_size", sizes, job_at, machine, limits)


def holds(answer: Answer, job_of: Callable[[Any], Job]) -> bool:
    """Whether the answer fits, and the next size under the same layout does not."""
    assert answer.plan.fits
    return answer.next is None or not plan(job_of(answer.next), answer.plan.machine).fits


@given(machine=machines, name=names, layout=layouts, world=ranks, interval=intervals)
@FEW
def test_the_longest_block_fits_and_the_next_longer_does_not(
    machine: Machine, name: str, layout: str, world: int, interval: int
) -> None:
    one = replace(job(name, machine, world, layout), checkpoint_interval=interval)
    try:
        found = longest_block(lambda tokens: replace(one, tokens=tokens), FAR, machine)
    except RequestError:
        assert not plan(replace(one, tokens=BLOCK_STEP), machine).fits
        return
    assert found.plan.job.tokens == found.found
    assert holds(found, lambda tokens: replace(one, tokens=tokens))
    if found.next is None:
        assert found.found == FAR
        return
    assert found.next == int(found.found) + BLOCK_STEP
    for times in (2, 3, 7):
        assert not plan(replace(one, tokens=times * int(found.next)), machine).fits


@given(machine=machines, name=names, layout=layouts, world=ranks, tokens=st.sampled_from([64, 512, 1024]))
@FEW
def test_the_largest_batch_fits_and_one_sample_more_does_not(
    machine: Machine, name: str, layout: str, world: int, tokens: int
) -> None:
    one = job(name, machine, world, layout, tokens)
    try:
        found = largest_batch(one, machine, None)
    except RequestError:
        assert not plan(one, machine).fits
        return
    assert found.next == int(found.found) + 1
    assert holds(found, lambda size: replace(one, micro_batch=size))


def test_a_model_is_never_planned_beyond_its_maximum_length() -> None:
    machine = find_machine("H100-80GB")
    one = job("gpt2", machine)
    found = longest_block(lambda tokens: replace(one, tokens=tokens), 1024, machine)
    assert (found.found, found.next) == (1024, None)


@pytest.mark.parametrize("world", [1, 4])
def test_the_layout_with_the_longest_block_comes_first_and_each_has_its_own_maximum(world: int) -> None:
    """Each is compared with the answer for that layout alone, with and without checkpointing."""
    machine = find_machine("RTX4090")
    one = job("Llama-3.2-1B", machine, world)
    limits = Limits(layouts=("none", "zero2", "zero3_offload"))
    found = longest_block(lambda tokens: replace(one, tokens=tokens), 131_072, machine, limits)
    sizes = [size for size, _ in found.options]
    assert sizes == sorted(sizes, reverse=True)
    for size, option in found.options:
        laid = replace(laid_out(one, option.layout), checkpoint_interval=option.plan.job.checkpoint_interval)
        assert size == longest_block(lambda n, laid=laid: replace(laid, tokens=n), 131_072, machine).found
    assert f"--deepspeed {found.options[0][1].layout}" in found.flags
    assert f"--block_size {found.found}" in found.flags


def test_of_layouts_that_allow_the_same_size_the_fastest_wins() -> None:
    machine = find_machine("H100-80GB")
    one = job("gpt2", machine)
    found = longest_block(lambda tokens: replace(one, tokens=tokens), 1024, machine, Limits())
    assert {size for size, _ in found.options} == {1024}
    speeds = [option.samples_per_second for _, option in found.options]
    assert speeds == sorted(speeds, reverse=True)
    assert found.plan.job.checkpoint_interval == 0


@pytest.mark.parametrize(("gpu", "world"), [("T4", 1), ("RTX4090", 2)])
def test_no_model_larger_than_the_answer_fits(gpu: str, world: int) -> None:
    machine = find_machine(gpu)
    every = ["gpt2", "gpt2-medium", "Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen2.5-1.5B", "gemma-2-2b", "Llama-2-7b",
             "Qwen2.5-Coder-0.5B", "Mistral-7B-v0.1", "Qwen2.5-14B"]  # fmt: skip
    limits = Limits(layouts=("none", "zero3"))
    jobs = {name: job(name, machine, world) for name in every}
    found = largest_model(jobs, machine, limits)
    assert found.plan.fits
    bound = model(str(found.found)).parameters
    laid = [
        replace(laid_out(one, layout), checkpoint_interval=interval)
        for one in jobs.values()
        if one.model.parameters > bound
        for layout in ("none", "zero3")
        for interval in (0, 1)
    ]
    assert laid
    assert not [one.model.parameters for one in laid if plan(one, machine).fits]
    assert found.found != "Qwen2.5-Coder-0.5B", "of two models with the same shape the first is named"
    assert str(found.next) in every


def test_if_nothing_fits_the_error_names_the_smallest_size() -> None:
    machine = find_machine("T4")
    with pytest.raises(
        RequestError,
        match=r"--largest_batch: nothing fits on T4, not even 1\..*let the plan choose.*To see why, and what fits "
        r"with other flags, drop --largest_batch\.$",
    ):
        largest_batch(job("Llama-2-7b", machine), machine, None)
    with pytest.raises(RequestError, match=r"--longest: nothing fits on T4, not even 64\..*a larger GPU\. To see why"):
        longest_block(lambda n: job("Llama-2-7b", machine, tokens=n), 4096, machine, Limits(layouts=("zero2",)))
