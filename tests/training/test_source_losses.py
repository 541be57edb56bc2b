"""The training loss of each file of a mixture, against the loss that is learnt and against a page of numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from finetune.data.numbered import NUMBER
from finetune.data.packing import IGNORED
from finetune.models.chunked_loss import loss_head, use_chunked_loss
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.run.mixture import MOST_LOGGED
from finetune.training.running_loss import SLICE_TOKENS, SourceLosses, token_losses

VOCABULARY, CHUNK = 11, 5
ENDS = [3, 7, 9]  # the blocks of three files
NAMES = ["a", "b", "c"]


def alone(sums: torch.Tensor) -> torch.Tensor:
    """One rank's gather."""
    return sums


def gptlite() -> Any:
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = GPTLiteForCausalLM(GPTLiteConfig(vocab_size=VOCABULARY, initializer_range=0.5, dropout=0.0, **shape))
    return model.train()


def batch(numbers: list[int], seed: int, items: int | None = None) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    shape = (len(numbers), 8)
    targets = torch.randint(VOCABULARY, shape, generator=draw)
    targets[torch.rand(shape, generator=draw) > 0.6] = IGNORED
    ids = torch.randint(VOCABULARY, shape, generator=draw)
    count = torch.tensor(int((targets != IGNORED).sum()) if items is None else items)
    return {
        "input_ids": ids,
        "labels": targets,
        "shift_labels": targets,
        "num_items_in_batch": count,
        NUMBER: torch.tensor(numbers),
    }


def sources_of(model: Any, chunk: int, names: list[str] = NAMES, ends: list[int] = ENDS) -> SourceLosses:
    if chunk:
        use_chunked_loss(model, chunk)
    sources = SourceLosses(names, ends, loss_head(model))
    sources.begin("cpu", {}, True)
    return sources


def learn(model: Any, sources: SourceLosses, given: dict[str, Any], filters: bool = True) -> torch.Tensor:
    """A micro-batch's loss, whose gradients are added to those of the model."""
    loss: torch.Tensor = sources.beside(model)(**given)["loss"]
    loss.backward()
    sources.add(filters)
    return loss.detach()


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_each_file_s_loss_is_that_of_its_learnt_tokens_and_together_they_are_the_loss(chunk: int) -> None:
    model, given = gptlite(), batch([0, 3, 6, 2, 8], seed=3)
    with torch.no_grad():
        logits = model(given["input_ids"]).logits.double().numpy()
    targets = given["labels"].numpy()
    nats = -np.take_along_axis(log_softmax(logits, axis=-1), np.maximum(targets, 0)[..., None], -1)[..., 0]
    sources = sources_of(model, chunk)
    loss = learn(model, sources, given)
    found = sources.window(alone)
    weighed = 0.0
    for name, rows in (("a", [0, 3]), ("b", [1, 2]), ("c", [4])):
        is_learnt = targets[rows] != IGNORED
        assert found[f"loss_{name}"] == pytest.approx(nats[rows][is_learnt].mean(), rel=1e-6)
        assert found[f"learnt_tokens_{name}"] == is_learnt.sum()
        weighed += found[f"loss_{name}"] * found[f"learnt_tokens_{name}"]
    assert weighed / int((targets != IGNORED).sum()) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_counting_changes_no_gradient(chunk: int) -> None:
    plain, counted = gptlite(), gptlite()
    given = batch([0, 3, 8], seed=4, items=20)
    learn(counted, sources_of(counted, chunk), given)
    if chunk:
        use_chunked_loss(plain, chunk)
    plain(**{name: value for name, value in given.items() if name != NUMBER})["loss"].backward()
    for own, other in zip(counted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_of_a_frozen_head_no_gradient_is_made() -> None:
    model = gptlite()
    model.lm_head.weight.requires_grad_(False)
    sources = sources_of(model, CHUNK)
    learn(model, sources, batch([0, 3, 8], seed=4))
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert gradients.pop("lm_head.weight") is None
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())


def test_a_window_is_over_the_tokens_of_all_its_steps_and_a_file_without_any_is_left_out() -> None:
    model = gptlite()
    sources = sources_of(model, CHUNK)
    parts = [batch([0, 3], seed=5), batch([1, 2], seed=6), batch([4, 5], seed=7)]
    each = []
    for given in parts:
        learn(model, sources, given)
        each.append(sources.window(alone))
    assert "loss_b" not in each[1]
    for given in parts:
        learn(model, sources, given)
    whole = sources.window(alone)
    assert set(whole) == {"loss_a", "learnt_tokens_a", "loss_b", "learnt_tokens_b"}
    for name in "ab":
        some = [one for one in each if f"loss_{name}" in one]
        tokens = sum(one[f"learnt_tokens_{name}"] for one in some)
        nats = sum(one[f"loss_{name}"] * one[f"learnt_tokens_{name}"] for one in some)
        assert whole[f"learnt_tokens_{name}"] == tokens
        assert whole[f"loss_{name}"] == pytest.approx(nats / tokens, rel=1e-12)
        assert sources.means(alone)[name] == pytest.approx({"loss": nats / tokens, "learnt_tokens": 2 * tokens})


