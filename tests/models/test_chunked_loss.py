"""The chunked loss is the plain one: values, gradients, evaluation, and what a model gives without labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from finetune.errors import RequestError
from finetune.measure.memory import Allocations
from finetune.models.chunked_loss import IGNORED, LossHead, choose_chunk_tokens, row_figures, use_chunked_loss
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.run.facts import CHUNK_TOKENS

VOCABULARY = 301


def gptlite() -> Any:
    return GPTLiteForCausalLM(GPTLiteConfig(vocab_size=VOCABULARY, hidden_size=32, max_position_embeddings=24))


def tied_gpt2() -> Any:
    sizes = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes))


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=24, **sizes))


def a_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (3, 24))
    labels = ids.clone()
    labels[0, :9] = IGNORED
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("items", [None, 50])
@pytest.mark.parametrize("make", [gptlite, tied_gpt2, llama])
def test_loss_and_gradients_are_those_of_the_full_logits(make: Any, items: int | None) -> None:
    torch.manual_seed(0)
    model, batch = make(), a_batch()
    batch |= {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    plain = model(**batch).loss
    plain.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    names = list(model.state_dict())
    model.zero_grad()
    use_chunked_loss(model, 16)
    output = model(**batch)
    output.loss.backward()
    assert output.logits is None
    assert output.loss.item() == pytest.approx(plain.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], atol=1e-5), name
    assert list(model.state_dict()) == names


def test_shifted_labels_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    model, batch = gptlite(), a_batch()
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
    plain = model(**batch).loss.item()
    given = {"input_ids": batch["input_ids"], "labels": shifted, "shift_labels": shifted}
    assert model(**given).loss.item() == pytest.approx(plain, abs=1e-6)
    use_chunked_loss(model, 16)
    assert model(**given).loss.item() == pytest.approx(plain, abs=1e-5)


def test_evaluation_gives_the_figures_of_each_row() -> None:
    torch.manual_seed(0)
    model, batch = gptlite().eval(), a_batch()
    with torch.no_grad():
        plain = model(**batch)
        shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
        wanted = row_figures(plain.logits, shifted)
        use_chunked_loss(model, 16)
        output = model(**batch)
    assert torch.allclose(output.logits, wanted, atol=1e-4)
    assert row_figures(output.logits, shifted) is output.logits
    assert output.loss.item() == pytest.approx(plain.loss.item(), abs=1e-5)
    assert output.logits[:, 2].tolist() == [15, 23, 23]


def test_without_labels_the_logits_are_there_also_after_an_error() -> None:
    torch.manual_seed(0)
    model, batch = gptlite().eval(), a_batch()
    logits = model(batch["input_ids"]).logits
    use_chunked_loss(model, 16)
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"] + VOCABULARY, labels=batch["labels"])
    assert torch.equal(model(batch["input_ids"]).logits, logits)
    assert model.generate(batch["input_ids"][:, :4], max_new_tokens=3).shape == (3, 7)


def test_bf16_autocast_gives_the_loss_of_bf16_logits() -> None:
    torch.manual_seed(0)
    model, batch = gptlite(), a_batch()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(**batch).loss
        use_chunked_loss(model, 16)
        chunked = model(**batch).loss
    chunked.backward()
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-2)
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_in_bf16_the_loss_is_as_near_to_fp32_as_with_full_logits() -> None:
    """Logits in bf16 are turned into losses in fp32."""
    torch.manual_seed(0)
    model = gptlite()
    batch = {"input_ids": torch.randint(VOCABULARY, (64, 24))}
    batch["labels"] = batch["input_ids"]
    exact = model(**batch).loss
    exact.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    use_chunked_loss(model, 16)
    with torch.autocast("cpu", torch.bfloat16):
        chunked = model(**batch).loss
    chunked.backward()
    assert chunked.item() == pytest.approx(exact.item(), rel=5e-4)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - wanted[name]).norm() < 0.02 * wanted[name].norm(), name


def test_no_more_logits_than_a_chunk_exist_at_a_time() -> None:
    """32 rows of 1,000 logits, and 8 of scores, beside the weight, the rows and their gradients."""
    head = LossHead(16, 1000, bias=False)
    head.chunk_tokens, head.targets = 32, torch.arange(96)[None]
    rows = torch.randn(1, 96, 16, requires_grad=True)
    with Allocations() as memory:
        loss = head(rows)
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(rows[0] @ head.weight.T, head.targets[0]).item()
    )
    made, chunk, part = 2 * 4 * 16 * (1000 + 96), 4 * 32 * 1000, 4 * 8 * 1000
    assert made + chunk + part <= memory.peak < made + chunk + part + 8192


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_in_fp16_a_gradient_whose_sum_overflows_is_finite_once_scaled(dtype: torch.dtype) -> None:
    """All 8,192 rows count 100 for token 0, and their loss is a mean."""
    head = LossHead(1, 2, bias=False, dtype=dtype)
    head.weight.data.zero_()
    head.chunk_tokens, head.targets = CHUNK_TOKENS["cuda"], torch.zeros(1, 8192, dtype=torch.int64)
    rows = torch.full((1, 8192, 1), 100.0, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
        loss = head(rows)
    loss.backward()
    assert head.weight.grad is not None
    assert head.weight.grad[:, 0].tolist() == [-50.0, 50.0]


def test_a_label_that_is_no_token_is_refused_as_with_full_logits() -> None:
    head = LossHead(4, 8, bias=False)
    head.chunk_tokens, head.targets = 2, torch.tensor([[1, -1, 2]])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        head(torch.randn(1, 3, 4))


def test_a_second_backward_pass_is_refused_in_words() -> None:
    head = LossHead(4, 8, bias=False)
    head.chunk_tokens, head.targets = 2, torch.tensor([[1, 3, 2]])
    loss = head(torch.randn(1, 3, 4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward pass"):
        loss.backward()


@pytest.mark.parametrize("chunk", [0, 16], ids=["plain", "chunked"])
def test_a_compiled_model_is_one_graph_up_to_its_loss_and_its_attention_has_no_mask(chunk: int) -> None:
    """A mask would rule flash attention out (GPTLiteModel.forward), a break would cost the speed of the whole."""
    torch.manual_seed(0)
    model, batch, seen, graphs = gptlite(), a_batch(), [], []
    exact = model(**batch).loss.item()
    if chunk:
        use_chunked_loss(model, chunk)

    def look(graph: Any, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        graphs.append(len(calls))
        seen.extend((node.kwargs.get("attn_mask"), node.kwargs.get("is_causal")) for node in calls)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=look, fullgraph=not chunk)
    assert compiled(**batch).loss.item() == pytest.approx(exact, abs=1e-5)
    assert seen == [(None, True)] * model.config.num_hidden_layers
    hooks = [0] if chunk else []  # a graph of its own for what precedes the model
    assert graphs == [*hooks, model.config.num_hidden_layers], "no layer is apart from the others"


def test_more_chunks_are_no_more_to_compile() -> None:
    def compiled(chunk: int) -> tuple[list[int], list[int], list[Any]]:
        torch.manual_seed(0)
        model, batch, sizes, scored = gptlite(), a_batch(), list[int](), list[int]()
        head = use_chunked_loss(model, chunk)
        head.compile_scores("aot_eager", None)
        score = head.score
        head.score = lambda *part: scored.append(len(part[0])) or score(*part)

        def count(graph: Any, _: Any) -> Any:
            sizes.append(len(graph.graph.nodes))
            return graph.forward

        torch._dynamo.reset()
        found = torch.compile(model, backend=count)(**batch)
        found.loss.backward()
        return sizes, scored, [found.loss.item(), *(p.grad for p in model.parameters())]

    (few, large, wanted), (many, small, got) = compiled(32), compiled(4)
    assert few == many
    assert len(small) > len(large)
    assert max(small) < max(large)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_chunk_is_chosen_by_the_vocabulary_and_may_be_asked_for() -> None:
    small, large = gptlite(), GPTLiteForCausalLM(GPTLiteConfig(vocab_size=8_192, hidden_size=32))
    assert choose_chunk_tokens(None, small, "cpu") == 0
    assert choose_chunk_tokens(None, large, "cpu") == 512
    assert choose_chunk_tokens(0, large, "cpu") == 0
    assert choose_chunk_tokens(64, small, "cpu") == 64


SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
LARGE = {**SHAPE, "num_key_value_heads": 2, "vocab_size": 8_192}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (GPTLiteForCausalLM, GPTLiteConfig(hidden_size=32, vocab_size=8_192)),
        (GPT2LMHeadModel, GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=8_192)),
        (LlamaForCausalLM, LlamaConfig(**LARGE)),
        (MixtralForCausalLM, MixtralConfig(**LARGE, num_local_experts=2)),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_heads_that_are_linear_and_no_more_are_found_right(kind: Any, config: Any) -> None:
    assert choose_chunk_tokens(None, kind(config), "cpu") == 512


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**LARGE, final_logit_softcapping=1.0)),
        (GraniteForCausalLM, GraniteConfig(**LARGE, logits_scaling=8.0)),
        (CohereForCausalLM, CohereConfig(**LARGE, logit_scale=0.06)),
        (MixtralForCausalLM, MixtralConfig(**LARGE, num_local_experts=2, output_router_logits=True)),
    ],
    ids=["caps", "divides", "multiplies", "adds to the loss"],
)
def test_a_model_that_does_more_keeps_its_logits_or_is_refused(kind: Any, config: Any) -> None:
    model = kind(config)
    assert choose_chunk_tokens(None, model, "cpu") == 0
    with pytest.raises(RequestError, match="does more for its loss than a linear head does"):
        choose_chunk_tokens(16, model, "cpu")
    assert not isinstance(model.lm_head, LossHead)


def test_a_batch_without_a_label_has_a_loss_of_zero() -> None:
    model, batch = gptlite(), a_batch()
    batch["labels"].fill_(IGNORED)
    use_chunked_loss(model, 16)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_figures_by_token_and_their_gradients_are_those_of_all_logits() -> None:
    """Rows of unlike lengths, one of which learns nothing, weighed apart as a loss of preferences weighs them."""
    torch.manual_seed(0)
    config = GPTLiteConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    plain, chunked = GPTLiteForCausalLM(config), GPTLiteForCausalLM(config)
    chunked.load_state_dict(plain.state_dict())
    use_chunked_loss(chunked, 4, by_token=True)
    ids = torch.randint(0, 50, (3, 9))
    targets = ids.roll(-1, 1)
    targets[0, 5:] = targets[1, :] = targets[2, :3] = IGNORED
    found = []
    for model in (plain, chunked):
        given = {} if model is plain else {"labels": targets, "shift_labels": targets}
        logits = model(input_ids=ids, **given).logits
        figures = row_figures(logits, targets) if model is plain else logits.sum(1)
        (figures[:, 0] * torch.tensor([1.0, 2.0, -3.0])).sum().backward()
        found.append((figures.detach(), [weight.grad for weight in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)
