"""Optimizer states, counted on the real optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from finetune.plan.optimizers import Optimizer

SHAPES = [(24, 40), (40,), (3, 8, 16)]


def real_bytes(build: Any, dtype: torch.dtype = torch.float32) -> int:
    weights = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = build(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in states if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("adam", lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True)),
        ("adam_foreach", lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True)),
        ("sgd", lambda weights: torch.optim.SGD(weights, lr=0.1)),
        ("momentum", lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)),
        ("adafactor", lambda weights: Adafactor(weights, lr=0.1, relative_step=False, scale_parameter=False)),
    ],
)
def test_states_are_those_of_the_real_optimizer(kind: str, build: Any) -> None:
    assert sum(Optimizer(kind).state_bytes(shape) for shape in SHAPES) == real_bytes(build)


@pytest.mark.parametrize("kind", ["kahan_adam", "adam", "adam_foreach", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_as_precise_as_the_weights_that_are_stepped(kind: str, dtype: torch.dtype) -> None:
    optimi = pytest.importorskip("optimi", reason="torch-optimi (extra dev) is not installed")
    builds: dict[str, Any] = {
        "kahan_adam": lambda weights: optimi.StableAdamW(weights, lr=0.1, triton=False),
        "adam": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
        "adam_foreach": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
        "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    }
    counted = Optimizer(kind, bytes_each=dtype.itemsize)
    assert sum(counted.state_bytes(shape) for shape in SHAPES) == real_bytes(builds[kind], dtype)


def test_eight_bit_states_take_two_bytes_and_their_constants() -> None:
    # 4096 x 4096: two states of one byte an element, and of each 256 elements an fp32 constant.
    assert Optimizer("adam8bit").state_bytes((4096, 4096)) == 2 * (2**24 + 4 * 2**24 // 256)
    assert Optimizer("adam8bit").state_bytes((64,)) == 2 * 4 * 64  # too small to be quantized


def test_one_bit_adam_keeps_errors_beside_the_moments() -> None:
    adam, onebit = (Optimizer(kind).state_bytes((1000,)) for kind in ("adam", "onebit_adam"))
    assert onebit - adam == 2 * 4 * 1000
