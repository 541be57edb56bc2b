"""Seconds of a step's end, worked out here on a machine that moves a byte a second; and what real optimizers move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.utils import has_inf_or_nan
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.plan.engines.resident import Weights
from finetune.plan.job import DEEPSPEED, TRAINER, Job
from finetune.plan.kernels import Work, kernels_of
from finetune.plan.machine import Link, Nvme, find_machine
from finetune.plan.model import model_of
from finetune.plan.optimizers import KINDS, Optimizer
from finetune.plan.update import SEARCH, update_of
from finetune.plan.zero import Zero

SLOW = replace(
    find_machine("H100"),
    name="slow",
    memory_bandwidth=1.0,
    memory_efficiency=1.0,
    cpu_adam_parameters_per_second=10.0,
    host_link=Link(8.0, 0.0),
    nvme=Nvme(40.0, 20.0),
)
MODEL = model_of({"model_type": "mlp", "width": 10, "layers": 3, "num_labels": 10})
ELEMENTS, TENSORS = 440, 8  # four layers of 100 and 10


def update(machine: Any = SLOW, **given: Any) -> Work:
    job = Job(**{"model": MODEL, "tokens": 1, **given})
    kernels = kernels_of(machine, job.precision)
    return update_of(job, machine, kernels, Weights(MODEL.tensors, job.weight_bytes))


def test_the_model_is_as_large_as_is_reckoned_with() -> None:
    assert (MODEL.parameters, len(MODEL.tensors)) == (ELEMENTS, TENSORS)


class Counted(TorchDispatchMode):
    """Bytes that operators read and write, each tensor of an operator once, and how many they are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.bytes, self.operators = size, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {id(t) for t in _large([args, kwargs or {}], self.size)}
        if not read:
            return out
        fused = func.__name__.startswith("_fused")
        in_place = func.__name__.split(".")[0].endswith("_")
        written = len(read) - 1 if fused else 1 if in_place or _large([out], self.size) else 0
        self.bytes += 4 * self.size * (len(read) + written)
        self.operators += 1
        return out


