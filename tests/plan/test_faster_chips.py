"""A chip that has more of everything is never slower: shipped machines, and pairs that are made up."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from conftest import gate_has
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.plan.job import DEEPSPEED, PIPELINE, TRAINER, Job, tape_of
from finetune.plan.kernels import SUSTAINED, kernels_of
from finetune.plan.machine import Link, Machine, Nvme, find_machine, machine_names
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.optimizers import Optimizer
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import CHUNKED_LOSS
from finetune.plan.zero import Zero

GPUS = [machine for name in machine_names() if (machine := find_machine(name)).device != "cpu"]
MODELS = ["Llama-3.2-1B", "gpt2", "distilbert-base-uncased", "t5-small", "Qwen3-30B-A3B", "resnet-18", "mlp-deep"]
PRECISIONS = ["fp32", "fp16", "bf16"]
LAYOUTS = {
    "alone": {"engine": TRAINER},
    "DDP": {"engine": TRAINER, "world_size": 16},
    **{f"ZeRO-{stage}": {"engine": DEEPSPEED, "world_size": 16, "zero": Zero(stage=stage)} for stage in range(4)},
    "ZeRO-3 from disk": {
        "engine": DEEPSPEED,
        "world_size": 16,
        "zero": Zero(stage=3, offload_optimizer="nvme", offload_param="nvme"),
        "optimizer": Optimizer("cpu_adam"),
    },
}


@cache
def job(name: str, precision: str, layout: str) -> Job:
    model = model_of(find_model_config(name))
    chunk = 2048 if model.head == "causal_lm" and model.vocab_size > 8192 else 0
    return Job(model, tokens=256, micro_batch=2, precision=precision, loss_chunk_tokens=chunk, **LAYOUTS[layout])  # type: ignore[arg-type]


def reached(machine: Machine) -> dict[str, float]:
    """What the machine has of everything; a product's rate is that which is reached."""
    sustained = machine.sustained or SUSTAINED
    rates = {kind: sustained * machine.gemm_efficiency[kind] * peak for kind, peak in machine.peak_flops.items()}
    links = {
        f"{name} {part}": value
        for name in ("intra_node", "inter_node", "host_link")
        for part, value in (
            ("bandwidth", getattr(machine, name).bandwidth_bytes_per_second),
            ("quickness", -getattr(machine, name).latency_seconds),
        )
    }
    return {
        **rates,
        **links,
        "memory": machine.memory_bandwidth * machine.memory_efficiency,
        "launches": -machine.launch_seconds,
        "disk, read": machine.nvme.bandwidth_read,
        "disk, write": machine.nvme.bandwidth_write,
        "Adam": machine.cpu_adam_parameters_per_second,
    }


def has_more_of_everything(one: Machine, other: Machine) -> bool:
    ours, theirs = reached(one), reached(other)
    return all(name in ours and ours[name] >= amount for name, amount in theirs.items())


PAIRS = [pair for pair in itertools.permutations(GPUS, 2) if has_more_of_everything(*pair)]


def test_some_shipped_machines_have_more_of_everything_than_others() -> None:
    names = {(one.name, other.name) for one, other in PAIRS}
    assert {("H200", "H100-80GB"), ("A100-80GB", "A100-40GB"), ("H100-80GB", "V100-32GB")} <= names


CASES = [(name, layout) for name in MODELS for layout in LAYOUTS]
# The deep MLP has the most ops.
OF_DAY = [(name, layout) for name, layout in CASES if name != "mlp-deep" or layout in ("DDP", "ZeRO-0")]


@pytest.mark.parametrize(("name", "layout"), gate_has(OF_DAY, CASES))
def test_no_shipped_machine_is_slower_than_one_that_has_less_of_everything(name: str, layout: str) -> None:
    for precision in PRECISIONS:
        took = {machine.name: plan_seconds(job(name, precision, layout), machine).total for machine in GPUS}
        for quick, slow in PAIRS:
            if precision in slow.peak_flops:
                assert took[quick.name] <= took[slow.name] * (1 + 1e-9), (quick.name, slow.name, precision)


def scaled(link: Link, times: float) -> Link:
    return Link(link.bandwidth_bytes_per_second * times, link.latency_seconds / times)


