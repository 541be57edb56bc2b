"""What recordings on the meta device take for granted, and what functions of a model's own allocate in their backward
passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.measure.own_functions import backward_bytes
from finetune.measure.recording import Recording

ROWS, TOKENS, WIDTH, END = 2, 5, 3, 1


def test_a_mask_of_the_tokens_that_equal_one_picks_one_in_each_text() -> None:
    """BART's classifier reads the last end of each text (transformers, modeling_bart.py)."""
    ids = torch.empty(ROWS, TOKENS, dtype=torch.long, device="meta")
    hidden = torch.empty(ROWS, TOKENS, WIDTH, device="meta", requires_grad=True)
    with Recording({}) as recording:
        ends = ids.eq(END)
        assert torch.unique_consecutive(ends.sum(1)).numel() == 1
        last = hidden[ends, :].view(ROWS, -1, WIDTH)[:, -1, :]
    assert last.shape == (ROWS, WIDTH)
    assert [op["name"] for op in recording.ops] == ["eq", "sum", "index", "select"]


def test_every_sample_has_a_label() -> None:
    """DeBERTa's classifier leaves out those below 0 (transformers, modeling_deberta_v2.py)."""
    labels = torch.empty(ROWS, dtype=torch.long, device="meta")
    with Recording({}):
        assert (labels >= 0).nonzero().shape == (ROWS, 1)


@pytest.mark.parametrize("read", ["mask", "places"])
def test_other_masks_are_not_guessed(read: str) -> None:
    """Such as which tokens an expert gets."""
    chosen = torch.empty(ROWS, TOKENS, device="meta")
    with Recording({}), pytest.raises((RuntimeError, NotImplementedError), match=r"nonzero"):
        chosen[chosen > 0] if read == "mask" else (chosen > 0).nonzero()


class Cube(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        square = x * x
        slope = 3 * square
        return grad * slope


class Cubes(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(WIDTH, device="meta"))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first: torch.Tensor = Cube.apply(x * self.weight)
        return {"loss": Cube.apply(first.sum(0)).sum()}


def test_a_function_of_the_models_own_takes_what_its_backward_pass_has_at_once() -> None:
    """The square, the slope and the gradient, in the order of the calls."""
    x = torch.empty(ROWS, WIDTH, device="meta")
    model = Cubes()
    assert backward_bytes(model, {"x": x}, "loss") == [3 * ROWS * WIDTH * 4, 3 * WIDTH * 4]
    assert model.weight.grad is None
    with Recording({}) as recording:
        model(x)
    made = [recording.ops[at]["out"][0] for at, op in enumerate(recording.ops) if op["name"] == "mul" and op["inside"]]
    assert [recording.own[call] for call in sorted(recording.own)] == [made[1], made[3]]
