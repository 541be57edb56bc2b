"""Step times against sums that are worked out here, and what must hold of any machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from conftest import REPO

from finetune.errors import RequestError
from finetune.plan.from_run import job_of
from finetune.plan.job import DEEPSPEED, PIPELINE, TRAINER, Job, tape_of
from finetune.plan.kernels import KERNEL_SECONDS, SUSTAINED, Kernels, Work, kernels_of, passed
from finetune.plan.machine import Link, Machine, Nvme, find_machine
from finetune.plan.model import Model, model_of
from finetune.plan.optimizers import Optimizer
from finetune.plan.seconds import plan_seconds, stage_bounds, stage_seconds
from finetune.plan.tape import Tape
from finetune.plan.values import Gemm, Lora, Numbers, Op, Storage, Value
from finetune.plan.zero import Zero
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.resolve import resolve

LITE = {
    "model_type": "gptlite",
    "vocab_size": 65,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}
H100, CPU = find_machine("H100"), find_machine("cpu")


def lite(**sizes: Any) -> Model:
    return model_of({**LITE, **sizes})


def deep(layers: int = 2048, width: int = 256) -> Model:
    return model_of({"model_type": "mlp", "width": width, "layers": layers, "num_labels": 10})


def job(**given: Any) -> Job:
    return Job(**{"model": lite(), "tokens": 512, "micro_batch": 4, **given})


ZERO3 = Zero(stage=3, overlap_comm=True, persistence_threshold=10_000, prefetch_bucket_size=1_000_000)
JOBS = {
    "one process": job(),
    "DDP": job(world_size=16),
    "DDP, accumulating": job(world_size=16, accumulation=4),
    "ZeRO-0": job(world_size=16, engine=DEEPSPEED, precision="bf16"),
    "ZeRO-1": job(world_size=16, engine=DEEPSPEED, zero=Zero(stage=1, overlap_comm=True)),
    "ZeRO-2": job(world_size=16, engine=DEEPSPEED, zero=Zero(stage=2), accumulation=3),
    "ZeRO-2 offloaded": job(
        world_size=16, engine=DEEPSPEED, zero=Zero(stage=2, offload_optimizer="cpu"), optimizer=Optimizer("cpu_adam")
    ),
    "ZeRO-3": job(world_size=16, engine=DEEPSPEED, zero=ZERO3, precision="bf16"),
    "ZeRO++": job(
        world_size=16,
        engine=DEEPSPEED,
        zero=replace(ZERO3, hpz_ranks=8, quantized_weights=True, quantized_gradients=True),
    ),
    "NVMe": job(
        world_size=16,
        engine=DEEPSPEED,
        zero=replace(ZERO3, offload_optimizer="nvme", offload_param="nvme"),
        optimizer=Optimizer("cpu_adam"),
    ),
    "checkpointing": job(checkpoint_interval=1),
    "pipeline": job(world_size=16, engine=PIPELINE, zero=Zero(stage=1), stages=4, accumulation=8),
}


def faster(machine: Machine, times: float, **fields: Any) -> Machine:
    """`times` as fast in what `fields` names."""
    return replace(machine, **{name: change(getattr(machine, name), times) for name, change in fields.items()})


def _link(link: Link, times: float) -> Link:
    return Link(link.bandwidth_bytes_per_second * times, link.latency_seconds / times)


FASTER: dict[str, dict[str, Callable[[Any, float], Any]]] = {
    "memory": {"memory_bandwidth": lambda rate, times: rate * times},
    "matrices": {"peak_flops": lambda peaks, times: {name: peak * times for name, peak in peaks.items()}},
    "links": {"intra_node": _link, "inter_node": _link},
    "host": {"host_link": _link, "cpu_adam_parameters_per_second": lambda rate, times: rate * times},
    "disk": {"nvme": lambda disk, times: Nvme(disk.bandwidth_read * times, disk.bandwidth_write * times)},
    "launches": {"launch_seconds": lambda seconds, times: seconds / times},
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("part", FASTER)
def test_no_faster_machine_takes_longer(name: str, part: str) -> None:
    quick = faster(H100, 2, **FASTER[part])
    assert plan_seconds(JOBS[name], quick).total <= plan_seconds(JOBS[name], H100).total * (1 + 1e-9)


@pytest.mark.parametrize("name", JOBS)
def test_every_part_is_no_less_than_nothing_and_the_rates_follow_from_the_total(name: str) -> None:
    one = JOBS[name]
    step = plan_seconds(one, H100)
    parts = (step.forward, step.backward, step.recomputation, step.copies, step.optimizer, step.exposed_communication,
             step.offload, step.loop, step.launch, step.idle)  # fmt: skip
    assert min(parts) >= 0
    assert step.total == pytest.approx(sum(parts))
    assert step.exposed_communication <= step.communication * (1 + 1e-9)
    assert step.samples_per_second == pytest.approx(one.global_batch / step.total)
    assert step.tokens_per_second == pytest.approx(one.global_batch * one.tokens / step.total)
    assert 0 < step.mfu < 1


def test_model_flops_are_six_a_parameter_and_token_and_those_of_attention() -> None:
    """Products: 12 C^2 weights a block and C V of the head, 6 FLOPs each a token; causal attention: 2 products of T / 2
    x C forward, 5 backward, 2 FLOPs each."""
    width, tokens, rows = 768, 512, 4
    weights = 12 * 12 * width**2 + width * 65
    attention = 12 * 7 * 2 * (tokens / 2) * width
    step = plan_seconds(job(), H100)
    # The embedding passes no gradient on, but the first block's input needs one.
    assert step.model_flops == pytest.approx(rows * tokens * (6 * weights + attention), rel=1e-3)


def test_recomputation_is_a_second_forward_pass_of_the_blocks() -> None:
    plain, again = plan_seconds(job(), H100), plan_seconds(job(checkpoint_interval=1), H100)
    assert again.recomputation == pytest.approx(plain.forward, rel=0.05)
    assert again.backward == pytest.approx(plain.backward, rel=0.01)
    assert again.model_flops == pytest.approx(plain.model_flops)
    half = plan_seconds(job(checkpoint_interval=2), H100)
    assert half.recomputation == pytest.approx(again.recomputation / 2, rel=0.01)


def test_a_deep_narrow_network_is_ruled_by_its_launches_on_a_gpu() -> None:
    """2,048 layers of 256: each kernel takes 2 us and each launch 6.5."""
    step = plan_seconds(Job(deep(), micro_batch=8, tokens=1), H100)
    assert step.launch > (step.forward + step.backward) / 2
    wide = plan_seconds(Job(deep(3, 8192), micro_batch=512, tokens=1), H100)
    assert wide.launch < 0.2 * wide.total


def test_no_work_of_the_passes_hides_the_launches_of_a_steps_end() -> None:
    """Large batches: the device is behind in the passes. At the end of ZeRO-2's step the host waits for it, then needs
    sixteen operators a gradient."""
    one = job(engine=DEEPSPEED, zero=Zero(stage=2), precision="bf16", micro_batch=256)
    step, tensors = plan_seconds(one, H100), len(one.model.tensors)
    quick = plan_seconds(one, replace(H100, launch_seconds=0.0, name="no host"))
    assert step.forward + step.backward > (tensors * 20 + 1000) * H100.launch_seconds
    assert step.launch + step.optimizer == pytest.approx(0.3 * 16 * tensors * H100.launch_seconds, rel=0.1)
    assert step.total - quick.total == pytest.approx(step.launch + step.loop)


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_a_run_that_looks_at_no_loss_launches_a_steps_end_during_its_passes(optimizer: str) -> None:
    """Large batches and many small tensors: the device is behind in the passes, the host at the end."""
    looks = Job(deep(), micro_batch=2**18, tokens=1, precision="bf16", optimizer=Optimizer(optimizer))
    blind = replace(looks, looks_at_loss=False)
    quick = replace(H100, launch_seconds=0.0, name="no host")
    step = plan_seconds(blind, H100)
    assert step.total - step.loop == pytest.approx(plan_seconds(blind, quick).total)
    assert plan_seconds(looks, H100).total > step.total + 1e-4
    for waits in ({"precision": "fp16"}, {"engine": DEEPSPEED, "zero": Zero(stage=2)}):
        assert plan_seconds(replace(blind, **waits), H100) == plan_seconds(replace(looks, **waits), H100)


@pytest.mark.parametrize(
    ("flags", "looks"),
    [
        ("", True),  # --on_nan stop
        ("--on_nan off", False),  # causal_lm.py has no logging_nan_inf_filter
        ("--on_nan off --logging_nan_inf_filter True", True),
    ],
)
def test_a_run_looks_at_its_loss_for_the_guard_or_the_filter(flags: str, looks: bool) -> None:
    launch = Launch(world_size=1, local_world_size=1, launcher="torchrun")
    run = resolve(CAUSAL_LM, ["--deepspeed", "none", *flags.split()], launch, is_here=False)
    assert job_of(run, H100)[0].looks_at_loss is looks


def test_a_launch_of_a_backward_pass_takes_the_host_of_a_gpu_less_than_one_of_a_forward_pass() -> None:
    one = Job(deep(100), micro_batch=8, tokens=1)
    ahead, back = (
        sum(getattr(segment, way).launches for segment in passed(tape_of(one), H100, "fp32"))
        for way in ("forward", "backward")
    )
    on_cpu = passed(tape_of(replace(one, device="cpu")), CPU, "fp32")
    assert ahead == pytest.approx(sum(segment.forward.launches for segment in on_cpu))
    assert back == pytest.approx(0.3 * sum(segment.backward.launches for segment in on_cpu))


def test_on_a_cpu_a_launch_is_time_of_its_own() -> None:
    one = Job(deep(100), micro_batch=8, tokens=1, device="cpu")
    slow = replace(CPU, launch_seconds=2 * CPU.launch_seconds)
    assert plan_seconds(one, slow).launch == pytest.approx(2 * plan_seconds(one, CPU).launch)


def test_collectives_hide_behind_the_backward_pass_on_a_gpu_and_not_on_a_cpu() -> None:
    hidden = plan_seconds(job(world_size=8), H100)
    assert 0 < hidden.exposed_communication < hidden.communication
    bare = plan_seconds(job(world_size=2, device="cpu"), CPU)
    assert bare.exposed_communication == bare.communication > 0


def test_gradients_of_ddp_and_zero_1_travel_once_a_step_and_those_of_zero_2_each_micro_batch() -> None:
    def sent(**given: Any) -> float:
        return plan_seconds(job(world_size=8, **given), H100).communication

    assert sent(accumulation=4) == pytest.approx(sent())
    one = {"engine": DEEPSPEED, "zero": Zero(stage=1)}
    assert sent(accumulation=4, **one) == pytest.approx(sent(**one))
    two = {"engine": DEEPSPEED, "zero": Zero(stage=2)}
    reduced = sent(accumulation=2, **two) - sent(**two)
    assert sent(accumulation=4, **two) == pytest.approx(sent(**two) + 3 * reduced)


def test_ddp_sends_twice_the_share_of_all_gradients() -> None:
    """No latency, one node of 8: 2 x 7 / 8 of the weights' bytes over the bus."""
    machine = replace(H100, intra_node=Link(100e9, 0.0))
    one = job(world_size=8)
    expected = 2 * 7 / 8 * 4 * one.model.parameters / 100e9
    assert plan_seconds(one, machine).communication == pytest.approx(expected)