TIMES = st.floats(1.0, 8.0)


@given(
    machine=st.sampled_from(GPUS),
    peaks=st.tuples(TIMES, TIMES, TIMES, TIMES),
    rates=st.tuples(TIMES, TIMES, TIMES, TIMES),
    links=st.tuples(TIMES, TIMES, TIMES),
    name=st.sampled_from(MODELS),
    precision=st.sampled_from(PRECISIONS),
    layout=st.sampled_from([*LAYOUTS]),
)
@settings(max_examples=100, deadline=None)
def test_no_made_up_machine_is_slower_than_the_one_that_it_has_more_of_everything_than(
    machine: Machine,
    peaks: tuple[float, ...],
    rates: tuple[float, ...],
    links: tuple[float, ...],
    name: str,
    precision: str,
    layout: str,
) -> None:
    better = replace(
        machine,
        peak_flops={kind: peak * times for (kind, peak), times in zip(machine.peak_flops.items(), peaks, strict=False)},
        memory_bandwidth=machine.memory_bandwidth * rates[0],
        launch_seconds=machine.launch_seconds / rates[1],
        nvme=Nvme(machine.nvme.bandwidth_read * rates[2], machine.nvme.bandwidth_write * rates[2]),
        cpu_adam_parameters_per_second=machine.cpu_adam_parameters_per_second * rates[3],
        intra_node=scaled(machine.intra_node, links[0]),
        inter_node=scaled(machine.inter_node, links[1]),
        host_link=scaled(machine.host_link, links[2]),
    )
    one = job(name, precision, layout)
    assert plan_seconds(one, better).total <= plan_seconds(one, machine).total * (1 + 1e-9)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gptlite-post", "gptlite-small"])
def test_no_pipeline_is_slower_on_a_machine_with_more_of_everything(name: str, stages: int) -> None:
    model = model_of(find_model_config(name))
    one = Job(model, PIPELINE, Zero(stage=1), 8, stages=stages, accumulation=8, tokens=512, precision="fp16")
    took = {machine.name: plan_seconds(one, machine).total for machine in GPUS}
    for quick, slow in PAIRS:
        if "fp16" in slow.peak_flops:
            assert took[quick.name] <= took[slow.name] * (1 + 1e-9), (quick.name, slow.name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_in_chunks_multiplies_at_the_rate_of_its_factors(precision: str) -> None:
    """Its result is in fp32, its factors are not. Beside three products it makes fp32 of the logits, scores of these,
    and of those what replaces the logits: 2 + 4, 4 + 4 and 4 + 2 bytes of each. In fp16 the weight's gradient is summed
    in fp32: 2 + 2 and 4 + 4 bytes."""
    h100, rows, vocabulary, hidden = find_machine("H100"), 512, 128_256, 2048
    one = job("Llama-3.2-1B", precision, "ZeRO-2")
    op = next(op for op in tape_of(one).ops if op.name == CHUNKED_LOSS)
    kernels = kernels_of(h100, precision)
    rate = SUSTAINED * h100.gemm_efficiency[precision] * h100.peak_flops[precision]
    product = 2 * rows * vocabulary * hidden / rate
    moved = 20 * rows * vocabulary + (12 * vocabulary * hidden if precision == "fp16" else 0)
    assert kernels.op(op)[0].device == pytest.approx(3 * product + kernels.moved(moved, op.kernels).device)


def test_products_in_fp32_within_half_precision_stay_at_the_rate_of_fp32() -> None:
    """Attention by torch's math fallback (finetune.plan.forward.attention)."""
    llama = replace(job("Llama-3.2-1B", "bf16", "alone"), device="cpu", attention="sdpa")
    config = {**llama.model.sizes.config, "attention_dropout": 0.1}
    tape = tape_of(replace(llama, model=model_of(config), engine=DEEPSPEED))
    op = next(op for op in tape.ops if op.name == "matmul")
    assert op.inputs[0].bytes_each == 4
    h100 = find_machine("H100")
    in_bf16, in_fp32 = (kernels_of(h100, precision).op(op)[0] for precision in ("bf16", "fp32"))
    assert in_bf16 == in_fp32