def _large(node: Any, size: int) -> list[torch.Tensor]:
    def walk(one: Any) -> Iterator[torch.Tensor]:
        if isinstance(one, torch.Tensor):
            if one.numel() == size:
                yield one
        elif isinstance(one, dict):
            yield from walk(list(one.values()))
        elif isinstance(one, list | tuple):
            for part in one:
                yield from walk(part)

    return list(walk(node))


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("adam", lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True)),
        ("adam_foreach", lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True)),
        ("sgd", lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True)),
        ("momentum", lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=True)),
    ],
)
def test_a_real_optimizer_moves_as_many_bytes_in_as_many_operators(kind: str, build: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = build([weight])
    for _ in range(2):  # the first makes the states
        weight.grad = torch.ones_like(weight)
        with Counted(64) as counted:
            optimizer.step()
    assert (counted.bytes / 64, counted.operators) == (KINDS[kind].moved, KINDS[kind].operators)


def test_the_kahan_summing_optimizer_moves_as_many_bytes_in_bf16() -> None:
    optimi = pytest.importorskip("optimi", reason="torch-optimi (extra dev) is not installed")
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = optimi.StableAdamW([weight], lr=0.1, weight_decay=0.1, triton=False)
    for _ in range(2):  # the first makes the states
        weight.grad = torch.ones_like(weight)
        with Counted(64) as counted:
            optimizer.step()
    of_four_bytes = counted.bytes / 64
    assert (of_four_bytes / 2, counted.operators) == (KINDS["kahan_adam"].moved, KINDS["kahan_adam"].operators)


# Bytes an element and operators: those above, CPU Adam as the fused one; 1-bit Adam, Adafactor and 8-bit ones as
# finetune/plan/optimizers.py counts them along their sources.
MOVED = {"adam": (28, 1), "adam_foreach": (80, 8), "cpu_adam": (28, 1), "onebit_adam": (60, 12), "sgd": (12, 1),
         "momentum": (32, 3), "adafactor": (88, 25), "adam8bit": (16, 1), "kahan_adam": (80, 16)}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_alone_updates_and_clips_every_tensor(kind: str) -> None:
    """A norm reads 4 bytes an element, clipping reads and writes them: 12. On a GPU one launch takes many tensors, and
    each but the first costs a tenth of one; of the norm and of the clipping each."""
    moved, operators = MOVED[kind]
    found = update(optimizer=Optimizer(kind))
    assert found.device == pytest.approx((moved + 12) * ELEMENTS)
    assert found.launches == pytest.approx(operators * (1 + 0.1 * (TENSORS - 1)) + 2 * 0.1 * TENSORS)
    assert found.host == 0


@pytest.mark.parametrize(("kind", "moved"), [("adam", 14), ("adam_foreach", 40), ("kahan_adam", 80)])
def test_weights_and_states_in_bf16_are_half_as_much_to_move(kind: str, moved: int) -> None:
    found = update(precision="bf16", dtype="bfloat16", optimizer=Optimizer(kind))
    assert found.device == pytest.approx((moved + 6) * ELEMENTS)


def test_on_a_cpu_each_tensor_is_an_operator_of_its_own() -> None:
    found = update(replace(SLOW, device="cpu", name="slow cpu"), device="cpu", optimizer=Optimizer("adam_foreach"))
    assert found.launches == pytest.approx(8 * TENSORS + 2 * TENSORS)


def test_in_fp32_zero_0_steps_as_the_trainer_alone_does() -> None:
    assert update(engine=DEEPSPEED, zero=Zero(stage=0), world_size=2) == update(engine=TRAINER, world_size=2)


def test_in_fp16_the_trainers_loss_scaler_reads_and_writes_gradients() -> None:
    scaled, plain = update(precision="fp16"), update()
    assert scaled.device - plain.device == pytest.approx(8 * ELEMENTS)
    assert scaled.launches == plain.launches


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_zero_0_keeps_flat_fp32_copies_in_half_precision_and_searches_each_gradient_for_infinities(
    precision: str,
) -> None:
    """Two searches of 2 bytes an element; fp32 copies (2 + 4), joined (4 + 4); and weights from fp32 ones (4 + 2). The
    device waits for each search."""
    found, plain = update(engine=DEEPSPEED, precision=precision), update()
    assert found.device - plain.device == pytest.approx((2 * 2 + 2 + 4 + 4 + 4 + 4 + 2) * ELEMENTS)
    assert found.host == pytest.approx(12 * 0.3 * TENSORS * SLOW.launch_seconds)


def test_a_loop_over_tensors_waits_for_the_host() -> None:
    """Adafactor's, of 25 operators a tensor."""
    given = {"machine": replace(SLOW, name="slow host", launch_seconds=1e6), "optimizer": Optimizer("adafactor")}
    found = update(**given)
    assert found.device + found.host == pytest.approx(25 * 0.3 * TENSORS * 1e6)
    assert update(given["machine"], optimizer=Optimizer("adam_foreach")).host == 0


def test_deepspeeds_search_has_as_many_operators_as_planned() -> None:
    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    gradient = torch.ones(4, dtype=torch.bfloat16)
    with Operators() as seen:
        has_inf_or_nan(gradient)
    assert seen.count == SEARCH


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_half_precision_a_rank_searches_its_part_for_infinities(stage: int, precision: str) -> None:
    """ZeRO-1 and -2 each gradient with twelve operators, and add what they find; ZeRO-3 its flat buffer, in fp16."""
    given = {"engine": DEEPSPEED, "zero": Zero(stage=stage), "world_size": 2}
    found, plain = update(**given, precision=precision), update(**given)
    is_searched = stage < 3 or precision == "fp16"
    assert found.device - plain.device == pytest.approx(2 * 2 * ELEMENTS / 2 * is_searched)
    assert found.launches - plain.launches == pytest.approx(0 if stage == 3 else 0.3 * 13 * TENSORS / 2)


def test_bf16_is_searched_by_default() -> None:
    assert DeepSpeedBF16Config().check_grad_overflow


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (2, 2), (4, 2), (2, 3), (4, 3)])
def test_a_rank_steps_its_part_group_by_group(ranks: int, stage: int) -> None:
    """Norms in fp64: 20 bytes an element, of as many gradients as a rank has, or of every piece. Then of each group:
    joined and written back (16), scaled (8), stepped (28)."""
    found = update(engine=DEEPSPEED, zero=Zero(stage=stage), world_size=ranks)
    pieces = TENSORS if stage == 3 else TENSORS // ranks
    assert found.device == pytest.approx((20 + 24 + 28) * ELEMENTS / ranks)
    assert found.launches == pytest.approx(0.3 * 3 * pieces + 2 * (6 + 1))
    assert found.host == 0


def test_sub_groups_of_zero_3_are_steps_of_their_own() -> None:
    """Matrices of which a rank has 50 each: a limit of 100 makes two groups of the four, and vectors are one."""
    found = update(engine=DEEPSPEED, zero=Zero(stage=3, sub_group_size=100), world_size=2)
    assert found.launches == pytest.approx(0.3 * 3 * TENSORS + 3 * (6 + 1))


@pytest.mark.parametrize(("ranks", "per_node", "here"), [(2, 8, 2), (8, 4, 4), (4, 1, 1)])
def test_an_offloaded_optimizer_shares_the_host_of_its_node(ranks: int, per_node: int, here: int) -> None:
    """Ten elements a second on a node, of all its ranks; new weights over a link of 8 bytes a second; from a disk that
    reads 40 and writes 20, twelve bytes of state an element."""
    given = {"engine": DEEPSPEED, "world_size": ranks, "ranks_per_node": per_node, "precision": "bf16",
             "optimizer": Optimizer("cpu_adam")}  # fmt: skip
    own = ELEMENTS / ranks
    cpu = update(**given, zero=Zero(stage=2, offload_optimizer="cpu"))
    disk = update(**given, zero=Zero(stage=2, offload_optimizer="nvme"))
    assert cpu.host == pytest.approx(own * here / 10 + own * 2 / 8)
    assert disk.host - cpu.host == pytest.approx(12 * own * here * (1 / 40 + 1 / 20))
    assert cpu.device == pytest.approx((20 + 2 * 2) * own)
    assert cpu.launches == pytest.approx(0.3 * (3 + 13) * TENSORS / ranks)


def test_the_trainer_alone_has_no_part_to_offload() -> None:
    zero = Zero(stage=2, offload_optimizer="cpu")
    assert update(engine=TRAINER, world_size=2, zero=zero) == update(engine=TRAINER, world_size=2)