def test_zero_3_gathers_weights_and_scatters_gradients() -> None:
    """Without latency, with next to no reuse: forward and backward gathers and one scatter, 7 / 8 of the bytes each.
    What is left of a module behind the forward pass need not be gathered again at once: the head."""
    machine = replace(H100, intra_node=Link(100e9, 0.0))
    zero = replace(ZERO3, persistence_threshold=0, max_reuse_distance=0, prefetch_bucket_size=0)
    one = job(world_size=8, engine=DEEPSPEED, zero=zero)
    expected = 3 * 7 / 8 * 4 * one.model.parameters / 100e9
    assert plan_seconds(one, machine).communication == pytest.approx(expected, rel=0.02)


def test_hpz_gathers_backward_within_the_node() -> None:
    """Between nodes of 8 with slow links, of two gathers and one scatter one gather stays inside."""
    slow = replace(H100, inter_node=Link(1e9, 1e-5))
    zero = replace(ZERO3, max_reuse_distance=0, prefetch_bucket_size=0)
    plain = plan_seconds(job(world_size=16, engine=DEEPSPEED, zero=zero), slow)
    inside = plan_seconds(job(world_size=16, engine=DEEPSPEED, zero=replace(zero, hpz_ranks=8)), slow)
    assert inside.communication < 0.75 * plain.communication


