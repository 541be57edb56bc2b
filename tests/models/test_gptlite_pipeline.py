"""GPT-lite as a list of layers: the same function, the same weights, whoever builds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.gptlite_pipeline import (
    count_targets,
    gptlite_pipeline,
    pipeline_layers,
    split_batch,
    summed_loss,
)
from finetune.models.gptlite_weights import draw_weights
from finetune.models.multiplied import multiplied_parameters

SHAPE: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
}
TWO_DOCUMENTS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])


def a_model(seed: int = 3, **changes: Any) -> GPTLiteForCausalLM:
    model = GPTLiteForCausalLM(GPTLiteConfig(**{**SHAPE, **changes})).eval()
    draw_weights(model, seed)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [None, TWO_DOCUMENTS], ids=["plain", "documents apart"])
def test_the_layers_one_after_another_are_the_model(attention: str, positions: torch.Tensor | None) -> None:
    model = a_model(dropout=0.1)
    model.config._attn_implementation = attention
    ids = torch.arange(16).reshape(2, 8)
    packet: Any = ids if positions is None else (ids, positions)
    for layer in pipeline_layers(model.config, seed=3):
        packet = layer.build().eval()(packet)
    assert torch.allclose(packet, model(input_ids=ids, position_ids=positions, use_cache=False).logits, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_layers_built_apart_have_the_weights_and_names_of_the_whole(tied: bool) -> None:
    """Each spec draws its own from the seed: no order of building, and no random state, makes a difference."""
    model = a_model(tie_word_embeddings=tied)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    found: dict[str, torch.Tensor] = {}
    for layer in reversed(pipeline_layers(model.config, seed=3)):
        found |= {layer.weight_name(name): p for name, p in layer.build().named_parameters()}
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.manual_seed(99)
    assert torch.equal(state, torch.get_rng_state())


def test_other_seeds_draw_other_weights_in_every_layer() -> None:
    one, two = dict(a_model(3).named_parameters()), dict(a_model(4).named_parameters())
    random = [name for name, p in one.items() if float(p.detach().std()) > 0]
    assert len(random) == 3 + 4 * SHAPE["num_hidden_layers"]
    assert not any(torch.equal(one[name], two[name]) for name in random)
    shapes = {name: one[name] for name in random if name.endswith("qkv.weight")}
    assert len({float(weight.detach().sum()) for weight in shapes.values()}) == SHAPE["num_hidden_layers"]


def test_weights_are_as_wide_as_the_configuration_says() -> None:
    model = GPTLiteForCausalLM(GPTLiteConfig(hidden_size=256, num_hidden_layers=8, vocab_size=500))
    draw_weights(model, 0)
    block = model.transformer.blocks[5]
    assert float(block.attention.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    assert float(block.attention.out.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.03)
    assert float(block.norm_1.weight.detach().min()) == 1.0
    assert float(block.mlp.up.bias.detach().abs().max()) == 0.0


def test_the_loss_by_items_is_that_of_the_model() -> None:
    model = a_model()
    ids = torch.arange(16).reshape(2, 8)
    targets = ids.roll(-1, 1)
    targets[0, 3:] = -100
    inputs, labels = split_batch({"input_ids": ids, "shift_labels": targets, "attention_mask": torch.ones_like(ids)})
    output = model(input_ids=inputs, labels=targets, shift_labels=targets)
    assert int(count_targets(labels)) == 3 + 8
    assert float(summed_loss(output.logits, labels).detach() / 11) == pytest.approx(
        float(output.loss.detach()), rel=1e-6
    )


def test_flops_leave_out_a_table_that_is_looked_up() -> None:
    untied, tied = (GPTLiteConfig(**SHAPE, tie_word_embeddings=tied) for tied in (False, True))
    table = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    every = sum(p.numel() for p in a_model().parameters())
    assert gptlite_pipeline(untied, 0).multiplied_parameters == every - table
    assert gptlite_pipeline(tied, 0).multiplied_parameters == every - table
    mixture = GPTLiteConfig(**SHAPE, num_experts=4, num_experts_per_tok=1)
    assert gptlite_pipeline(mixture, 0).multiplied_parameters == multiplied_parameters(GPTLiteForCausalLM(mixture))


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_a_loss_in_chunks_is_that_of_all_logits(tied: bool) -> None:
    """The last layer passes hidden states on; chunks are of 5 of 16 positions; some targets do not count."""
    config = a_model(tie_word_embeddings=tied).config
    ids = torch.arange(16).reshape(2, 8)
    targets = ids.roll(-1, 1)
    targets[0, 3:] = -100
    (loss, gradients, figures), (chunked, others, by_chunk) = (passed(config, ids, targets, many) for many in (0, 5))
    assert float(chunked) == pytest.approx(float(loss), rel=1e-6)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
    assert torch.allclose(by_chunk, figures, rtol=1e-6)
    assert figures.shape == (2, 3)


def passed(config: GPTLiteConfig, ids: torch.Tensor, targets: torch.Tensor, chunk: int) -> tuple[Any, Any, Any]:
    """The loss, its gradients and the figures of an evaluation, through the layers one after another."""
    model, packet, named = gptlite_pipeline(config, 3, chunk), ids, dict[str, Any]()
    first = model.layers[0].build()
    for layer in model.layers:
        is_tied = layer is model.layers[-1] and config.tie_word_embeddings
        module = first if is_tied or layer is model.layers[0] else layer.build()
        named |= {layer.weight_name(name): p for name, p in module.named_parameters()}
        packet = layer.spec.forward_fn(module, packet) if is_tied else module(packet)  # type: ignore[union-attr]
    assert packet.shape[-1] == (config.hidden_size if chunk else config.vocab_size)
    loss = model.loss(packet, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in named.items()}, model.figures(packet.detach(), targets)
