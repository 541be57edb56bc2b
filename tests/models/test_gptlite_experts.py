"""GPT-lite as a mixture of experts: what DeepSpeed's own layer computes, with transformers' router loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from finetune.export.write import write_companions
from finetune.models.experts import mixture_of, refusal, router_coefficient
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.gptlite_mlp import GPTLiteMixture
from finetune.models.gptlite_pipeline import pipeline_layers
from finetune.models.gptlite_weights import draw_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "num_experts": 4,
    "initializer_range": 0.3,
}


def a_mixture(**changes: Any) -> GPTLiteForCausalLM:
    model = GPTLiteForCausalLM(GPTLiteConfig(**{**SHAPE, **changes})).eval()
    draw_weights(model, 3)
    return model


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_a_mixture_computes_what_deepspeeds_layer_does_without_capacity(chosen: int) -> None:
    from deepspeed.moe.layer import MoE

    config = GPTLiteConfig(**SHAPE, num_experts_per_tok=chosen)
    ours = GPTLiteMixture(config)
    inner = [nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False)]
    free = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0}
    theirs = MoE(16, nn.Sequential(*inner), num_experts=4, k=chosen, **free)
    torch.manual_seed(0)
    for weight in (ours.gate.weight, ours.experts.up_proj, ours.experts.down_proj):
        nn.init.normal_(weight, std=0.3)
    with torch.no_grad():
        theirs.deepspeed_moe.gate.wg.weight.copy_(ours.gate.weight)
        for number, expert in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
            expert[0].weight.copy_(ours.experts.up_proj[number])
            expert[2].weight.copy_(ours.experts.down_proj[number])
    x = torch.randn(2, 5, 16)
    found, expected = ours(x), theirs(x)[0]
    assert torch.allclose(found, expected, atol=1e-6)
    for out in (found, expected):
        out.square().sum().backward()
    assert torch.allclose(ours.gate.weight.grad, theirs.deepspeed_moe.gate.wg.weight.grad, atol=1e-5)
    assert float(ours.gate.weight.grad.abs().max()) > 0.01


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_transformers_faster_experts_compute_the_same(implementation: str) -> None:
    model, ids = a_mixture(), torch.arange(16).reshape(2, 8)
    expected = model(input_ids=ids).logits
    model.set_experts_implementation(implementation)
    assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)


def test_its_router_loss_is_that_of_transformers_and_added_once() -> None:
    model, ids = a_mixture(router_aux_loss_coef=0.5), torch.arange(16).reshape(2, 8)
    mixture = mixture_of(model)
    assert mixture is not None
    assert [*mixture.modules] == [f"transformer.blocks.{layer}.mlp.experts" for layer in range(2)]
    assert (mixture.experts, mixture.chosen) == (4, 2)
    assert refusal(model) is None
    assert router_coefficient(model, None) == 0
    model.config.output_router_logits = True
    assert router_coefficient(model, None) == 0.5
    given, plain = model(input_ids=ids, labels=ids), model(input_ids=ids, labels=ids, output_router_logits=False)
    assert [tuple(one.shape) for one in given.router_logits] == [(16, 4)] * 2
    assert plain.router_logits is None
    assert torch.isclose(given.loss, plain.loss + 0.5 * given.aux_loss)


def test_layers_built_apart_have_the_weights_of_the_whole_and_compute_the_same() -> None:
    model, packet = a_mixture(), torch.arange(16).reshape(2, 8)
    expected, weights = model(input_ids=packet, use_cache=False).logits, dict(model.named_parameters())
    found: dict[str, torch.Tensor] = {}
    for layer in pipeline_layers(model.config, seed=3):
        built = layer.build().eval()
        found |= {layer.weight_name(name): p for name, p in built.named_parameters()}
        packet = built(packet)
    assert torch.allclose(packet, expected, atol=1e-6)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    std = float(weights["transformer.blocks.1.mlp.experts.up_proj"].detach().std())
    assert std == pytest.approx(0.3, rel=0.1)
    assert float(weights["transformer.blocks.1.mlp.experts.down_proj"].detach().std()) == pytest.approx(0.15, rel=0.1)


def test_a_saved_folder_opens_and_has_all_its_code_also_when_exported(tmp_path: Path) -> None:
    model, ids = a_mixture(), torch.arange(8)[None]
    saved, exported = tmp_path / "saved", tmp_path / "exported"
    model.save_pretrained(saved)
    opened = AutoModelForCausalLM.from_pretrained(saved).eval()
    assert torch.equal(opened(input_ids=ids).logits, model(input_ids=ids).logits)
    assert opened.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 11)
    exported.mkdir()
    write_companions(saved, exported, torch.float32)
    for folder in (saved, exported):
        assert {path.name for path in folder.glob("*.py")} == {"gptlite.py", "gptlite_mlp.py"}