def test_offloading_costs_time() -> None:
    plain = plan_seconds(JOBS["ZeRO-2"], H100)
    offloaded = plan_seconds(
        replace(JOBS["ZeRO-2"], zero=Zero(stage=2, offload_optimizer="cpu"), optimizer=Optimizer("cpu_adam")), H100
    )
    assert offloaded.optimizer > 2 * plain.optimizer


def test_eight_stages_of_twelve_layers_are_three_quarters_as_fast_as_two_pipelines_of_four() -> None:
    """Twelve blocks and a small embedding and head: four stages hold 3 blocks each, so two pipelines finish 2
    micro-batches in 3 blocks' time. Of eight stages some hold 2: one micro-batch in 2. (1 / 2) / (2 / 3) = 0.75. The
    study has 8.1 samples/s after 10.9."""
    given = {"model": lite(), "engine": PIPELINE, "world_size": 8, "micro_batch": 1, "tokens": 2048}
    four = Job(**given, stages=4, accumulation=64)
    eight = Job(**given, stages=8, accumulation=128)
    assert four.global_batch == eight.global_batch
    machine = replace(find_machine("V100-32GB"), launch_seconds=0.0)
    ratio = plan_seconds(eight, machine).samples_per_second / plan_seconds(four, machine).samples_per_second
    assert ratio == pytest.approx(0.75, abs=0.05)


