"""Activation checkpoints in host memory (--activation_checkpointing_kwargs '{"offload": true}', which is transformers'
own): the same gradients bit for bit, and each layer's input is copied. On a CPU the copy is all that can be seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import REPO
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

sys.path.append(str(REPO / "tests/generation"))
from tiny_models import model_of

LAYERS = 2


class Copies(TorchDispatchMode):  # type: ignore[misc]
    """The shapes that are copied into new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def lite() -> Any:
    return GPTLiteForCausalLM(GPTLiteConfig(vocab_size=50, hidden_size=32, num_hidden_layers=LAYERS, dropout=0.1))


def trained(model: Any, offload: bool) -> tuple[Any, dict[str, torch.Tensor], list[tuple[int, ...]]]:
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload)
    ids = torch.arange(24).reshape(2, 12) % 20
    torch.manual_seed(1)
    with Copies() as copies:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    return loss, gradients, copies.shapes


@pytest.mark.parametrize("make", [lite, lambda: model_of("llama")], ids=["gptlite", "llama"])
def test_gradients_are_bit_equal_and_hidden_states_go_through_the_host(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "is_available", lambda: False)  # save_on_cpu would pin memory, which needs a GPU
    torch.manual_seed(0)
    model = make()
    hidden = (2, 12, model.config.hidden_size)
    here, gradients, copies = trained(model, offload=False)
    there, others, more = trained(model, offload=True)
    assert torch.equal(here, there)
    assert all(torch.equal(others[name], one) for name, one in gradients.items())
    assert more.count(hidden) - copies.count(hidden) == model.config.num_hidden_layers
