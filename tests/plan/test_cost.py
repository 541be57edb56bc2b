"""A run's cost, the effect of one more GPU, and the smallest cluster for a deadline, compared with plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import REPO

from finetune.errors import RequestError
from finetune.plan.answers import ON_CPUS, ON_GPUS, USUAL_STEPS, cost_of, one_more_of, smallest_cluster, speedup_of
from finetune.plan.job import PIPELINE, Job
from finetune.plan.machine import find_machine
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.plan import plan
from finetune.plan.search import Limits, laid_out, search
from finetune.report.plan_words import answer_line, cost_line, one_more_line

A100 = find_machine("A100-80GB")
GPT2 = model_of(find_model_config("gpt2"))
JOB = Job(GPT2, world_size=8, micro_batch=4, tokens=512, precision="bf16")


@pytest.mark.parametrize("price", [0.5, 1.0, 3.75])
def test_twice_the_price_is_twice_the_cost_of_the_same_hours(price: float) -> None:
    found = plan(JOB, A100)
    once, twice = cost_of(found, price, 2000), cost_of(found, 2 * price, 2000)
    assert twice.price == pytest.approx(2 * once.price)
    assert (twice.hours, twice.gpu_hours) == (once.hours, once.gpu_hours)
    assert cost_of(found, price, 4000).price == pytest.approx(2 * once.price)


def test_a_cost_is_ranks_times_hours_times_price() -> None:
    found = plan(JOB, A100)
    cost = cost_of(found, 2.0, 3600)
    assert cost.hours == pytest.approx(found.seconds.total)  # 3,600 steps take as many hours as one takes seconds
    assert cost.price == pytest.approx(8 * cost.hours * 2.0)
    assert cost.most_kwh == pytest.approx(8 * cost.hours * 0.4)  # boards of 400 W


def test_without_a_number_of_steps_a_thousand_are_priced_and_the_line_says_so() -> None:
    for steps in (None, -1):
        cost = cost_of(plan(JOB, A100), 2.0, steps)
        assert (cost.steps, cost.is_told) == (USUAL_STEPS, False)
        assert "1,000 steps (assumed; --max_steps sets them)" in cost_line(cost)


def test_energy_is_printed_only_if_the_boards_power_is_known() -> None:
    known, unknown = (cost_line(cost_of(plan(JOB, find_machine(gpu)), 1.0, 10)) for gpu in ("A100-80GB", "B300"))
    assert "at most" in known
    assert "kWh" not in unknown


def test_the_printed_error_is_the_published_one() -> None:
    public, here = ((REPO / "docs/results" / name).read_text() for name in ("plan_public.md", "plan.md"))
    (kept,) = (line for line in public.splitlines() if line.startswith("| held out |"))
    count, median, _, worst = (cell.strip(" +") for cell in kept.strip("|").split("|")[1:])
    assert f"{count} published speeds" in ON_GPUS
    assert f"{median};" in ON_GPUS
    assert f"{worst} off" in ON_GPUS
    (timed,) = (line for line in here.splitlines() if line.startswith("- error of planned step time, held out"))
    figures = [float(word.strip("%,")) for word in timed.split() if word.endswith(("%", "%,"))]
    assert f"within {figures[0]:.0f}% by rates fitted to others; the worst was {figures[-1]:.0f}% off" in ON_CPUS
    assert f"half of {timed.split()[-2]} step times" in ON_CPUS


def test_one_more_gpu_is_the_plan_of_as_many_ranks() -> None:
    two = plan(replace(JOB, world_size=2, ranks_per_node=2), A100)
    more = one_more_of(two)
    assert more == plan(replace(JOB, world_size=3, ranks_per_node=3), A100)
    assert 1 < speedup_of(two, more) <= 1.5
    said = f"One more GPU (3 in all): {speedup_of(two, more):.2f}x the samples/s, 12 samples per step"
    assert said in one_more_line(two, more)


def test_one_more_than_a_node_holds_is_on_another_and_gains_less() -> None:
    seven, eight = (plan(replace(JOB, world_size=ranks, ranks_per_node=ranks), A100) for ranks in (7, 8))
    within, beyond = one_more_of(seven), one_more_of(eight)
    assert (within.job.ranks_per_node, beyond.job.ranks_per_node) == (8, 8)
    assert speedup_of(eight, beyond) / (9 / 8) < speedup_of(seven, within) / (8 / 7)
    assert "(9 in all, on another node)" in one_more_line(eight, beyond)


def test_a_pipeline_and_a_group_of_zero_plus_plus_grow_by_their_own_size() -> None:
    lite = model_of(find_model_config("gptlite-small"), "gptlite-small")
    pipeline = replace(laid_out(replace(JOB, model=lite), "pipeline"), stages=4, accumulation=8)
    assert pipeline.engine == PIPELINE
    assert one_more_of(plan(pipeline, A100)).job.world_size == 8 + 4
    assert one_more_of(plan(laid_out(replace(JOB, world_size=16), "zeropp"), A100)).job.world_size == 16 + 8


def test_the_smallest_cluster_meets_the_deadline_and_no_smaller_one_does() -> None:
    steps, limits = 5000, Limits(64, ("none", "zero2"))
    job = replace(JOB, micro_batch=8)  # 64 samples a step

    def hours(ranks: int) -> float:
        one = replace(job, world_size=ranks, ranks_per_node=min(ranks, 8))
        return steps * 64 / search(one, A100, limits).fitting[0].samples_per_second / 3600

    least = 1.01 * hours(4)
    found = smallest_cluster(job, A100, limits, steps, least)
    assert (found.found, found.next) == (4, 2)
    assert found.hours == pytest.approx(hours(4))
    assert found.plan.job.global_batch == 64
    assert hours(2) > least
    with pytest.raises(RequestError, match=r"--deadline 1e-05: no cluster finishes 5,000 steps of 64 samples"):
        smallest_cluster(job, A100, limits, steps, 1e-5)
    with pytest.raises(RequestError, match="the fastest takes"):
        smallest_cluster(job, A100, limits, steps, 0.7 * hours(64))
    large = replace(job, eval_batch=100_000)
    spared = smallest_cluster(large, A100, limits, steps, least)  # its evaluation would fit nowhere
    assert spared.found == 4
    assert spared.plan.job.eval_batch == spared.plan.job.micro_batch
    assert f"--per_device_eval_batch_size {spared.plan.job.micro_batch}" in spared.flags
    with pytest.raises(RequestError, match="a batch of 6 cannot be divided among groups of 4 ranks on nodes of 8"):
        smallest_cluster(replace(job, expert_parallel_size=4), A100, Limits(6, ("zero2",)), steps, least)


def test_the_answer_to_a_deadline_names_the_batch_and_how_wrong_planned_hours_have_been() -> None:
    said = answer_line(smallest_cluster(JOB, A100, Limits(32, ("none",)), 1000, 2))
    assert "32 samples per step" in said
    assert said.endswith(f"These are planned hours, for the training steps only: {ON_GPUS}.")


def test_one_rank_of_a_cpu_has_all_its_cores_and_may_be_fast_enough() -> None:
    """The profile is that of two ranks, and one alone may take half the time that both need at their peak."""
    cpu, limits = find_machine("cpu"), Limits(2048, ("none",))
    model = model_of({"model_type": "mlp", "width": 4096, "layers": 2, "num_labels": 10})
    job = Job(model, world_size=2, ranks_per_node=2, micro_batch=1024, tokens=1, device="cpu")
    alone = search(replace(job, world_size=1, ranks_per_node=1), cpu, limits).fitting[0].plan.seconds
    assert alone.mfu > 0.5
    assert smallest_cluster(job, cpu, limits, 1000, 1.01 * 1000 * 2048 / alone.samples_per_second / 3600).found == 1


@pytest.mark.parametrize(("model", "layout", "least"), [("gpt2", "zeropp", 16), ("gptlite-small", "pipeline", 2)])
def test_numbers_of_ranks_on_which_no_layout_is_possible_are_skipped(model: str, layout: str, least: int) -> None:
    job = replace(JOB, model=model_of(find_model_config(model), model))
    found = smallest_cluster(job, A100, Limits(64, (layout,)), 100, 2)
    assert (found.found, found.options[0][1].layout) == (least, layout)
    with pytest.raises(RequestError, match=f"no number of ranks that divides a batch of 1 allows --layouts {layout}"):
        smallest_cluster(job, A100, Limits(1, (layout,)), 100, 2)