def test_stages_share_all_segments_and_their_seconds() -> None:
    one = JOBS["pipeline"]
    bounds = stage_bounds(one, H100)
    assert bounds[0] == 0
    assert len(bounds) == 5
    assert bounds == sorted(set(bounds))
    forward, backward = stage_seconds(one, H100)
    assert len(forward) == len(backward) == 4
    uniform = stage_bounds(replace(one, partition_method="uniform"), H100)
    assert [last - first for first, last in pairwise(uniform)] == [4, 4, 4, 4]  # 12 blocks, 2 embeddings, norm and head


def test_a_pipeline_idles_less_with_more_micro_batches() -> None:
    few, many = (plan_seconds(replace(JOBS["pipeline"], accumulation=count), H100) for count in (4, 32))
    assert many.idle / many.total < few.idle / few.total


# Kernels


def linear(rows: int, fan_out: int, fan_in: int, size: int = 2) -> Op:
    """A product of a layer without a bias."""
    factors = tuple(Value(count, size, Storage(0)) for count in (rows * fan_in, fan_in * fan_out))
    moved = size * (rows * fan_in + fan_in * fan_out + rows * fan_out)
    return Op("linear", factors, (), gemms=(Gemm(rows, fan_out, fan_in),), moved=moved)


def test_a_large_product_takes_its_flops_at_the_rate_that_large_ones_reach() -> None:
    seconds = 2 * 8192**3 / (SUSTAINED * H100.peak_flops["bf16"] * H100.gemm_efficiency["bf16"])
    forward, _ = Kernels(H100, "bf16").op(linear(8192, 8192, 8192))
    assert forward.device == pytest.approx(seconds + KERNEL_SECONDS)
    assert forward.launches == 1


