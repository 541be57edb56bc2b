"""What ranks hold: the rows of a published study, and what each setting does."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from conftest import REPO
from zero_paper import LAYERS, PAPER_GB, RANKS, VOCABULARY, WIDTH, planned_gb, table

from finetune.dsconfig.config import Config
from finetune.plan.advice import notes
from finetune.plan.families.parts import CLASSES, SPANS, TAGS
from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, PIPELINE, TRAINER, Job
from finetune.plan.machine import find_machine
from finetune.plan.memory import batch_bytes, plan_memory
from finetune.plan.model import Buffer, model_of
from finetune.plan.named import find_model_config
from finetune.plan.optimizers import Optimizer
from finetune.plan.plan import copied_bytes, plan
from finetune.plan.values import Lora
from finetune.plan.zero import read_zero
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.resolve import resolve
from finetune.shipped import DS_CONFIGS

GIB = 2**30
V100 = find_machine("V100-32GB")
# The study's configs: small buckets, defaults else.
BUCKETS = {"reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000}
MASKS = tuple(Buffer(f"blocks.{layer}.heads.{head}.mask", (2048, 2048), 4) for layer in range(12) for head in range(12))


def job(name: str, stage: int, micro_batch: int, tokens: int = 1, world_size: int = 8) -> Job:
    model = model_of(find_model_config(name), name)
    zero = read_zero(Config({"zero_optimization": {"stage": stage, **BUCKETS}}), model.hidden_size)
    return Job(model, DEEPSPEED, zero, world_size=world_size, micro_batch=micro_batch, tokens=tokens)


@pytest.mark.parametrize(
    ("name", "stage", "published_gib"),
    [
        ("mlp-wide", 0, 2.39),
        ("mlp-wide", 1, 1.17),
        ("mlp-wide", 3, 0.61),
        ("gptlite-post", 0, 3.24),
        ("gptlite-post", 1, 2.71),
    ],
)
def test_what_is_there_between_steps_is_as_published(name: str, stage: int, published_gib: float) -> None:
    """Eight V100s of 32 GB, fp32; a batch of 4,096 rows of 8,192 for the MLP, which is the 0.125 GiB that the study
    loads. Published with two digits, so that half of the last one is theirs; 1% is ours."""
    one = job(name, stage, 4096) if name == "mlp-wide" else job(name, stage, 1, 2048)
    if name == "gptlite-post":  # the study's heads keep a causal mask each, in fp32
        one = replace(one, model=replace(one.model, buffers=MASKS))
    found = plan_memory(one, V100).resident_bytes / GIB
    assert found == pytest.approx(published_gib, abs=0.005 + 0.01 * published_gib)


@pytest.mark.parametrize(("head", "labels"), [(CLASSES, 1), (SPANS, 2), (TAGS, 64)])
def test_a_batch_holds_as_many_labels_as_its_head_reads(head: str, labels: int) -> None:
    config = {"model_type": "distilbert", "dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 96, "vocab_size": 300}
    model = model_of({**config, "max_position_embeddings": 64}, head=head)
    assert batch_bytes(Job(model, micro_batch=3, tokens=64)) == 8 * 3 * (64 + labels)


@pytest.mark.parametrize("stage", PAPER_GB)
def test_the_zero_paper_s_example_is_planned_as_published(stage: int) -> None:
    """Of 7.5 billion parameters; this one has 7.46. At the peak of the backward pass gradients are there as the paper
    counts them, but for the embedding's, which is on its way; between steps none are up to ZeRO-2: 2 bytes of weights
    and 12 / 64 of master and moments, where the paper has 2 more of gradients."""
    peak, rest = planned_gb(stage)
    way = VOCABULARY * WIDTH * 2 / 1e9  # the embedding's gradient
    assert peak == pytest.approx(PAPER_GB[stage], abs=way + 0.01 * PAPER_GB[stage])
    parameters = 12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH  # but for biases, norms and positions
    each = {0: 2 + 12, 1: 2 + 12 / RANKS, 2: 2 + 12 / RANKS, 3: (2 + 2 + 12) / RANKS}[stage]
    assert rest == pytest.approx(each * parameters / 1e9, rel=0.01)


def test_the_page_has_what_the_script_prints() -> None:
    assert table() in (REPO / "docs" / "plan.md").read_text()


def test_zero3_does_not_shard_the_deep_mlp() -> None:
    deep, wide = job("mlp-deep", 3, 1), job("mlp-wide", 3, 1)
    found, alone = plan_memory(deep, V100), plan_memory(job("mlp-deep", 3, 1, world_size=1), V100)
    weights = 4 * deep.model.parameters
    assert found.resident["gathered parameters"] == pytest.approx(weights, rel=0.01)
    assert alone.resident["gathered parameters"] == 0  # a rank alone uses its shards as they are
    assert any("does not shard" in note and "100,000" in note for note in notes(plan(deep, V100)))
    assert not any("does not shard" in note for note in notes(plan(wide, V100)))
    low = replace(deep, zero=replace(deep.zero, persistence_threshold=1000))
    assert plan_memory(low, V100).resident["gathered parameters"] < 0.01 * weights


def test_states_are_divided_by_the_ranks() -> None:
    """ZeRO-1 of Adam in bf16: 2 bytes of weights on each rank, and of 12 bytes (master, two moments) one part each."""
    parameters = job("gpt2", 1, 1, 8).model.parameters
    for ranks in (1, 2, 8, 64):
        one = replace(job("gpt2", 1, 1, 8, world_size=ranks), precision="bf16")
        found = plan_memory(one, V100).resident
        assert found["parameters"] == pytest.approx(2 * parameters, rel=1e-4)
        assert found["master weights"] == pytest.approx(4 * parameters / ranks, rel=1e-3)
        assert found["optimizer states"] == pytest.approx(8 * parameters / ranks, rel=1e-3)


def test_overlap_doubles_the_reduce_bucket() -> None:
    base = job("gpt2", 2, 1, 8)
    big = replace(base, zero=replace(base.zero, reduce_bucket_size=100_000_000))
    twice = replace(big, zero=replace(big.zero, overlap_comm=True))
    once_bytes, twice_bytes = (plan_memory(one, V100).peaks["backward"].by_kind["buckets"] for one in (big, twice))
    assert twice_bytes - once_bytes == 4 * 100_000_000


def test_offload_moves_states_to_the_host() -> None:
    path = {"zero_optimization": {"stage": 2, **BUCKETS, "offload_optimizer": {"device": "cpu"}}}
    base = job("gpt2", 2, 1, 8)
    away = replace(base, zero=read_zero(Config(path), base.model.hidden_size))
    here, there = plan_memory(base, V100), plan_memory(away, V100)
    assert "optimizer states" not in there.resident
    assert there.host["optimizer states"] == here.resident["optimizer states"]


def test_checkpointing_keeps_one_input_a_layer() -> None:
    base = job("gptlite-post", 0, 4, 2048)
    whole, less = plan_memory(base, V100), plan_memory(replace(base, checkpoint_interval=1), V100)
    kept = whole.peak.by_kind["activations"] - less.peak.by_kind["activations"]
    assert kept > 0.8 * whole.peak.by_kind["activations"]


def test_a_teacher_that_is_asked_before_training_is_not_held() -> None:
    words = "--model_name_or_path gpt2 --teacher gpt2-medium --packing wrapped --block_size 512".split()
    asked, before, alone = (
        job_of(resolve(CAUSAL_LM, flags, Launch()), V100)
        for flags in (words, [*words, "--teacher_top_k", "64"], [*words[:2], *words[4:]])
    )
    assert asked[0].teacher is not None
    assert before[0].teacher is None
    assert plan_memory(before[0], V100).step_peak.bytes == plan_memory(alone[0], V100).step_peak.bytes
    assert any("runs before training" in note for note in before[2])


def test_an_evaluation_keeps_nothing_of_its_forward_pass() -> None:
    base = job("gpt2", 0, 2, 1024)
    alone = plan_memory(replace(base, eval_batch=2), V100).peaks
    assert alone["evaluation"].bytes < alone["forward"].bytes
    large = plan_memory(replace(base, eval_batch=64), V100).peaks["evaluation"].by_kind["activations"]
    logits = 64 * 1024 * 50257 * 4
    assert 2 * logits < large < 3 * logits  # and what log_softmax makes of them


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_teacher_is_held_and_its_forward_pass_comes_before_the_student_s(stage: int) -> None:
    alone = replace(job("gpt2", stage, 4, 512), precision="bf16")
    beside = replace(alone, teacher=model_of(find_model_config("gpt2-medium"), "gpt2-medium"))
    assert beside.teacher is not None
    one, two = plan_memory(alone, V100), plan_memory(beside, V100)
    assert two.resident["teacher"] == pytest.approx(2 * beside.teacher.parameters / (8 if stage == 3 else 1), rel=1e-4)
    logits = 4 * 512 * 50257 * (2 + 4 + 4)  # of the teacher, and log-probabilities of both
    assert two.step_peak.bytes - one.step_peak.bytes == pytest.approx(two.resident["teacher"] + logits, rel=0.01)
    in_chunks = plan_memory(replace(beside, loss_chunk_tokens=512), V100)
    chunked = plan_memory(replace(alone, loss_chunk_tokens=512), V100)
    hidden = 4 * 512 * 1024 * 2
    assert in_chunks.step_peak.bytes - chunked.step_peak.bytes >= two.resident["teacher"]
    assert in_chunks.peaks["backward"].bytes - chunked.peaks["backward"].bytes == two.resident["teacher"] + hidden


def test_saving_under_zero3_gathers_the_largest_module_and_the_whole_on_the_host_of_one_rank() -> None:
    base = job("gpt2", 3, 2, 64)
    first, last = (plan_memory(base, V100, rank) for rank in (0, 7))
    largest = 50257 * 768 * 4
    assert first.peaks["saving"].bytes - first.resident_bytes == pytest.approx(2 * largest, rel=0.01)
    assert (first.saving_host_bytes, last.saving_host_bytes) == (4 * base.model.parameters, 0)


@pytest.mark.parametrize(
    ("flags", "is_whole"),
    [("", False), ("--deepspeed zero3", False), ("--deepspeed zero2", True), ("--merge_adapter True", True)],
)
def test_of_a_lora_run_only_the_adapter_is_saved_unless_the_engine_copies_all(flags: str, is_whole: bool) -> None:
    asked = f"--model_name_or_path gpt2 --use_peft True --lora_r 4 --block_size 64 --bf16 False {flags}".split()
    found = job_of(resolve(CAUSAL_LM, asked, Launch()), V100)[0]
    counted = [tensor.elements for tensor in found.model.tensors if is_whole or tensor.trains]
    each = 4 if found.precision == "fp32" else 2
    assert plan_memory(found, V100).saving_host_bytes == each * sum(counted)


def test_a_pipeline_saves_fp32_in_any_precision() -> None:
    base = replace(job("gptlite-small", 1, 1, 64), engine=PIPELINE, stages=4, accumulation=4, precision="bf16")
    saved = [plan_memory(base, V100, stage).saving_host_bytes for stage in range(4)]
    assert sum(saved) == 4 * base.model.parameters


def test_a_node_holds_what_its_ranks_have_and_one_copy_of_the_weights_that_are_saved() -> None:
    """Rank 0 alone gathers: a host of 1.1 times the weights has room, though an eighth of it is less than they are."""
    base = job("gpt2", 3, 2, 64)
    weights = 4 * base.model.parameters
    assert plan(base, replace(V100, host_memory_bytes=int(1.1 * weights))).fits
    assert not plan(base, replace(V100, host_memory_bytes=int(0.9 * weights))).fits
    away = replace(base, zero=replace(base.zero, offload_optimizer="cpu"), optimizer=Optimizer("cpu_adam"))
    rank = plan_memory(away, V100, 7)
    assert plan(away, V100).host_bytes == 8 * sum(rank.host.values()) + weights
    two_nodes = plan(replace(away, world_size=16), V100)
    assert two_nodes.host_bytes == 8 * sum(plan_memory(two_nodes.job, V100, 15).host.values()) + weights


def test_a_checkpoint_that_is_written_beside_the_training_is_held_a_second_time_by_the_first_node() -> None:
    base = replace(job("gpt2", 2, 2, 64), optimizer=Optimizer("adam"))
    beside = replace(base, saves_beside_from=0)
    elements = base.model.parameters
    counters = 4 * len(base.model.tensors)
    held = plan(beside, V100).host_bytes - plan(base, V100).host_bytes
    assert held == (base.weight_bytes + 4 + 8) * elements + counters, "weights that two files need are copied once"
    written = held + base.weight_bytes * elements
    assert plan(replace(beside, saves_beside_from=written), V100).host_bytes - plan(base, V100).host_bytes == held
    assert plan(replace(beside, saves_beside_from=written + 1), V100).host_bytes == plan(base, V100).host_bytes
    two_nodes = [plan(replace(one, world_size=16), V100).host_bytes for one in (base, beside)]
    assert two_nodes[1] - two_nodes[0] == base.weight_bytes * elements + (12 * elements + counters) // 2
    unsharded = replace(beside, world_size=16, zero=replace(base.zero, stage=0))
    assert copied_bytes(unsharded) == held, "without ZeRO the first rank has all states"


def test_on_cpus_ranks_and_the_copy_share_the_memory_of_their_node() -> None:
    cpu = find_machine("cpu")
    base = replace(job("gpt2", 0, 2, 64, world_size=4), engine=TRAINER, device="cpu", ranks_per_node=2)
    base = replace(base, optimizer=Optimizer("adam"))
    beside, peak = replace(base, saves_beside_from=0), plan_memory(base, cpu).peak
    found = plan(base, cpu)
    assert found.host == {**{kind: 2 * size for kind, size in peak.by_kind.items()}, "weights being saved": 0}
    assert found.host_bytes == 2 * peak.bytes
    assert plan(beside, cpu).host_bytes == 2 * peak.bytes + copied_bytes(beside)
    tight = replace(cpu, memory_bytes=int(1.1 * peak.bytes), host_memory_bytes=int(2.2 * peak.bytes))
    assert plan(base, tight).fits
    assert plan(beside, tight).peak_bytes < plan(beside, tight).limit_bytes
    assert not plan(beside, tight).fits, "each rank has room, but the copy is as large as a rank's weights and states"


def test_on_cpus_a_node_of_a_pipeline_holds_its_own_stages() -> None:
    cpu = find_machine("cpu")
    base = replace(job("gptlite-small", 1, 1, 64), engine=PIPELINE, stages=4, accumulation=4, device="cpu")
    peaks = [plan_memory(base, cpu, stage).peak.bytes for stage in range(4)]
    assert len({*peaks}) > 1
    assert plan(base, cpu).host_bytes == 2 * sum(peaks)
    assert plan(replace(base, ranks_per_node=4), cpu).host_bytes == 2 * max(sum(peaks[:2]), sum(peaks[2:]))


def test_a_copy_has_the_weights_that_are_frozen_but_not_those_under_an_adapter() -> None:
    whole = replace(job("gpt2", 0, 2, 64), engine=TRAINER, optimizer=Optimizer("adam"))
    first, *others = whole.model.tensors
    tower = replace(whole.model, tensors=(replace(first, trains=False), *others))
    still, counter = replace(whole, model=tower), 4
    assert copied_bytes(whole) - copied_bytes(still) == 8 * first.elements + counter, "its states alone"
    under = replace(still, model=replace(tower, lora=Lora(8, ())))
    assert copied_bytes(still) - copied_bytes(under) == whole.weight_bytes * first.elements


def test_a_copy_has_states_as_precise_as_the_weights_that_are_trained() -> None:
    whole = replace(
        job("gpt2", 0, 2, 64), engine=TRAINER, precision="bf16", optimizer=Optimizer("adam"), saves_beside_from=0
    )
    half = replace(whole, dtype="bfloat16")
    assert [copied_bytes(one) // one.model.parameters for one in (whole, half)] == [4 + 8, 2 + 4]


@pytest.mark.parametrize(
    ("asked", "on_v100", "on_cpu"),
    [
        ("--async_save on", 0, 0),
        ("--async_save auto", None, 256 * 2**20),
        ("--async_save auto --deepspeed zero3_offload", None, 256 * 2**20),
        ("", None, 256 * 2**20),
        ("--async_save off", None, None),
        ("--async_save on --deepspeed zero3_nvme", None, None),
    ],
)
def test_a_copy_is_counted_where_a_run_would_make_one(asked: str, on_v100: int | None, on_cpu: int | None) -> None:
    flags = f"--model_name_or_path gpt2 --block_size 64 --save_strategy steps {asked}".split()
    run = resolve(CAUSAL_LM, flags, Launch())
    found = [job_of(run, machine)[0].saves_beside_from for machine in (V100, find_machine("cpu"))]
    assert found == [on_v100, on_cpu]


def test_so_it_is_for_a_pipeline() -> None:
    run = resolve(CAUSAL_LM_PIPELINE, "--save_strategy steps --async_save on".split(), Launch())
    assert job_of(run, V100)[0].saves_beside_from == 0


def test_stages_of_a_pipeline_save_what_they_have_on_the_node_of_their_first_rank() -> None:
    base = replace(job("gptlite-small", 1, 1, 64), engine=PIPELINE, stages=4, accumulation=4)
    saved = [plan_memory(base, V100, stage).saving_host_bytes for stage in range(4)]
    assert plan(base, V100).host_bytes == sum(saved)
    # Eight ranks in nodes of four: stages 0 and 1 begin on the first, 2 and 3 on the second.
    assert plan(replace(base, ranks_per_node=4), V100).host_bytes == max(sum(saved[:2]), sum(saved[2:]))


def test_what_a_pipeline_copies_for_a_save_is_counted_on_the_node_where_a_stage_begins() -> None:
    base = replace(job("gptlite-small", 1, 1, 64), engine=PIPELINE, stages=4, accumulation=4)
    base = replace(base, optimizer=Optimizer("adam"))
    tensors = base.model.tensors
    whole = sum((4 + 4 + 4) * tensor.elements + 4 for tensor in tensors)  # fp32 weights, two moments and a counter

    def copied(**more: Any) -> int:
        beside = plan(replace(base, saves_beside_from=0, **more), V100).host_bytes
        return beside - plan(replace(base, **more), V100).host_bytes

    assert copied() == whole
    counts = [plan_memory(base, V100, stage).resident["parameters"] for stage in range(4)]
    assert copied(ranks_per_node=4) == int(whole * max(sum(counts[:2]), sum(counts[2:])) / sum(counts))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_never_grows_with_the_ranks(stage: int) -> None:
    sizes = [plan_memory(job("gpt2", stage, 2, 128, world_size=ranks), V100).peak.bytes for ranks in (2, 4, 8, 16)]
    assert all(more <= fewer * 1.001 for fewer, more in pairwise(sizes))


@pytest.mark.parametrize(("precision", "fp32_gradients"), [("bf16", True), ("fp16", False), ("fp32", False)])
def test_a_pipeline_holds_fp32_gradients_in_bf16_alone(precision: str, fp32_gradients: bool) -> None:
    base = job("gptlite-tiny", 1, 2, 64, world_size=2)
    config = Config(json.loads((DS_CONFIGS / "pipeline.json").read_text()))
    zero = read_zero(config, base.model.hidden_size, 1.0, precision)
    one = replace(base, engine=PIPELINE, stages=2, accumulation=4, precision=precision, zero=zero)
    first = plan_memory(one, V100, 0)
    weights = first.resident["parameters"] // one.weight_bytes
    assert first.resident.get("gradients", 0) == (4 * weights if fp32_gradients else 0)


def test_zero1_in_bf16_with_fp32_accumulation_holds_them_too() -> None:
    config = {"zero_optimization": {"stage": 1, **BUCKETS}, "data_types": {"grad_accum_dtype": "fp32"}}
    base = replace(job("gpt2", 1, 1, 8), precision="bf16")
    one = replace(base, zero=read_zero(Config(config), base.model.hidden_size, 1.0, "bf16"))
    assert "gradients" not in plan_memory(base, V100).resident
    assert plan_memory(one, V100).resident["gradients"] == pytest.approx(4 * base.model.parameters, rel=1e-4)


def test_every_kind_of_a_peak_adds_up() -> None:
    for stage in (0, 1, 2, 3):
        for moment in plan_memory(job("gpt2", stage, 2, 64), V100).peaks.values():
            assert sum(moment.by_kind.values()) == moment.bytes
            assert min(moment.by_kind.values()) >= 0


def test_a_plan_is_plain_json() -> None:
    from finetune.report.plan_json import _job

    assert json.loads(json.dumps(_job(job("gpt2", 2, 1, 8))))["zero"]["stage"] == 2
