"""Ranks that share a text: what they exchange, hold and compute, worked out here. tests/runs/test_plan.py runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from finetune.errors import RequestError
from finetune.plan.answers import most_that_fits
from finetune.plan.exchange import exchanges_of
from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, Job, tape_of
from finetune.plan.machine import Link, find_machine
from finetune.plan.memory import BATCH, plan_memory
from finetune.plan.model import model_of
from finetune.plan.search import NOT_SHARED, Limits, bases, search
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import ATTENTION, Op
from finetune.plan.zero import Zero
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.resolve import resolve

H100 = find_machine("H100-80GB")
LLAMA = {"model_type": "llama", "vocab_size": 512, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160,
         "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2**20}  # fmt: skip
LAYERS, WIDTH, KEYS, TOKENS = 3, 64, 2 * 8, 1024  # KEYS: of all key heads
HALF = 2  # bytes


def shared(size: int, **changes: object) -> Job:
    job = Job(
        model_of(LLAMA), DEEPSPEED, Zero(2, reduce_bucket_size=100_000), world_size=8, tokens=TOKENS, precision="bf16"
    )
    return replace(job, sequence_parallel_size=size, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_rank_sends_queries_keys_values_and_outputs_of_its_tokens(size: int, copies: int, rows: int) -> None:
    """With more ranks than key heads, each gets a copy of one: the paper's section 3.4 for grouped heads."""
    ahead, back = exchanges_of(tape_of(shared(size, micro_batch=rows)))
    own = HALF * rows * TOKENS // size
    assert ahead == [own * WIDTH, copies * own * KEYS, copies * own * KEYS, own * WIDTH] * LAYERS
    assert sorted(back) == sorted(ahead)
    _, again = exchanges_of(tape_of(shared(size, micro_batch=rows, checkpoint_interval=1)))
    assert sum(again) == 2 * sum(ahead)
    assert exchanges_of(tape_of(shared(1))) == ([], [])


def attention(job: Job) -> Op:
    return next(op for op in tape_of(job).ops if op.name == ATTENTION)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_attention_is_of_all_tokens_and_a_share_of_the_heads(size: int) -> None:
    whole, part = attention(shared(1)), attention(shared(size))
    for one, other in zip((*whole.gemms, *whole.gemms_back), (*part.gemms, *part.gemms_back), strict=True):
        assert (other.m, other.n, other.k, other.many * size) == (one.m, one.n, one.k, one.many)
    assert part.outputs[0].elements == TOKENS * WIDTH // size
    group = attention(shared(8))
    # 8 ranks have a head each, of queries as of keys: no gradients of keys are made for several heads of queries.
    assert group.scratch_back < attention(shared(4)).scratch_back / 2


def test_a_step_is_the_same_products_whoever_computes_them() -> None:
    one = plan_seconds(shared(1, micro_batch=1), H100)
    four = plan_seconds(shared(4, micro_batch=4), H100)
    assert four.samples == one.samples == shared(1).global_batch == 8
    assert four.tokens == one.tokens
    assert four.model_flops == pytest.approx(one.model_flops)


def test_ranks_of_a_text_count_once_and_zero_shards_over_all() -> None:
    job = shared(4, micro_batch=3, accumulation=2)
    assert (job.readers, job.data_parallel_size, job.global_batch) == (2, 8, 12)
    alone = shared(1, micro_batch=3, accumulation=2)
    ours, theirs = plan_memory(job, H100).resident, plan_memory(alone, H100).resident
    assert {name: size for name, size in ours.items() if name != BATCH} == {
        name: size for name, size in theirs.items() if name != BATCH
    }


def test_exchanges_take_their_time_and_nothing_hides_it() -> None:
    """A rank keeps its own part: of 4 ranks, 3/4 of each exchange crosses the bus, in 3 steps of a second."""
    slow = replace(H100, name="slow bus", intra_node=Link(100.0, 1.0))
    plain = replace(H100, name="no bus", intra_node=Link(1e30, 0.0))
    job = shared(4, zero=Zero(0), world_size=4)
    ahead, back = exchanges_of(tape_of(job))
    takes = sum(0.75 * size / 100 + 3 for size in ahead + back)
    gradients = 2 * (0.75 * HALF * job.model.parameters / 100 + 3)  # a ring of all gradients, which a tree is not below
    reduced = min(gradients, 2 * (HALF * job.model.parameters / 100 + 3))
    more = plan_seconds(job, slow).exposed_communication - plan_seconds(job, plain).exposed_communication
    assert more == pytest.approx(takes + reduced, rel=1e-3)