def test_a_machine_may_sustain_another_share_of_its_rate_than_an_a100() -> None:
    quick = replace(H100, name="quick", sustained=1.0)
    slow, fast = (Kernels(machine, "bf16").op(linear(8192, 8192, 8192))[0].device for machine in (H100, quick))
    assert fast - KERNEL_SECONDS == pytest.approx(SUSTAINED * (slow - KERNEL_SECONDS))


def test_a_thin_product_takes_the_time_of_its_bytes() -> None:
    """One row: 2 bytes of each weight are read for 2 FLOPs."""
    read = 2 * (4096 * 4096 + 2 * 4096) / (H100.memory_bandwidth * H100.memory_efficiency)
    forward, _ = Kernels(H100, "bf16").op(linear(1, 4096, 4096))
    assert forward.device == pytest.approx(read + KERNEL_SECONDS)


def test_products_of_fp32_factors_run_in_fp32() -> None:
    seconds = 2 * 8192**3 / (SUSTAINED * H100.peak_flops["fp32"] * H100.gemm_efficiency["fp32"])
    forward, _ = Kernels(H100, "bf16").op(linear(8192, 8192, 8192, size=4))
    assert forward.device == pytest.approx(seconds + KERNEL_SECONDS)


def test_an_operator_takes_the_time_of_its_bytes_and_each_kernel_its_least() -> None:
    bus = H100.memory_bandwidth * H100.memory_efficiency
    x = Value(1000, 4, Storage(4000))
    op = Op("gelu", (x,), (), moved=8e9, moved_back=16e9, kernels_back=3)  # type: ignore[arg-type]
    assert Kernels(H100, "bf16").op(op) == (
        Work(8e9 / bus + KERNEL_SECONDS, 1),
        Work(16e9 / bus + 3 * KERNEL_SECONDS, 3),
    )
    on_cpu = Kernels(CPU, "fp32").op(replace(op, inputs=(replace(x, needs_grad=False),)))
    assert on_cpu == (Work(8e9 / (CPU.memory_bandwidth * CPU.memory_efficiency), 1), Work())
    passes = replace(op, passes_on=True)
    assert Kernels(H100, "bf16").op(passes)[1] == Work()
    met = Kernels(H100, "bf16").op(replace(passes, inputs=(x, x)))[1]  # the other input's gradient is added to it
    assert met == Work(8e9 / bus + KERNEL_SECONDS, 1)


def test_a_gradient_reads_what_was_saved_besides() -> None:
    tape = Tape(Numbers(), {})
    with tape.segment("test"):
        tape.unary("gelu", tape.given(10, needs_grad=True))
        tape.scale(tape.given(10, needs_grad=True))
    gelu, scale = (op for op in tape.ops if op.kernels)
    assert (gelu.moved, gelu.moved_back) == (2 * 40, 4 * 40)
    assert (scale.moved, scale.moved_back) == (2 * 40, 2 * 40)


def test_a_machine_has_its_kernels_once() -> None:
    assert kernels_of(H100, "bf16") is kernels_of(find_machine("H100"), "bf16")
    assert Work(1, 2) + Work(3, 4) == Work(4, 6)


def test_half_precision_that_a_machine_lacks_is_as_slow_as_fp32() -> None:
    assert Kernels(CPU, "bf16").precision == "fp32"


def test_the_trainer_alone_ignores_what_a_config_says_of_zero() -> None:
    assert plan_seconds(job(engine=TRAINER), H100) == plan_seconds(job(engine=TRAINER, zero=ZERO3), H100)


def test_planning_seconds_imports_no_torch() -> None:
    code = "import sys, finetune.plan.seconds; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_a_pipeline_waits_for_the_launches_of_its_optimizer_too() -> None:
    job = Job(model_of(LITE, "test"), PIPELINE, Zero(stage=1), world_size=2, stages=2, accumulation=2, device="cuda")
    slow = replace(find_machine("A100-80GB"), launch_seconds=1e-2)
    few, many = (
        plan_seconds(replace(job, optimizer=Optimizer(kind)), slow).parts["launch"] for kind in ("sgd", "adam_foreach")
    )
    assert many > few


