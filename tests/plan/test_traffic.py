"""What ranks send and copy in a step, worked out here: a byte takes a second in memory, and a hundredth on the bus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.plan.engines.resident import Weights
from finetune.plan.engines.zero3 import played
from finetune.plan.job import DEEPSPEED, PIPELINE, Job, tape_of
from finetune.plan.kernels import HALF_SPEED_KEYS, KERNEL_SECONDS, SUSTAINED, Kernels, kernels_of
from finetune.plan.machine import Link, Machine, Nvme, find_machine
from finetune.plan.model import Model, model_of
from finetune.plan.seconds import plan_seconds, share_of
from finetune.plan.traffic import Flow, Traffic, traffic_of
from finetune.plan.values import Gemm, Op, Storage, Value
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


# The host's time on a GPU, in launches of a forward pass: of an operator that no Python surrounds, and of hooks whose
# time was measured in launches of a CPU.
SIMPLE, PYTHON = 0.3, 0.56
ADDED = 3 * 4 * ELEMENTS  # a later micro-batch's gradients: two are read, one is written


def test_one_process_sends_nothing_and_adds_later_micro_batches() -> None:
    found = traffic(world_size=1)
    assert (found.forward, found.boundary, found.step) == (Flow(), Flow(), Flow())
    assert found.backward.work.device == pytest.approx(ADDED)
    assert found.backward.work.launches == pytest.approx(SIMPLE * TENSORS)


def test_ddp_copies_gradients_into_buckets_and_sums_them_there() -> None:
    found = traffic()
    assert found.backward.work.device == pytest.approx(ADDED)
    assert found.boundary.communication == found.boundary.tail == pytest.approx(ring(4 * ELEMENTS))
    assert found.boundary.work.device == pytest.approx(2 * 4 * ELEMENTS)
    assert found.boundary.work.launches == pytest.approx((SIMPLE + PYTHON * 1.5) * TENSORS)
    assert found.overlaps
    assert found.step == Flow()


def test_a_bucket_of_ddp_is_of_twenty_five_mebibytes_and_nothing_hides_the_last() -> None:
    """Twelve layers of 4 MB are 48 MB: two buckets."""
    wide = model_of({"model_type": "mlp", "width": 1000, "layers": 11, "num_labels": 1000})
    found = traffic(wide).boundary
    assert found.communication == pytest.approx(2 * ring(4 * wide.parameters / 2))
    assert found.tail == pytest.approx(found.communication / 2)


def test_zero_0_joins_sums_and_cuts_up_behind_the_last_backward_pass() -> None:
    found = traffic(engine=DEEPSPEED, zero=Zero(stage=0), precision="bf16")
    assert found.boundary == Flow()
    assert found.step.communication == pytest.approx(ring(2 * ELEMENTS))
    assert found.step.work.device == pytest.approx((2 * 2 + 2) * 2 * ELEMENTS)
    assert found.step.work.launches == pytest.approx(SIMPLE * 2 * TENSORS)
    assert found.backward.work.device == pytest.approx(ADDED / 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_sum_buckets_and_gather_what_was_stepped(stage: int) -> None:
    """Of 150 elements: three buckets."""
    zero = Zero(stage=stage, reduce_bucket_size=150)
    found = traffic(engine=DEEPSPEED, zero=zero)
    # Into the bucket (read and written), scaled, joined once more; this rank's part out of it.
    seconds = 3 * 2 * 4 * ELEMENTS + 2 * 4 * OWNED
    launches = SIMPLE * (TENSORS + TENSORS / 2) + PYTHON * 3 * TENSORS
    assert found.boundary.communication == pytest.approx(3 * ring(4 * ELEMENTS / 3))
    assert found.boundary.tail == pytest.approx(ring(4 * ELEMENTS / 3))
    assert found.boundary.work.device == pytest.approx(seconds)
    assert found.boundary.work.launches == pytest.approx(launches)
    assert found.boundary.offload == 0
    if stage == 1:
        assert found.backward.work.device == pytest.approx(ADDED)
        assert found.backward.communication == 0
    else:
        assert found.backward.work.device == pytest.approx(seconds + 3 * 4 * OWNED)
        assert found.backward.work.launches == pytest.approx(launches + SIMPLE * TENSORS / 2)
        assert found.backward.communication == found.boundary.communication
    # Flat groups of matrices and vectors, half of each from the other rank.
    assert found.step.communication == pytest.approx(0.5 * 4 * ELEMENTS / 100 + 2 * 1.0)
    assert not found.overlaps
    assert traffic(engine=DEEPSPEED, zero=replace(zero, overlap_comm=True)).overlaps
    assert not traffic(engine=DEEPSPEED, zero=replace(zero, overlap_comm=True), device="cpu").overlaps


def test_gradients_for_an_offloaded_optimizer_cross_the_link_to_the_host() -> None:
    found = traffic(engine=DEEPSPEED, zero=Zero(stage=2, reduce_bucket_size=150, offload_optimizer="cpu"))
    assert found.boundary.offload == pytest.approx(4 * OWNED / 8)


THREE = Zero(stage=3, persistence_threshold=0, prefetch_bucket_size=0, max_reuse_distance=0, reduce_bucket_size=150)


@pytest.mark.parametrize("quantized", [False, True])
def test_zero_3_gathers_joins_and_copies_apart_module_by_module(quantized: bool) -> None:
    zero = replace(THREE, quantized_weights=quantized)
    found = traffic(engine=DEEPSPEED, zero=zero)
    job = Job(MODEL, DEEPSPEED, zero, 2, tokens=1)
    engine = played(tape_of(job), Weights(MODEL.tensors, 4), zero, 2)
    assert engine.gathers["forward"] == [(110, 2)] * LAYERS
    sent = 1 if quantized else 4  # int8
    each = 0.5 * sent * 110 / 100 + 1.0
    assert found.forward.communication == pytest.approx(LAYERS * each)
    assert found.forward.tail == pytest.approx(each)
    # Pieces into the flat tensor (half of it, read and written), and out of it (all of it).
    assert found.forward.work.device == pytest.approx(LAYERS * 3 * 4 * 110)
    assert found.forward.work.launches == pytest.approx(LAYERS * (SIMPLE * 2 + PYTHON * (36 + 20 + 10 * 2)))
    assert found.step.communication == 0


def test_zero_3_scatters_buckets_of_gradients_and_adds_pieces() -> None:
    """Each joined, copied and scaled (read and written), scattered, and its half copied out."""
    found = traffic(engine=DEEPSPEED, zero=THREE)
    engine = played(tape_of(Job(MODEL, DEEPSPEED, THREE, 2, tokens=1)), Weights(MODEL.tensors, 4), THREE, 2)
    backward = [elements for elements, _ in engine.gathers["backward"]]
    assert sum(backward) in (330, 440)  # the last module's weights may still be there
    buckets = engine.reduced
    scattered = 0.5 * 4 * ELEMENTS / 100 + buckets * 1.0
    assert found.backward.communication == pytest.approx(0.5 * 4 * sum(backward) / 100 + len(backward) + scattered)
    assert found.backward.tail == pytest.approx(scattered / buckets)
    copied = 3 * 4 * sum(backward) + (3 * 2 + 1) * 4 * ELEMENTS
    assert found.boundary.work.device == pytest.approx(copied)
    assert found.backward.work.device == pytest.approx(copied + 3 * 4 * OWNED)
    hooks = LAYERS * 36 + len(backward) * (20 + 10 * 2) + 10 * TENSORS
    launches = PYTHON * hooks + SIMPLE * (len(backward) * 2 + TENSORS)
    assert found.boundary.work.launches == pytest.approx(launches)
    assert found.backward.work.launches == pytest.approx(launches + SIMPLE * TENSORS / 2)


def test_persistent_weights_are_gathered_one_by_one_behind_the_step() -> None:
    found = traffic(engine=DEEPSPEED, zero=replace(THREE, persistence_threshold=50))
    assert found.step.communication == pytest.approx(4 * (0.5 * 4 * 10 / 100 + 1.0))
    assert found.step.work.launches == pytest.approx(PYTHON * 10 * 4)
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


def test_quantized_gradients_are_an_eighth_of_their_bytes_between_nodes_alone() -> None:
    """qgZ over two nodes of two, in half a byte an element: three quarters over the bus of 40, and one of three steps
    is between nodes."""
    zero = replace(THREE, quantized_gradients=True, reduce_bucket_size=10**6)
    plain, quick = (traffic(engine=DEEPSPEED, zero=one, world_size=4, ranks_per_node=2) for one in (
        replace(zero, quantized_gradients=False), zero))  # fmt: skip
    assert quick.backward.tail == pytest.approx(3 / 4 * 0.5 * ELEMENTS / 40 + 2 * 1.0 + 10.0)
    assert plain.backward.tail == pytest.approx(3 / 4 * 4 * ELEMENTS / 40 + 2 * 1.0 + 10.0)
    one_node = traffic(engine=DEEPSPEED, zero=zero)
    assert one_node.backward == traffic(engine=DEEPSPEED, zero=replace(zero, quantized_gradients=False)).backward


# The loop, and kernels


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loops_own_work_is_counted_in_launches(accumulation: int) -> None:
    machine = replace(find_machine("H100"), launch_seconds=0.5, name="slow host")
    found = plan_seconds(Job(MODEL, accumulation=accumulation, tokens=1), machine)
    assert found.loop == pytest.approx(200 * 0.5)


def test_a_step_factor_stretches_every_part_alike() -> None:
    h100 = find_machine("H100")
    plain = plan_seconds(Job(MODEL, tokens=1), h100)
    slower = plan_seconds(Job(MODEL, tokens=1), replace(h100, step_factor=1.5, name="stretched"))
    assert slower.total == pytest.approx(1.5 * plain.total)
    assert slower.forward == pytest.approx(1.5 * plain.forward)


def test_ranks_of_a_cpu_share_what_was_measured_of_it_and_a_gpu_is_ones_own() -> None:
    cpu = replace(find_machine("cpu"), name="shared", ranks_per_node=2)
    four = share_of(cpu, 4)
    assert four.memory_bandwidth == cpu.memory_bandwidth / 2
    assert four.peak_flops["fp32"] == cpu.peak_flops["fp32"] / 2
    assert share_of(cpu, 1).memory_bandwidth == 2 * cpu.memory_bandwidth
    assert four.launch_seconds == cpu.launch_seconds
    assert share_of(cpu, 2) is share_of(cpu, 0) is cpu
    assert share_of(find_machine("H100"), 3) == find_machine("H100")


def attention(machine: Machine, keys: int, name: str = "attention", moved: int = 1) -> tuple[float, float, int]:
    """Seconds forward and backward, and forward's FLOPs; the backward pass has twice as many here."""
    gemm, x = Gemm(4096, keys, 64, many=8), Value(1, 2, Storage(2))
    op = Op(name, (x,), (), gemms=(gemm,), gemms_back=(gemm, gemm), moved=moved, moved_back=moved)
    forward, backward = Kernels(machine, "bf16").op(op)
    return forward.device - KERNEL_SECONDS, backward.device - KERNEL_SECONDS, gemm.flops


