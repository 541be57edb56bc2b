"""Activation checkpoints in host memory (--activation_checkpointing_kwargs '{"offload": true}', which is transformers'
own): the same gradients bit for bit, and each layer's input is copied. On a CPU the copy is all that can be seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.gptlite_pipeline import gptlite_pipeline, summed_loss
from finetune.training.pipeline.costs import LayerCost
from finetune.training.pipeline.stages import Cut, build_module

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


@pytest.mark.usefixtures("built_ops")
def test_so_it_is_in_a_pipelines_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By DeepSpeed's own module, with one stage."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    model = gptlite_pipeline(lite().config, 3)
    nothing = LayerCost(1, 1, 0.0, 0.0, 0)
    parts = Cut(model.layers, [nothing] * len(model.layers), (0, len(model.layers)), 1, 0.0, "uniform")
    ids, hidden = torch.arange(24).reshape(2, 12) % 20, (2, 12, model.config.hidden_size)
    found = []
    with one_rank(tmp_path):
        for offload in (False, True):
            module = build_module(model, parts, summed_loss, 1, False, 3, offload).train()
            module.set_checkpoint_interval(1)  # as the engine does
            torch.manual_seed(1)
            with Copies() as copies:
                loss = summed_loss(module(ids), ids)
                loss.backward()
            found.append((loss, [one.grad for one in module.parameters()], copies.shapes))
    (here, gradients, copied), (there, others, more) = found
    assert torch.equal(here, there)
    assert all(map(torch.equal, gradients, others))
    assert more.count(hidden) - copied.count(hidden) == LAYERS + 1  # blocks, and position embeddings


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    import deepspeed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    try:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        yield
    finally:
        distributed.destroy_process_group()