def _seconds(machine: Machine, precision: str, tf32: bool | None, name: str, size: int) -> float:
    """Of an operator that takes its products' time; `size`: bytes of each element of its factors."""
    side = 4096
    value = Value(side**2, size, Storage(size * side**2))
    op = Op(name, (value, value), (value,), gemms=(Gemm(side, side, side),))
    return kernels_of(machine, precision, tf32).op(op)[0].device


@pytest.mark.parametrize(
    ("machine", "precision", "tf32", "rounds"),
    [
        ("A100-80GB", "fp32", None, {"convolution"}),  # torch.backends.cudnn.allow_tf32 is True unless told
        ("A100-80GB", "fp32", True, {"convolution", "linear"}),
        ("A100-80GB", "fp32", False, set[str]()),
        ("A100-80GB", "bf16", True, {"convolution", "linear"}),  # what stays in fp32
        ("MI300X", "fp32", None, set[str]()),  # MIOpen does not round
        ("V100-16GB", "fp32", None, set[str]()),
    ],
)
def test_products_in_fp32_are_rounded_to_tf32_if_asked_and_convolutions_unless_asked_not_to(
    machine: str, precision: str, tf32: bool | None, rounds: set[str]
) -> None:
    gpu = find_machine(machine)
    plain = replace(gpu, peak_flops={kind: peak for kind, peak in gpu.peak_flops.items() if kind != "tf32"})
    faster = {
        name
        for name in ("convolution", "linear")
        if _seconds(gpu, precision, tf32, name, 4) < _seconds(plain, precision, tf32, name, 4)
    }
    assert faster == rounds
    if precision == "bf16":
        assert _seconds(gpu, precision, tf32, "linear", 2) == _seconds(plain, precision, tf32, "linear", 2)


def test_a_run_says_whether_products_are_rounded_to_tf32() -> None:
    launch = Launch(world_size=1, local_world_size=1, launcher="torchrun")
    for flags, wanted in (([], None), (["--tf32", "True"], True), (["--tf32", "False"], False)):
        run = resolve(CAUSAL_LM, ["--deepspeed", "none", "--bf16", "False", *flags], launch, is_here=False)
        assert job_of(run, H100)[0].tf32 is wanted
    run = resolve(CAUSAL_LM, ["--deepspeed", "none", "--fp16", "True", "--tf32", "True"], launch, is_here=False)
    older = find_machine("V100-16GB")
    with pytest.raises(RequestError, match=r"^--tf32 is True \(command line\), but V100-16GB has no TF32\. "):
        job_of(run, older)
    own = replace(older, name="NVIDIA A100-SXM4-80GB")  # a profile of a release that did not measure it
    assert [note for note in job_of(run, own)[2] if note.startswith("--tf32 is not counted, because the profile of")]


def test_a_note_says_that_fused_kernels_of_a_package_are_not_counted() -> None:
    launch = Launch(world_size=1, local_world_size=1, launcher="torchrun")
    for flags, many in (([], 0), (["--use_liger_kernel", "True"], 1)):
        run = resolve(CAUSAL_LM, ["--deepspeed", "none", *flags], launch, is_here=False)
        assert sum("--use_liger_kernel" in note for note in job_of(run, H100)[2]) == many


def test_unpacking_weights_of_4_bits_takes_time_of_its_own_before_each_product() -> None:
    side = 4096
    shapes, packed = {"up.weight": (side, side)}, frozenset({"up.weight"})
    products = []
    for stored in (frozenset[str](), packed):
        tape = Tape(Numbers(bytes_each=2, device="cuda"), shapes, Lora(8, ("down",)), stored)
        with tape.segment("mlp"):
            tape.linear(tape.given(side * side, needs_grad=True), "up")
        products.append(Kernels(H100, "bf16").op(next(op for op in tape.ops if op.name == "linear")))
    for plain, unpacked in zip(*products, strict=True):  # forward, backward: half a byte is read, and two are written
        seconds = side**2 * 2.5 / (H100.memory_bandwidth * H100.memory_efficiency) + KERNEL_SECONDS
        assert unpacked.device - plain.device == pytest.approx(seconds)
        assert unpacked.launches == plain.launches + 1
