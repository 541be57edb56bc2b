"""Mixtures of experts: the routers' loss is that of transformers over a whole batch, however the batch is split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JetMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from finetune.errors import RequestError
from finetune.models.chunked_loss import choose_chunk_tokens, use_chunked_loss
from finetune.models.experts import (
    ASKED,
    WATCHED,
    Experts,
    balance,
    count,
    mixture_of,
    refusal,
    router_coefficient,
    router_loss,
)
from finetune.models.gptlite import GPTLiteConfig
from finetune.training.experts import describe_mixture, sees_choices, watch_experts

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.4,
    "head_dim": 8,
}
CPU = torch.device("cpu")
LOCAL, SPLIT = {**SHAPE, "num_local_experts": 4}, {**SHAPE, "num_experts": 4, "moe_intermediate_size": 12}
DEEPSEEK = {
    **{name: value for name, value in SHAPE.items() if name != "head_dim"},
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}


def test_an_evaluation_says_nothing_of_a_loss_that_it_does_not_have() -> None:
    model = mixtral(output_router_logits=False)
    session: Any = SimpleNamespace(training=SimpleNamespace(do_train=False))
    mixture = mixture_of(model)
    assert mixture
    assert "loss" not in describe_mixture(session, model.config, mixture, 0.0, model)


def test_a_compiled_model_adds_no_router_loss_of_its_own() -> None:
    """Hooks are left out of compiled graphs, so the model itself must not add it."""
    model, ids = mixtral(output_router_logits=True, router_aux_loss_coef=0.5), torch.arange(8)[None]
    said = SimpleNamespace(training=SimpleNamespace(torch_compile=True))
    before = model(input_ids=ids, labels=ids).loss
    watch_experts(said, model, model, 0.0)  # type: ignore[arg-type]
    assert not hasattr(model, WATCHED)
    plain = model(input_ids=ids, labels=ids, output_router_logits=False).loss
    assert model(input_ids=ids, labels=ids).loss == plain != before


def mixtral(**more: Any) -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**LOCAL, **more))


def a_batch() -> dict[str, torch.Tensor]:
    """Four rows with different numbers of tokens, and of labels."""
    torch.manual_seed(1)
    ids, mask = torch.randint(0, 40, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[1, 4:], mask[2, 7:], mask[3, 2:] = 0, 0, 0
    labels = torch.where(mask.bool(), ids, -100)
    labels[0, :6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def rows_of(batch: dict[str, torch.Tensor], *rows: int) -> dict[str, torch.Tensor]:
    return {name: value[list(rows)] for name, value in batch.items()}


def test_parts_of_a_batch_add_up_to_the_loss_of_transformers() -> None:
    batch, logits = a_batch(), tuple(torch.randn(36, 4) for _ in range(3))
    mask = batch["attention_mask"]
    whole = load_balancing_loss_func(logits, 4, 2, mask)
    counts, sums, rows = balance(logits, 2, mask)
    assert router_loss(counts, sums, rows).item() == pytest.approx(whole.item(), rel=1e-6)
    parts = 0.0
    for some in (slice(0, 9), slice(9, 36)):
        _, sums, _ = balance(tuple(layer[some] for layer in logits), 2, mask.reshape(-1)[some])
        parts += router_loss(counts, sums, rows).item()
    assert parts == pytest.approx(whole.item(), rel=1e-6)
    assert router_loss(*balance(logits, 2, None)).item() == pytest.approx(load_balancing_loss_func(logits, 4, 2).item())


def test_tokens_are_counted_without_padding_and_without_experts_that_are_none() -> None:
    best = torch.tensor([[0, 1], [1, 4], [2, 1]])
    assert count(best, 4, torch.tensor([1.0, 1.0, 0.0])).tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("chunk", [0, 8], ids=["all logits", "chunks"])
def test_a_step_has_the_gradients_of_the_whole_batch_at_once(chunk: int) -> None:
    """One pass of transformers' own, and ours in micro-batches of three rows and one."""
    batch, items = a_batch(), 20
    truth = mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
    expected = truth(**batch, num_items_in_batch=items).loss
    expected.backward()

    model = mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
    if chunk:
        use_chunked_loss(model, chunk)
    mixture = mixture_of(model)
    assert mixture is not None
    experts = Experts(model, model, mixture, router_coefficient(model, None))
    model.train()
    parts = [rows_of(batch, 0, 1, 2), rows_of(batch, 3)]
    experts.begin_step()
    with torch.no_grad(), experts.looking_ahead():
        for part in parts:
            experts.mask = part["attention_mask"]
            model(input_ids=part["input_ids"], attention_mask=part["attention_mask"], logits_to_keep=1)
    found = 0.0
    for part in parts:
        experts.mask = part["attention_mask"]
        with experts.counting():
            loss = model(**part, num_items_in_batch=items).loss
        loss.backward()
        found += loss.item()
    assert found == pytest.approx(expected.item(), rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6), name

    own, tokens = experts.window(lambda one: one, CPU)
    aux = truth(**batch).aux_loss.item()
    assert own == pytest.approx(aux, rel=1e-6)
    assert tokens.shape == (2, 4)
    assert tokens.sum(dim=1).tolist() == [2 * int(batch["attention_mask"].sum())] * 2
    assert experts.window(lambda one: one, CPU)[1].sum() == 0