def test_attention_reaches_the_rate_of_products_over_many_keys_or_waits_for_memory() -> None:
    h100 = find_machine("H100")
    peak = SUSTAINED * h100.peak_flops["bf16"] * h100.gemm_efficiency["bf16"]
    forward, backward, flops = attention(h100, 4096)
    assert forward == pytest.approx(flops / peak * (4096 + HALF_SPEED_KEYS) / 4096)
    assert backward == pytest.approx(2 * forward)
    forward, _, flops = attention(h100, HALF_SPEED_KEYS)
    assert forward == pytest.approx(2 * flops / peak)
    slow = h100.memory_bandwidth * h100.memory_efficiency
    assert attention(h100, 4096, moved=10**12)[0] == pytest.approx(10**12 / slow)


def test_flash_attention_2_reaches_no_more_of_a_chip_than_its_instructions_let_it() -> None:
    for name, ahead, back in (("H100", 0.36, 0.32), ("B200", 0.17, 0.15)):
        machine = find_machine(name)
        forward, backward, flops = attention(machine, 4096, "flash_attention_2")
        reached = machine.peak_flops["bf16"] * 4096 / (4096 + HALF_SPEED_KEYS)
        assert (forward, backward) == pytest.approx((flops / (ahead * reached), 2 * flops / (back * reached)))
    a100 = find_machine("A100")
    assert attention(a100, 4096, "flash_attention_2") == attention(a100, 4096)


def test_a_pipelines_neighbours_on_two_nodes_meet_over_the_network() -> None:
    def between(**given: Any) -> float:
        one = Job(MODEL, PIPELINE, Zero(stage=1), stages=2, micro_batch=3, tokens=1, accumulation=2, **given)
        return plan_seconds(one, SLOW).communication

    # Hidden states of 3 rows of 10 in fp32, down and up for each of two micro-batches.
    assert between(world_size=2, ranks_per_node=2) == pytest.approx(4 * (3 * 10 * 4 / 100 + 1.0))
    assert between(world_size=2, ranks_per_node=1) == pytest.approx(4 * (3 * 10 * 4 / 20 + 10.0))