@pytest.mark.parametrize("interval", [0, 1])
def test_activations_fall_with_the_size(interval: int) -> None:
    """All but what is not divided: here nothing is, since the texts are much longer than the model is large."""
    kinds = ("activations", "activation_gradients", "temporary")
    one, four = (
        sum(plan_memory(shared(size, tokens=2**19, checkpoint_interval=interval), H100).step_peak.by_kind.get(kind, 0)
            for kind in kinds)
        for size in (1, 4)
    )  # fmt: skip
    assert one / 4 <= four < 1.2 * one / 4  # copies of key heads, buffers of the exchange, positions of all tokens


def test_an_evaluation_reads_whole_texts_on_each_rank() -> None:
    ours, theirs = (plan_memory(shared(size, eval_batch=2), H100).peaks["evaluation"].bytes for size in (4, 1))
    assert ours == pytest.approx(theirs, rel=0.02)  # between steps there is less of the training batch


def sized(size: int) -> Job:
    return shared(4, tokens=size)


def test_the_longest_block_is_found_with_and_without_sharing() -> None:
    small = replace(H100, memory_bytes=2 * 2**30)
    found = most_that_fits("longest", "block_size", range(64, 2**20, 64), sized, small, Limits(8, ("none", "zero3")))
    best = {
        (one.layout, one.plan.job.sequence_parallel_size, one.plan.job.checkpoint_interval): size
        for size, one in found.options
    }
    assert set(best) == {(layout, n, k) for layout, n in (("none", 1), ("zero3", 1), ("zero3", 4)) for k in (0, 1)}
    for interval in (0, 1):
        assert best["zero3", 4, interval] > 3 * best["zero3", 1, interval]  # type: ignore[operator]
    assert "--sequence_parallel_size 4" in found.flags
    assert found.options[0][1].words == "zero3, micro-batch 1, checkpointing, 4 ranks per text"


def test_a_search_ranks_layouts_with_and_without_sharing() -> None:
    found = search(shared(4, tokens=4096), H100, Limits(None, ("zero2", "zero3", "zeropp", "pipeline")))
    kinds = {(one.layout, one.plan.job.sequence_parallel_size) for one in found.fitting}
    assert kinds == {("zero2", 1), ("zero2", 4), ("zero3", 1), ("zero3", 4)}
    speeds = [one.samples_per_second for one in found.fitting]
    assert speeds == sorted(speeds, reverse=True)


TILES = ["--tiled_mlp_num_shards", "4", "--block_size", "64"]


def run_of(words: Sequence[str], size: int = 4) -> Job:
    argv = ["--sequence_parallel_size", str(size), *words]
    launch = Launch(world_size=8, local_world_size=8, launcher="torchrun")
    return job_of(resolve(CAUSAL_LM, argv, launch, is_here=False), H100)[0]


def test_a_run_without_deepspeed_is_planned_with_it() -> None:
    """The exchange is DeepSpeed's, and so are tiles; without it a run is refused. A question searches all layouts."""
    for words, size in (["--block_size", "64"], 4), (TILES, 1):
        job = run_of(words, size)
        assert (job.engine, job.zero.stage, job.sequence_parallel_size) == (DEEPSPEED, 3, size)
    tried = {layout for layout, _ in bases(job, H100, Limits())}
    assert "zero3" in tried
    assert not tried.intersection(NOT_SHARED)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config_overrides", "num_attention_heads=2"], "does not divide .* 2 attention heads"),
        (["--block_size", "66"], "does not divide block_size is 66"),
        (["--model_name_or_path", "Llama-3.2-1B", "--bf16", "False"], "runs as one fused kernel"),
    ],
)  # fmt: skip
def test_what_ranks_cannot_share_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run_of(["--deepspeed", "zero2", *words])