def test_a_checkpoint_goes_on_at_any_number_of_ranks() -> None:
    """Two ranks before it and three after it, against one that was never cut."""
    parts = [batch([0, 3], seed=seed) for seed in range(6)]
    whole = sources_of(gptlite(), CHUNK)
    ranks = [sources_of(gptlite(), CHUNK) for _ in range(2)]
    model = gptlite()
    use_chunked_loss(model, CHUNK)

    def take(sources: SourceLosses, given: dict[str, Any]) -> None:
        sources.head = loss_head(model)
        sources.head.keeps_losses = True
        learn(model, sources, given)

    def of(some: list[SourceLosses]) -> Any:
        return lambda own: torch.cat([one.now for one in some])

    for place, given in enumerate(parts[:4]):
        take(whole, given)
        take(ranks[place % 2], given)
        if place == 1:
            logged = whole.window(alone)
            assert ranks[0].window(of(ranks)) == pytest.approx(logged, rel=1e-12)
            ranks[1].now = torch.zeros_like(ranks[1].now)  # it logs, too
    kept = ranks[0].noted(of(ranks))
    resumed = [SourceLosses(NAMES, ENDS) for _ in range(3)]
    for rank, one in enumerate(resumed):
        one.begin("cpu", kept, rank == 0)
    for place, given in enumerate(parts[4:]):
        take(whole, given)
        take(resumed[place], given)
    means = whole.means(alone)
    assert resumed[0].means(of(resumed)) == {name: pytest.approx(one, rel=1e-12) for name, one in means.items()}
    assert resumed[0].window(of(resumed)) == pytest.approx(whole.window(alone), rel=1e-12)
    other = SourceLosses(["a", "b", "d"], ENDS)
    other.begin("cpu", kept, True)
    assert other.window(alone) == {}, "these are not the files of the checkpoint"


@pytest.mark.parametrize("filters", [True, False])
def test_what_is_not_finite_is_left_out_where_the_loss_leaves_it_out(filters: bool) -> None:
    model = gptlite()
    sources = sources_of(model, 0)
    learn(model, sources, batch([0, 3], seed=8))
    before = sources.now
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    learn(model, sources, batch([0, 1], seed=9), filters)
    found = sources.window(alone)
    assert math.isnan(found["loss_a"]) is not filters
    assert found["loss_b"] == float(before[1, 0] / before[1, 1])


def test_without_gradients_or_numbers_nothing_is_counted() -> None:
    model = gptlite()
    sources = sources_of(model, CHUNK)
    given = batch([0], seed=1)
    with torch.no_grad():
        sources.beside(model)(**given)
    del given[NUMBER]
    sources.beside(model)(**given)
    sources.add(filters=True)
    assert sources.window(alone) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_a_compiled_model_counts_the_same(chunk: int) -> None:
    plain, whole = gptlite(), gptlite()
    sources, counted = sources_of(plain, chunk), sources_of(whole, chunk)
    torch._dynamo.reset()
    compiled = torch.compile(whole, fullgraph=not chunk)  # the chunked loss is apart from the graph
    for seed in range(2):
        given = batch([0, 3, 8], seed=seed)
        learn(plain, sources, given)
        learn(compiled, counted, given)
        assert counted.window(alone) == pytest.approx(sources.window(alone), rel=1e-5)


def test_of_very_many_files_the_log_has_none_and_the_results_have_all() -> None:
    model, count = gptlite(), MOST_LOGGED + 1
    sources = sources_of(model, 0, [f"f{n}" for n in range(count)], list(range(1, count + 1)))
    learn(model, sources, batch([0, count - 1], seed=2))
    assert sources.window(alone) == {}
    assert list(sources.means(alone)) == ["f0", f"f{count - 1}"]


def test_losses_of_tokens_are_made_a_slice_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, SLICE_TOKENS, VOCABULARY, dtype=torch.bfloat16)
    targets = torch.randint(VOCABULARY, (3, SLICE_TOKENS))
    targets[0, :5] = IGNORED
    whole = torch.nn.functional.cross_entropy
    wanted = whole(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    rows = list[int]()
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda some, *a, **k: (rows.append(len(some)), whole(some, *a, **k))[1]
    )
    assert torch.equal(token_losses(logits, targets).flatten(), wanted)
    assert rows == [SLICE_TOKENS] * 3
