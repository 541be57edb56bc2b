"""GPT-lite against a plain re-implementation, against GPT-2, and against itself with a cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.training.loss import honours_num_items_in_batch

SHAPE = {"vocab_size": 61, "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 32}


def build(**changes: Any) -> GPTLiteForCausalLM:
    torch.manual_seed(0)
    model = GPTLiteForCausalLM(GPTLiteConfig(**{**SHAPE, **changes})).eval()
    for parameter in model.parameters():  # far from the initial weights, where norms and biases do nothing
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def plainly(weights: dict[str, torch.Tensor], ids: torch.Tensor, layers: int, heads: int) -> torch.Tensor:
    """The logits (T, V) of one row of ids (T,), written out from the paper's formulas, one head at a time."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
            + weights[f"{name}.bias"]
        )

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = weights["transformer.embeddings.tokens.weight"][ids]
    x = x + weights["transformer.embeddings.positions.weight"][: len(ids)]
    for layer in range(layers):
        block = f"transformer.blocks.{layer}"
        q, k, v = linear(norm(x, f"{block}.norm_1"), f"{block}.attention.qkv").split(x.shape[1], dim=1)
        size = x.shape[1] // heads
        mixed = []
        for head in range(heads):
            mine = slice(head * size, (head + 1) * size)
            scores = q[:, mine] @ k[:, mine].T / math.sqrt(size)
            for row in range(len(ids)):
                scores[row, row + 1 :] = -math.inf
            mixed.append((scores.exp() / scores.exp().sum(dim=1, keepdim=True)) @ v[:, mine])
        x = x + linear(torch.cat(mixed, dim=1), f"{block}.attention.out")
        inner = linear(norm(x, f"{block}.norm_2"), f"{block}.mlp.up")
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + linear(inner, f"{block}.mlp.down")
    return norm(x, "transformer.norm") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_and_gradients_are_those_of_a_plain_implementation(attention: str) -> None:
    model = build(attn_implementation=attention).double()
    ids = torch.randint(61, (2, 32))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = torch.stack([plainly(weights, row, 3, 4) for row in ids])
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 61), ids[:, 1:].reshape(-1))
    loss.backward()
    output = model(ids, labels=ids)
    output.loss.backward()
    assert torch.allclose(output.logits, logits, atol=1e-5)
    assert output.loss.item() == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, weights[name].grad, atol=1e-5), name


def test_generation_with_a_cache_equals_generation_without() -> None:
    model = build()
    prompt = torch.randint(61, (3, 5))
    with_cache = model.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=True)
    assert with_cache.shape == (3, 25)
    assert torch.equal(with_cache, model.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=False))


def test_rows_padded_on_the_left_generate_as_they_do_alone() -> None:
    model = build(pad_token_id=0)
    prompt = torch.randint(1, 61, (1, 5))
    alone = model.generate(prompt, max_new_tokens=8, do_sample=False)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 5, dtype=torch.long)], dim=1)
    made = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(made[:, 3:], alone)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_documents_whose_positions_start_again_do_not_see_one_another(attention: str) -> None:
    model = build(attn_implementation=attention)
    first, second = torch.randint(61, (1, 12)), torch.randint(61, (1, 9))
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(12), torch.arange(9)])[None]
    logits = model(packed, position_ids=positions).logits
    assert torch.allclose(logits[:, :12], model(first).logits, atol=1e-5)
    assert torch.allclose(logits[:, 12:], model(second).logits, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_it_comes_back_from_disk_by_the_auto_class(tied: bool, tmp_path: Path) -> None:
    model = build(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "gptlite"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(61, (2, 10))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    same = loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    assert same is tied


def as_gptlite(gpt2: GPT2LMHeadModel) -> GPTLiteForCausalLM:
    """GPT-2 keeps the weights of its projections as (in, out); a Linear has (out, in)."""
    same = "vocab_size num_hidden_layers hidden_size num_attention_heads max_position_embeddings layer_norm_epsilon"
    shape = {name: getattr(gpt2.config, name) for name in same.split()}
    model = GPTLiteForCausalLM(
        GPTLiteConfig(**shape, hidden_act=gpt2.config.activation_function, tie_word_embeddings=True)
    )
    names = {"wte": "embeddings.tokens", "wpe": "embeddings.positions", "ln_f": "norm", "h": "blocks"}
    names |= {"ln_1": "norm_1", "ln_2": "norm_2", "attn": "attention", "c_attn": "qkv", "c_fc": "up"}
    renamed = {}
    for old, tensor in gpt2.state_dict().items():
        parts = old.split(".")
        if parts[-2] == "c_proj":
            parts[-2] = "out" if parts[-3] == "attn" else "down"
        is_projection = old.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        renamed[".".join(names.get(part, part) for part in parts)] = tensor.T if is_projection else tensor
    model.load_state_dict(renamed)
    return model.eval()


def test_weights_of_a_gpt2_give_its_logits() -> None:
    torch.manual_seed(1)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=24, n_embd=32, n_layer=2, n_head=4)).eval()
    for parameter in gpt2.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(97, (2, 24))
    assert torch.allclose(as_gptlite(gpt2)(ids).logits, gpt2(ids).logits, atol=1e-5)


def test_more_tokens_than_positions_are_refused_in_words() -> None:
    model = GPTLiteForCausalLM(GPTLiteConfig(**{**SHAPE, "max_position_embeddings": 8}))
    with pytest.raises(ValueError, match=r"9 tokens, but this GPT-lite has 8 positions"):
        model(torch.ones(1, 9, dtype=torch.long))


def test_checkpointing_activations_changes_no_gradient_even_with_dropout() -> None:
    ids = torch.randint(61, (2, 16))
    gradients = []
    for checkpointing in (False, True):
        model = build(dropout=0.2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_the_loss_is_a_sum_over_the_items_that_it_is_told_of() -> None:
    model = build()
    ids = torch.randint(61, (2, 16))
    labels = ids.clone()
    labels[0, :10] = -100
    mean = model(ids, labels=labels).loss.item()
    told = model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss.item()
    assert told == pytest.approx(mean * int((labels[:, 1:] != -100).sum()) / 7)
    assert honours_num_items_in_batch(model, label_per_token=True)


def test_residual_projections_start_smaller_with_depth_and_no_mask_is_kept() -> None:
    model = GPTLiteForCausalLM(GPTLiteConfig(num_hidden_layers=8, hidden_size=256, num_attention_heads=4))
    block = model.transformer.blocks[0]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # sqrt(2 x 8) = 4
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert list(model.buffers()) == []
