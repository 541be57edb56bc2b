"""What ranks send and copy in a step, worked out here: a byte takes a second in memory, and a hundredth on the bus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.plan.engines.resident import Weights
from finetune.plan.engines.zero3 import gathers
from finetune.plan.job import DEEPSPEED, PIPELINE, Job, tape_of
from finetune.plan.kernels import (
    ATTENTION_SHARES,
    HALF_SPEED_KEYS,
    KERNEL_SECONDS,
    SUSTAINED,
    TILE,
    Kernels,
    kernels_of,
)
from finetune.plan.machine import Link, Nvme, find_machine
from finetune.plan.model import Model, model_of
from finetune.plan.seconds import plan_seconds, shared
from finetune.plan.traffic import Flow, Traffic, traffic_of
from finetune.plan.values import Gemm
from finetune.plan.zero import Zero

SLOW = replace(
    find_machine("H100"),
    name="slow bus",
    memory_bandwidth=1.0,
    memory_efficiency=1.0,
    intra_node=Link(100.0, 1.0),
    inter_node=Link(20.0, 10.0),
    host_link=Link(8.0, 0.0),
    nvme=Nvme(40.0, 20.0),
)
# Four layers of a weight of 100 and a bias of 10: 440 elements, of which the first of two ranks owns 200 and 20.
MODEL = model_of({"model_type": "mlp", "width": 10, "layers": 3, "num_labels": 10})
ELEMENTS, TENSORS, LAYERS, OWNED = 440, 8, 4, 220


def traffic(model: Model = MODEL, **given: Any) -> Traffic:
    job = Job(**{"model": model, "tokens": 1, "world_size": 2, **given})
    weights = Weights(model.tensors, job.weight_bytes)
    return traffic_of(job, SLOW, kernels_of(SLOW, job.precision), tape_of(job), weights)


def ring(size: float, ranks: int = 2) -> float:
    """An all-reduce of `size` bytes in a node."""
    return 2 * (ranks - 1) / ranks * size / 100 + 2 * (ranks - 1) * 1.0


ADDED = 3 * 4 * ELEMENTS  # a later micro-batch's gradients: two are read, one is written


def test_one_process_sends_nothing_and_adds_later_micro_batches() -> None:
    found = traffic(world_size=1)
    assert (found.forward, found.boundary, found.step) == (Flow(), Flow(), Flow())
    assert found.backward.work.device == pytest.approx(ADDED)
    assert found.backward.work.launches == TENSORS


def test_ddp_copies_gradients_into_buckets_and_back_and_sums_them() -> None:
    found = traffic()
    assert found.backward.work.device == pytest.approx(ADDED)
    assert found.boundary.communication == found.boundary.tail == pytest.approx(ring(4 * ELEMENTS))
    assert found.boundary.work.device == pytest.approx(2 * 2 * 4 * ELEMENTS)
    assert found.boundary.work.launches == pytest.approx(2 * TENSORS + 1.5 * TENSORS)
    assert found.overlaps
    assert found.step == Flow()


def test_the_first_bucket_of_ddp_is_of_a_mebibyte_and_the_others_of_twenty_five() -> None:
    """Twelve layers of 4 MB, from the last: the bias that comes first, then six weights with the biases before them,
    which is all that 25 MiB hold; and the rest."""
    wide = model_of({"model_type": "mlp", "width": 1000, "layers": 11, "num_labels": 1000})
    bias, weight = 4_000, 4_000_000
    buckets = [bias, 6 * (weight + bias), 6 * weight + 5 * bias]
    found = traffic(wide).boundary
    assert found.communication == pytest.approx(sum(map(ring, buckets)))
    assert found.tail == pytest.approx(ring(buckets[-1]))


def test_zero_0_joins_sums_and_cuts_up_behind_the_last_backward_pass() -> None:
    found = traffic(engine=DEEPSPEED, zero=Zero(stage=0), precision="bf16")
    assert found.boundary == Flow()
    assert found.step.communication == pytest.approx(ring(2 * ELEMENTS))
    assert found.step.work.device == pytest.approx((2 * 2 + 2) * 2 * ELEMENTS)
    assert found.step.work.launches == pytest.approx(2 * TENSORS + 1)
    assert found.backward.work.device == pytest.approx(ADDED / 2)


# Buckets of 150 elements, from the last tensor: 10 + 100 + 10, 100 + 10 (twice), 100.
BUCKETS = (120, 110, 110, 100)


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_sum_buckets_and_gather_what_was_stepped(stage: int, scatters: bool) -> None:
    zero = Zero(stage=stage, reduce_bucket_size=150, reduce_scatter=scatters)
    found = traffic(engine=DEEPSPEED, zero=zero)
    own = 2 * 4 * OWNED
    # Into the bucket (read and written), scaled, joined once more where that is asked; this rank's part out of it.
    seconds = 2 * 4 * ELEMENTS * (3 if scatters else 2) + own
    launches = TENSORS + len(BUCKETS) * (2 if scatters else 1) + TENSORS / 2
    host = 3 * TENSORS + 10 * len(BUCKETS)
    assert found.boundary.communication == pytest.approx(sum(ring(4 * size) for size in BUCKETS))
    assert found.boundary.tail == pytest.approx(ring(4 * BUCKETS[-1]))
    assert found.boundary.work.device == pytest.approx(seconds)
    assert found.boundary.work.launches == pytest.approx(host + launches)
    assert found.boundary.offload == 0
    if stage == 1:
        assert found.backward.work.device == pytest.approx(ADDED)
        assert found.backward.communication == 0
    else:
        assert found.backward.work.device == pytest.approx(seconds + 3 * 4 * OWNED)
        assert found.backward.work.launches == pytest.approx(host + launches + TENSORS / 2)
        assert found.backward.communication == found.boundary.communication
    # Flat groups of 400 and 40 elements, half of each from the other rank.
    assert found.step.communication == found.step.tail == pytest.approx(0.5 * 4 * 440 / 100 + 2 * 1.0)
    assert not found.overlaps
    assert traffic(engine=DEEPSPEED, zero=replace(zero, overlap_comm=True)).overlaps
    assert not traffic(engine=DEEPSPEED, zero=replace(zero, overlap_comm=True), device="cpu").overlaps


def test_without_contiguous_gradients_nothing_is_copied_into_a_bucket_but_each_is_joined() -> None:
    zero = Zero(stage=2, reduce_bucket_size=150, reduce_scatter=False, contiguous_gradients=False)
    work = traffic(engine=DEEPSPEED, zero=zero).boundary.work
    assert work.device == pytest.approx(2 * 4 * ELEMENTS * 2 + 2 * 4 * OWNED)
    assert work.launches == pytest.approx(3 * TENSORS + 10 * 4 + 2 * 4 + TENSORS / 2)


def test_gradients_for_an_offloaded_optimizer_cross_the_link_to_the_host() -> None:
    found = traffic(engine=DEEPSPEED, zero=Zero(stage=2, reduce_bucket_size=150, offload_optimizer="cpu"))
    assert found.boundary.offload == pytest.approx(4 * OWNED / 8)


THREE = Zero(stage=3, persistence_threshold=0, prefetch_bucket_size=0, max_reuse_distance=0, reduce_bucket_size=150)


@pytest.mark.parametrize("quantized", [False, True])
def test_zero_3_gathers_joins_and_copies_apart_module_by_module(quantized: bool) -> None:
    zero = replace(THREE, quantized_weights=quantized)
    found = traffic(engine=DEEPSPEED, zero=zero)
    job = Job(MODEL, DEEPSPEED, zero, 2, tokens=1)
    played = gathers(tape_of(job), Weights(MODEL.tensors, 4), zero, 2)
    asked = [gather for gather in played.gathers if gather.phase == "forward"]
    assert [(gather.elements, gather.parameters) for gather in asked] == [(110, 2)] * LAYERS
    sent = 1 if quantized else 4  # int8
    each = 0.5 * sent * 110 / 100 + 1.0
    assert found.forward.communication == pytest.approx(LAYERS * each)
    assert found.forward.tail == pytest.approx(each)
    # Pieces into the flat tensor (half of it, read and written), and out of it (all of it).
    passes = 2 if quantized else 1
    assert found.forward.work.device == pytest.approx(passes * LAYERS * 3 * 4 * 110)
    assert found.forward.work.launches == pytest.approx(LAYERS * (36 + 2 + 20 + 8 * 2))
    assert found.step.communication == 0


def test_zero_3_scatters_buckets_of_gradients_and_adds_pieces() -> None:
    """Of 150 elements, from the last: 10 + 100 + 10, 100 + 10 (twice), 100. Each joined and copied (twice where it has
    several), scaled, scattered, and its half copied out."""
    found = traffic(engine=DEEPSPEED, zero=THREE)
    back = [110] * (LAYERS - 1)  # the last module's weights are still there
    played = gathers(tape_of(Job(MODEL, DEEPSPEED, THREE, 2, tokens=1)), Weights(MODEL.tensors, 4), THREE, 2)
    backward = [gather.elements for gather in played.gathers if gather.phase == "backward"]
    assert sum(backward) in (sum(back), sum(back) + 110)
    buckets = [sum(bucket) for bucket in played.reduced]
    assert sum(buckets) == ELEMENTS
    scattered = [0.5 * 4 * size / 100 + 1.0 for size in buckets]
    assert found.backward.communication == pytest.approx(
        sum(0.5 * 4 * n / 100 + 1.0 for n in backward) + sum(scattered)
    )
    assert found.backward.tail == pytest.approx(scattered[-1])
    copied = sum(3 * 4 * n for n in backward)
    for bucket in played.reduced:
        copied += 4 * sum(bucket) * (2 + 2 * (len(bucket) > 1) + 2 + 1)
    piece = 4 * ELEMENTS / 2
    assert found.boundary.work.device == pytest.approx(copied)
    assert found.backward.work.device == pytest.approx(copied + 3 * piece)
    launches = LAYERS * 36 + len(backward) * (2 + 20 + 8 * 2) + 3 * len(buckets) + 12 * TENSORS
    assert found.boundary.work.launches == pytest.approx(launches)
    assert found.backward.work.launches == pytest.approx(launches + TENSORS)


def test_persistent_weights_are_gathered_one_by_one_behind_the_step() -> None:
    found = traffic(engine=DEEPSPEED, zero=replace(THREE, persistence_threshold=50))
    assert found.step.communication == found.step.tail == pytest.approx(4 * (0.5 * 4 * 10 / 100 + 1.0))
    assert found.step.work.launches == pytest.approx(8 * 4)
    alone = traffic(engine=DEEPSPEED, zero=replace(THREE, persistence_threshold=50), world_size=1)
    assert alone.step == Flow()
    assert alone.forward.communication == 0


@pytest.mark.parametrize(("where", "more"), [("none", 0.0), ("cpu", 0.0), ("nvme", 2 * 220 * 4 / 40)])
def test_offloaded_weights_come_once_forward_and_once_backward(where: str, more: float) -> None:
    """Half of the weights to each rank over its link of 8 bytes a second, and from one disk of 40 for both."""
    found = traffic(engine=DEEPSPEED, zero=replace(THREE, offload_param=where, offload_optimizer=where))
    weights = 0.0 if where == "none" else 220 * 4 / 8 + more
    gradients = 0.0 if where == "none" else 220 * 4 / 8
    assert found.forward.offload == pytest.approx(weights)
    assert found.backward.offload == pytest.approx(weights)
    assert found.boundary.offload == pytest.approx(weights + gradients)


def test_quantized_gradients_go_within_the_node_and_then_between() -> None:
    """qgZ over two nodes of two, in half a byte an element: three pieces of four to the others within, then a half of
    what is left to the other node."""
    zero = replace(THREE, quantized_gradients=True, reduce_bucket_size=10**6)
    plain, quick = (traffic(engine=DEEPSPEED, zero=one, world_size=4, ranks_per_node=2) for one in (
        replace(zero, quantized_gradients=False), zero))  # fmt: skip
    played = gathers(tape_of(Job(MODEL, DEEPSPEED, zero, 4, 2, tokens=1)), Weights(MODEL.tensors, 4), zero, 4)
    (total,) = (0.5 * sum(bucket) for bucket in played.reduced)
    within = total / 2 / 100 + 1.0
    between = total / 2 / 2 / 20 + 10.0 * 2
    assert quick.backward.tail == pytest.approx(within + between)
    assert plain.backward.tail > quick.backward.tail
    one_node = traffic(engine=DEEPSPEED, zero=zero)
    assert (
        one_node.backward.tail == traffic(engine=DEEPSPEED, zero=replace(zero, quantized_gradients=False)).backward.tail
    )


# The loop, and kernels


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loops_own_work_is_counted_in_launches(accumulation: int) -> None:
    machine = replace(find_machine("H100"), launch_seconds=0.5, name="slow host")
    found = plan_seconds(Job(MODEL, accumulation=accumulation, tokens=1), machine)
    assert found.loop == pytest.approx((150 + 60 * accumulation) * 0.5)


def test_a_step_factor_stretches_every_part_alike() -> None:
    h100 = find_machine("H100")
    plain = plan_seconds(Job(MODEL, tokens=1), h100)
    slower = plan_seconds(Job(MODEL, tokens=1), replace(h100, step_factor=1.5, name="stretched"))
    assert slower.total == pytest.approx(1.5 * plain.total)
    assert slower.forward == pytest.approx(1.5 * plain.forward)


def test_ranks_of_a_cpu_share_what_was_measured_of_it_and_a_gpu_is_ones_own() -> None:
    cpu = replace(
        find_machine("cpu"),
        ranks_per_node=2,
        gemm_table=((1, 2, 3, "fp32", 8.0),),
        kernel_table=(("add", "fp32", 4, 6.0),),
    )
    four = shared(cpu, 4)
    assert four.memory_bandwidth == cpu.memory_bandwidth / 2
    assert four.peak_flops["fp32"] == cpu.peak_flops["fp32"] / 2
    assert (four.gemm_table, four.kernel_table) == (((1, 2, 3, "fp32", 4.0),), (("add", "fp32", 4, 3.0),))
    assert shared(cpu, 1).memory_bandwidth == 2 * cpu.memory_bandwidth
    assert four.launch_seconds == cpu.launch_seconds
    assert shared(cpu, 2) is shared(cpu, 0) is cpu
    assert shared(find_machine("H100"), 3) == find_machine("H100")


def test_products_that_do_not_fill_their_tiles_take_as_long_as_those_that_do() -> None:
    h100 = replace(find_machine("H100"), memory_bandwidth=1e30, name="no memory")
    kernels = Kernels(h100, "bf16")
    whole = kernels.product(Gemm(2 * TILE, 3 * TILE, 4096)) - KERNEL_SECONDS
    reached = SUSTAINED * h100.peak_flops["bf16"] * h100.gemm_efficiency["bf16"]
    assert whole == pytest.approx(2 * 128 * 192 * 4096 / reached)
    assert kernels.product(Gemm(TILE + 1, 3 * TILE, 4096)) - KERNEL_SECONDS == pytest.approx(whole)
    assert kernels.product(Gemm(TILE + 1, 2 * TILE + 1, 4096, many=2)) - KERNEL_SECONDS == pytest.approx(2 * whole)
    assert (TILE, KERNEL_SECONDS) == (64, 2e-6)


def test_attention_reaches_its_shares_of_the_peak_or_waits_for_memory() -> None:
    assert (ATTENTION_SHARES, HALF_SPEED_KEYS) == ((0.85, 0.7), 150)
    h100 = find_machine("H100")
    kernels, gemms = Kernels(h100, "bf16"), (Gemm(4096, 4096, 64, many=8),)
    peak = h100.peak_flops["bf16"] * h100.gemm_efficiency["bf16"] * 4096 / (4096 + 150)
    for kind, share in (("attention", 0.85), ("attention_back", 0.7)):
        assert kernels._attention(kind, gemms, 1.0) == pytest.approx(gemms[0].flops / (share * peak) + KERNEL_SECONDS)
    slow = h100.memory_bandwidth * h100.memory_efficiency
    assert kernels._attention("attention", gemms, 1e12) == pytest.approx(1e12 / slow + KERNEL_SECONDS)
    few = (Gemm(512, 150, 64, many=1000),)
    assert kernels._attention("attention", few, 1.0) == pytest.approx(
        2 * few[0].flops / (0.85 * h100.peak_flops["bf16"] * h100.gemm_efficiency["bf16"]) + KERNEL_SECONDS
    )


def test_flash_attention_2_reaches_no_more_of_a_chip_than_its_instructions_let_it() -> None:
    gemms = (Gemm(4096, 4096, 64, many=8),)
    for name, forward, backward in (("H100", 0.36, 0.32), ("B200", 0.17, 0.15)):
        machine = find_machine(name)
        for kind, share in (("flash_attention_2", forward), ("flash_attention_2_back", backward)):
            reached = share * machine.peak_flops["bf16"] * 4096 / (4096 + 150)
            taken = Kernels(machine, "bf16")._attention(kind, gemms, 1.0)
            assert taken == pytest.approx(gemms[0].flops / reached + KERNEL_SECONDS)
    a100 = Kernels(find_machine("A100"), "bf16")
    assert a100._attention("flash_attention_2", gemms, 1.0) == a100._attention("attention", gemms, 1.0)


def test_a_pipelines_neighbours_on_two_nodes_meet_over_the_network() -> None:
    def between(**given: Any) -> float:
        one = Job(MODEL, PIPELINE, Zero(stage=1), stages=2, micro_batch=3, tokens=1, accumulation=2, **given)
        return plan_seconds(one, SLOW).communication

    # Hidden states of 3 rows of 10 in fp32, down and up for each of two micro-batches.
    assert between(world_size=2, ranks_per_node=2) == pytest.approx(4 * (3 * 10 * 4 / 100 + 1.0))
    assert between(world_size=2, ranks_per_node=1) == pytest.approx(4 * (3 * 10 * 4 / 20 + 10.0))
