"""1-bit Adam on one process: AdamW until the freeze, errors that come back, and no step that Adam would not take."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from finetune.training.compression import BLOCK, BLOCK_BYTES, OneBitAdam, decode, encode


@pytest.fixture
def _alone() -> Iterator[None]:
    """A group of one rank, in which momentum is compressed for nobody."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def steps(optimizer: torch.optim.Optimizer, weight: torch.Tensor, gradients: torch.Tensor) -> None:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()


def test_a_byte_holds_eight_signs_lowest_bit_first() -> None:
    values = torch.tensor([1.0, -1, -1, 2, -3, -1, -1, 0.0] * 8)  # bits 0, 3 and 7
    assert encode(values[None])[0, :8].tolist() == [0b10001001] * 8


@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_signs_come_back_with_the_mean_of_their_block(blocks: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, blocks * BLOCK) * torch.logspace(-30, 20, blocks * BLOCK)
    encoded = encode(values)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (2, blocks * BLOCK_BYTES)
    assert encoded.nbytes * 8 / values.numel() == 1.25
    back = decode(encoded)
    assert torch.equal(back >= 0, values >= 0)
    means = values.view(-1, BLOCK).abs().mean(dim=1)
    found = back.view(-1, BLOCK).abs()
    assert torch.allclose(found, means[:, None].expand_as(found), rtol=2**-8)
    assert decode(encode(torch.zeros(1, BLOCK))).abs().max() == 0


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("elements", [1, 63, 64, 65, 1000])
def test_what_is_not_said_now_is_said_later(elements: int) -> None:
    """The sum of all that was exchanged is the sum of all that was to be, but for errors that do not grow."""
    torch.manual_seed(0)
    optimizer = OneBitAdam([torch.zeros(elements)])
    truth, said = torch.zeros(elements), torch.zeros(elements)
    off = []
    for _ in range(400):
        values = 1 + torch.randn(elements)
        truth += values
        optimizer.exchange(values)
        said += values
        off.append(float((truth - said).abs().mean()))
    assert max(off[300:]) < 2 * max(off[50:150])
    assert max(off[300:]) < 0.05 * float(truth.abs().mean())
    assert optimizer.worker is not None
    assert optimizer.server is not None
    left = (optimizer.worker + optimizer.server).view(-1)[:elements]
    assert torch.allclose(truth - said, left, atol=1e-2)


def test_until_the_freeze_it_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.randn(50)), None
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = OneBitAdam([ours], lr=1e-2, weight_decay=0.1)
    optimizer.freeze_step = 7
    gradients = torch.randn(7, 50)
    steps(optimizer, ours, gradients)
    steps(torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1), theirs, gradients)
    assert torch.equal(ours, theirs)
    assert optimizer.is_frozen


def test_after_it_the_variance_stays_and_the_momentum_moves_by_the_papers_rule() -> None:
    """Alone, with nothing compressed, each step by hand: m = b1 m + (1-b1) g; x -= lr (m / (1-b1^t) / d + wd x)."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(50, dtype=torch.float64).float())
    optimizer = OneBitAdam([weight], lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    optimizer.freeze_step = 20
    steps(optimizer, weight, torch.randn(20, 50))
    momentum, variance = (optimizer.state[weight][name].clone() for name in ("exp_avg", "exp_avg_sq"))
    denominator = (variance / (1 - 0.99**20)).sqrt() + 1e-6
    expected = weight.detach().clone()
    for step, gradient in enumerate(torch.randn(5, 50), start=21):
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        expected = expected * (1 - 1e-3) - 1e-2 / (1 - 0.9**step) * momentum / denominator
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"], variance)
    assert torch.allclose(optimizer.state[weight]["exp_avg"], momentum, atol=1e-6)
    assert torch.allclose(weight, expected, atol=1e-5)


@pytest.mark.usefixtures("_alone")
def test_an_element_without_variance_does_not_fly_off_and_a_weight_without_any_stays() -> None:
    weight, idle = torch.nn.Parameter(torch.zeros(128)), torch.nn.Parameter(torch.ones(5))
    optimizer = OneBitAdam([weight, idle], lr=1e-2, weight_decay=0.0)
    optimizer.freeze_step = 4
    gradient = torch.ones(128)
    gradient[100:] = 0.0  # words that nobody met
    idle.grad = torch.zeros(5)
    steps(optimizer, weight, gradient.expand(4, 128))
    steps(optimizer, weight, torch.ones(6, 128))
    assert weight.isfinite().all()
    assert weight.abs().max() < 10 * 1e-2 * 3
    assert torch.equal(idle, torch.ones(5))


def test_a_gradient_beyond_what_adam_could_meet_is_bounded() -> None:
    """In Adam |g| is at most sqrt((1-b2^T)/(1-b2)) roots of the variance, which holds g squared."""
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = OneBitAdam([weight], lr=1.0, betas=(0.9, 0.99), weight_decay=0.0)
    optimizer.freeze_step = 10
    steps(optimizer, weight, 1e-6 * torch.ones(10, 64))
    before = weight.detach().clone()
    steps(optimizer, weight, 1e6 * torch.ones(1, 64))
    longest = math.sqrt((1 - 0.99**10) / (1 - 0.99))
    momentum = 0.9 * (1 - 0.9**10) + 0.1 * longest  # in roots of the variance
    assert torch.allclose(before - weight, torch.full((64,), momentum / (1 - 0.9**11)), rtol=1e-2)


def test_a_checkpoint_holds_the_momentum_the_step_and_the_freeze() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(70))
    other = torch.nn.Parameter(torch.randn(70))
    first, second = (OneBitAdam([p], lr=1e-2) for p in (weight, other))
    first.freeze_step, first.longer = 3, torch.tensor(1.5)
    gradients = torch.randn(9, 70)
    steps(first, weight, gradients[:6])
    other.data.copy_(weight)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.steps_taken == 6
    assert second.is_frozen
    assert (second.freeze_step, second.longer) == (3, 1.5)
    steps(first, weight, gradients[6:])
    steps(second, other, gradients[6:])
    assert torch.equal(weight, other)


def test_a_checkpoint_from_before_the_freeze_leaves_the_freeze_open() -> None:
    weight, other = (torch.nn.Parameter(torch.zeros(70)) for _ in range(2))
    first, second = (OneBitAdam([p], lr=1e-2) for p in (weight, other))
    first.freeze_step = 3
    steps(first, weight, torch.ones(2, 70))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.steps_taken == 2
    assert second.freeze_step is None
