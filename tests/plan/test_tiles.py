"""Tiled MLPs and offloaded checkpoints in a plan: less memory, more time. tests/runs/test_plan.py runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.plan.job import DEEPSPEED, PIPELINE, Job, tape_of
from finetune.plan.machine import find_machine
from finetune.plan.memory import CHECKPOINTS, plan_memory
from finetune.plan.model import is_block_linear, model_of, with_lora
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import INT64_BYTES, TILED_MLP, Lora
from finetune.plan.zero import Zero

H100 = find_machine("H100-80GB")
WIDTH, INNER, LAYERS, TOKENS = 64, 512, 4, 4096
LLAMA = {"model_type": "llama", "vocab_size": 256, "num_hidden_layers": LAYERS, "hidden_size": WIDTH,
         "intermediate_size": INNER, "num_attention_heads": 4, "max_position_embeddings": TOKENS}  # fmt: skip
LITE = {"model_type": "gptlite", "vocab_size": 256, "num_hidden_layers": LAYERS, "hidden_size": WIDTH,
        "num_attention_heads": 4, "max_position_embeddings": TOKENS}  # fmt: skip
MODEL = model_of(LLAMA)
EVERY = tuple(sorted({tensor.name.split(".")[-2] for tensor in MODEL.tensors if is_block_linear(tensor)}))
MODELS = {"llama": MODEL, "lite": model_of(LITE), "lora": with_lora(MODEL, Lora(8, EVERY))}
HALF = 2  # bytes
STAGED: dict[str, Any] = {"model": MODELS["lite"], "engine": PIPELINE, "stages": 2, "world_size": 2,
                          "zero": Zero(1, reduce_bucket_size=10_000)}  # fmt: skip


def job(shards: int, **changes: Any) -> Job:
    one = Job(MODEL, DEEPSPEED, Zero(2, reduce_bucket_size=10_000), tokens=TOKENS, precision="bf16",
              loss_chunk_tokens=64, tiled_mlp_num_shards=shards)  # fmt: skip
    return replace(one, **changes)


def activations(one: Job) -> int:
    held = plan_memory(one, H100).step_peak.by_kind
    return sum(held.get(kind, 0) for kind in ("activations", "activation_gradients", "temporary"))


def test_nothing_wide_is_kept_for_the_backward_pass() -> None:
    """Of each untiled MLP the gate, its activation, the other projection and the product are kept; tiled, its input."""
    wide = 4 * HALF * TOKENS * INNER
    whole, tiled = activations(job(0)), activations(job(16))
    assert whole - tiled > (LAYERS - 1) * wide
    assert activations(job(1)) > activations(job(4)) > activations(job(16))


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_products_are_the_same_and_those_of_the_forward_pass_are_made_again(model: Any, interval: int) -> None:
    whole, tiled = (plan_seconds(job(n, model=model, checkpoint_interval=interval), H100) for n in (0, 4))
    assert tiled.model_flops == whole.model_flops
    assert tiled.backward > whole.backward
    ops = [op for op in tape_of(job(4, model=model)).ops if op.name == TILED_MLP]
    assert len(ops) == LAYERS
    assert all(op.gemms_again == op.gemms for op in ops)
    of_mlps = {tensor.name for tensor in model.tensors if ".mlp." in tensor.name}
    assert {name for op in ops for name in op.weights} == of_mlps


def test_every_weight_has_a_gradient_of_its_own_size() -> None:
    whole, tiled = (plan_memory(job(n, zero=Zero(0)), H100) for n in (0, 4))
    assert whole.resident == tiled.resident
    ends = [plan_memory(job(n, zero=Zero(0)), H100).peaks["optimizer"].bytes for n in (0, 4)]
    assert ends[0] == ends[1]  # all gradients are there, and nothing else


def test_an_mlp_that_is_recomputed_is_so_before_its_tiles_are() -> None:
    whole, tiled = (plan_seconds(job(n, checkpoint_interval=1), H100) for n in (0, 4))
    assert tiled.recomputation >= whole.recomputation > 0
    assert activations(job(16, checkpoint_interval=1)) < activations(job(0, checkpoint_interval=1))


@pytest.mark.parametrize("shards", [0, 4])
def test_checkpoints_on_the_host_leave_the_device_and_take_their_time(shards: int) -> None:
    """All but that of the layer whose gradients are made; a power of two of pinned bytes each, here exactly."""
    here, there = (job(shards, checkpoint_interval=1, checkpoints_on_host=away) for away in (False, True))
    hidden = HALF * TOKENS * WIDTH
    assert activations(here) - activations(there) == pytest.approx((LAYERS - 1) * hidden, abs=hidden)
    assert plan_memory(here, H100).host.get(CHECKPOINTS) is None
    assert plan_memory(there, H100).host[CHECKPOINTS] == LAYERS * hidden
    odd = plan_memory(replace(there, tokens=TOKENS - 64), H100).host[CHECKPOINTS]
    assert odd == LAYERS * hidden  # rounded up
    before, after = plan_seconds(here, H100), plan_seconds(there, H100)
    moved = 2 * LAYERS * hidden / H100.host_link.bandwidth_bytes_per_second
    assert after.offload - before.offload == pytest.approx(H100.step_factor * moved)
    assert (after.forward, after.recomputation) == (before.forward, before.recomputation)


def test_a_pipelines_stages_keep_those_of_all_micro_batches_in_flight() -> None:
    """Stage 0 recomputes both embeddings, the first of ids, and two blocks, of two micro-batches; stage 1 two blocks of
    one."""
    staged = job(
        4,
        model=MODELS["lite"],
        engine=PIPELINE,
        zero=Zero(1, reduce_bucket_size=10_000),
        stages=2,
        world_size=2,
        accumulation=4,
    )
    here, there = (replace(staged, checkpoint_interval=1, checkpoints_on_host=away) for away in (False, True))
    hidden, ids, bounds = HALF * TOKENS * WIDTH, INT64_BYTES * TOKENS, (0, 4, LAYERS + 4)
    for stage, (many, more) in enumerate(((2 * 3, 2 * ids), (2, 0))):
        before, after = (plan_memory(one, H100, stage, bounds) for one in (here, there))
        assert after.host == {**before.host, CHECKPOINTS: many * hidden + more}
        assert before.step_peak.bytes - after.step_peak.bytes == (many - 1) * hidden  # one has come back
    steps = [plan_seconds(one, H100) for one in (here, there)]
    assert steps[0].offload == 0 < steps[1].offload
    assert steps[1].total > steps[0].total


def test_a_pipelines_mlps_are_planned_in_tiles() -> None:
    staged = replace(
        job(0, model=MODELS["lite"]), engine=PIPELINE, zero=Zero(1, reduce_bucket_size=10_000), stages=2, world_size=2
    )
    tiled = replace(staged, tiled_mlp_num_shards=8)
    for stage in (0, 1):
        whole, parts = (plan_memory(one, H100, stage, (0, 4, LAYERS + 4)).step_peak.bytes for one in (staged, tiled))
        assert whole - parts > 2 * 4 * WIDTH * HALF * TOKENS  # what is inside of two MLPs
    assert plan_seconds(tiled, H100).backward > plan_seconds(staged, H100).backward
