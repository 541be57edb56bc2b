"""Tiled MLPs in one process: the same loss and gradients; and which models are refused. tests/runs/test_tiled_mlp.py
has them under DeepSpeed."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import REPO
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from finetune.errors import RequestError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.tiled_mlp import choose_tiled_mlp, use_tiled_mlp

sys.path.append(str(REPO / "tests/generation"))
from tiny_models import model_of

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def lite() -> Any:
    return GPTLiteForCausalLM(GPTLiteConfig(**SMALL))


def adapted() -> Any:
    """With adapters in the MLPs alone, so that nothing before the first of them trains."""
    config = LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model_of("llama"), config)


def trained(model: Any, rows: int, tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(rows * tokens).reshape(rows, tokens) % 20
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), found


@pytest.mark.parametrize(("rows", "tokens", "shards"), [(1, 12, 4), (2, 9, 4), (3, 5, 8), (2, 12, 1)])
@pytest.mark.parametrize("make", [lite, lambda: model_of("llama"), adapted], ids=["gptlite", "llama", "lora"])
def test_loss_and_gradients_are_those_of_whole_mlps(make: Any, rows: int, tokens: int, shards: int) -> None:
    """Also where the parts are not equal, and where there are fewer tokens than parts."""
    torch.manual_seed(0)
    model = make()
    loss, whole = trained(model, rows, tokens)
    use_tiled_mlp(model, shards)
    again, tiled = trained(model, rows, tokens)
    assert again == pytest.approx(loss, rel=1e-6)
    assert tiled.keys() == whole.keys()
    for name, gradient in whole.items():
        assert (tiled[name] - gradient).norm() <= 1e-5 * gradient.norm(), name  # 4e-6 at most, in fp32
    marks = [getattr(p, "ds_grad_is_ready", True) for p in model.parameters()]
    assert all(marks)  # DeepSpeed would wait for the others for good


@pytest.mark.parametrize("make", [lite, lambda: model_of("llama")], ids=["gptlite", "llama"])
def test_under_autocast_parts_are_computed_again_in_its_precision(make: Any) -> None:
    """Weights are in fp32 and products in bf16, also where the backward pass, outside of autocast, repeats them."""
    torch.manual_seed(0)
    model = make()
    plain = model.forward

    def in_half(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args, **kwargs)

    model.forward = in_half
    loss, whole = trained(model, 2, 12)
    use_tiled_mlp(model, 4)
    again, tiled = trained(model, 2, 12)
    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in whole.items():
        assert (tiled[name] - gradient).norm() <= 0.02 * gradient.norm(), name  # sums over parts round in bf16


def gradients(module: Any, x: torch.Tensor, back: torch.Tensor, is_half: bool) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        out = module(x)
    out.backward(back.to(out.dtype))
    found = {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    module.zero_grad()
    return {name: one.double() for name, one in found.items() if one is not None}


@pytest.mark.parametrize("shards", [4, 64])
def test_under_autocast_parts_round_as_whole_mlps_do(shards: int) -> None:
    """Errors against fp64. Each part's gradient of a weight is rounded to bf16, and the parts are added in fp32: in
    bf16, 64 of them would be several times as far off."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    module = LlamaMLP(LlamaConfig(**sizes))
    x, back = (torch.randn(1, 2048, 32).bfloat16() for _ in range(2))  # exact in any precision
    true = gradients(deepcopy(module).double(), x.double(), back.double(), False)
    whole = gradients(module, x.float(), back, True)
    use_tiled_mlp(torch.nn.ModuleDict({"mlp": module}), shards)
    tiled = gradients(module, x.float(), back, True)
    for name, exact in true.items():
        far = (whole[name] - exact).norm()
        assert far > 1e-4 * exact.norm(), name  # products were in bf16
        assert (tiled[name] - exact).norm() < 1.5 * far, name


def of_type(kind: str, **sizes: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: of_type("gpt2", vocab_size=40, n_embd=16, n_layer=1, n_head=2), "have dropout"),
        (lambda: of_type("opt", vocab_size=40, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2,
                         word_embed_proj_dim=16), "no module of OPTForCausalLM is called mlp"),
        (lambda: of_type("mixtral", **SMALL, intermediate_size=32, num_local_experts=2, num_key_value_heads=2),
         "mixture of experts"),
    ],
    ids=["dropout", "no MLP", "experts"],
)  # fmt: skip
def test_models_that_cannot_be_tiled_are_refused(model: Any, why: str) -> None:
    with pytest.raises(RequestError, match=rf"--tiled_mlp_num_shards 4: .*{why}"):
        choose_tiled_mlp(4, model())
    choose_tiled_mlp(0, None)


def test_others_are_taken() -> None:
    for model in (lite(), model_of("llama")):
        choose_tiled_mlp(4, model)