def test_recomputed_activations_are_counted_once_and_carry_the_gradient() -> None:
    batch, gradients = a_batch(), []
    for recomputes in (False, True):
        model = mixtral()
        mixture = mixture_of(model)
        assert mixture is not None
        experts = Experts(model, model, mixture, 1.0)
        if recomputes:
            model.activation_checkpointing_enable()
        model.train()
        experts.begin_step()
        experts.mask = batch["attention_mask"]
        with experts.counting():
            model(**batch).loss.backward()
        gradients.append(model.model.layers[0].mlp.gate.weight.grad)
        assert experts.window(lambda one: one, CPU)[1].sum() == 2 * 2 * batch["attention_mask"].sum()
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)


def test_a_step_that_is_not_taken_is_not_counted() -> None:
    batch, model = a_batch(), mixtral(output_router_logits=True)
    mixture = mixture_of(model)
    assert mixture is not None
    experts = Experts(model, model.train(), mixture, 1.0)
    windows = []
    for is_taken in ([True], [True, False]):
        for taken in is_taken:
            experts.begin_step()
            with experts.counting():
                model(**batch)
            if not taken:
                experts.forget_step()
        windows.append(experts.window(lambda one: one, CPU))
    assert windows[0][0] == windows[1][0]
    assert torch.equal(windows[0][1], windows[1][1])


def test_an_evaluation_has_no_router_loss() -> None:
    batch, model = a_batch(), mixtral(output_router_logits=True)
    plain = model.eval()(**batch, **{ASKED: False}).loss.item()
    mixture = mixture_of(model)
    assert mixture is not None
    Experts(model, model, mixture, 1.0)
    given = model.eval()(**batch)
    assert given.loss.item() == plain
    assert given.router_logits is None


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        (lambda: mixtral(), 4),
        (lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SPLIT, mlp_only_layers=[0])), 4),
        (lambda: GptOssForCausalLM(GptOssConfig(**LOCAL)), 4),
        (lambda: OlmoeForCausalLM(OlmoeConfig(**{**SHAPE, "num_experts": 4})), 4),
    ],
    ids=["Mixtral", "Qwen3-MoE", "gpt-oss", "OLMoE"],
)
def test_models_with_the_loss_of_transformers_are_found_right(model: Any, experts: int) -> None:
    made = model()
    found = mixture_of(made)
    assert found is not None
    assert (found.experts, found.chosen) == (experts, 2)
    assert refusal(made) is None
    assert router_coefficient(made, None) == 0.0
    assert router_coefficient(made, 0.25) == 0.25


@pytest.mark.parametrize(
    ("config", "sees"),
    [
        (MixtralConfig(**LOCAL), True),
        (GptOssConfig(**LOCAL), True),
        (GPTLiteConfig(vocab_size=40, num_experts=4), True),
        (Llama4TextConfig(**LOCAL, intermediate_size_mlp=24), False),
        (JetMoeConfig(**{**LOCAL, "num_layers": 2}), False),
    ],
    ids=lambda one: getattr(one, "model_type", ""),
)
def test_experts_that_do_not_see_choices_are_known(config: Any, sees: bool) -> None:
    with torch.device("meta"):
        mixture = mixture_of(AutoModelForCausalLM.from_config(config))
    assert mixture is not None
    assert sees_choices(mixture) == sees


def test_models_without_such_a_loss_are_refused() -> None:
    dense = LlamaForCausalLM(LlamaConfig(**SHAPE))
    assert mixture_of(dense) is None
    with pytest.raises(RequestError, match=r"--router_aux_loss_coef 0\.1: LlamaForCausalLM has no experts"):
        router_coefficient(dense, 0.1)
    assert router_coefficient(dense, 0.0) == 0.0
    deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
    found = mixture_of(deepseek)
    assert found is not None
    assert list(found.modules) == ["model.layers.1.mlp.experts"]
    with pytest.raises(RequestError, match="has no router loss in transformers"):
        router_coefficient(deepseek, 0.1)


def test_a_loss_in_chunks_is_left_to_the_routers_own_part() -> None:
    model = mixtral(output_router_logits=True)
    assert choose_chunk_tokens(16, model, "cpu", {ASKED: False}) == 16
    with pytest.raises(RequestError, match="does more for its loss"):
        choose_chunk_tokens(16, model, "cpu")
