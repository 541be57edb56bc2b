"""A teacher's say in the loss, against a page of numpy; in chunks and whole."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from finetune.data.packing import IGNORED
from finetune.models.chunked_loss import LossHead, use_chunked_loss
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.training.distilling import Teacher, divergence
from finetune.training.loss import weighted_loss
from finetune.training.teachers import _with_hidden_head

VOCABULARY, CHUNK = 11, 5


def gptlite(seed: int, hidden: int = 16) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = GPTLiteForCausalLM(GPTLiteConfig(vocab_size=VOCABULARY, initializer_range=0.5, dropout=0.0, **shape))
    return model.train()


def teacher_of(model: Any, alpha: float = 0.5, temperature: float = 2.0) -> Teacher:
    model = model.requires_grad_(False).eval()
    return Teacher(model, alpha, temperature, ("input_ids", "attention_mask"), contextlib.nullcontext)


def batch(learnt: float = 0.7) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (3, 8), generator=draw)
    targets = torch.randint(VOCABULARY, (3, 8), generator=draw)
    targets[torch.rand(3, 8, generator=draw) > learnt] = IGNORED
    return {"input_ids": ids, "labels": targets, "shift_labels": targets, "num_items_in_batch": torch.tensor(40)}


def asked(student: Any, teacher: Teacher, given: dict[str, Any], chunk: int) -> tuple[float, dict[str, Any]]:
    """The loss and the gradients, whole or in chunks."""
    if chunk:
        use_chunked_loss(student, chunk)
        teacher.head = next(module for module in student.modules() if isinstance(module, LossHead))
        teacher.hidden = _with_hidden_head(teacher.model)
    loss = teacher.beside(student)(**given)["loss"]
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in student.named_parameters()}


def by_numpy(student: Any, teacher: Any, temperature: float) -> float:
    """The sum of KL(teacher || student) over rows, in fp64."""
    own, other = (log_softmax(np.asarray(x, np.float64) / temperature, axis=-1) for x in (student, teacher))
    return float((np.exp(other) * (other - own)).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_divergence_is_that_of_a_page_of_numpy(temperature: float) -> None:
    student, teacher = torch.randn(7, 13, generator=torch.Generator().manual_seed(0)) * 4, torch.randn(7, 13)
    found = divergence(student, teacher, temperature).item()
    assert found == pytest.approx(by_numpy(student, teacher, temperature), rel=1e-5)


def test_rows_of_padding_at_a_vocabularys_end_are_not_compared() -> None:
    student, teacher = torch.randn(4, 9), torch.randn(4, 12)
    assert divergence(student, teacher, 1.0).item() == divergence(student, teacher[:, :9], 1.0).item()


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_the_loss_is_both_parts_by_the_tokens_of_the_global_batch(chunk: int) -> None:
    student, master, given = gptlite(1), gptlite(2, hidden=24), batch()
    with torch.no_grad():
        own, other = student(given["input_ids"]).logits, master(given["input_ids"]).logits
    learnt = given["labels"] != IGNORED
    hard = -log_softmax(own[learnt].double().numpy(), axis=-1)[
        np.arange(int(learnt.sum())), given["labels"][learnt]
    ].sum()
    soft = by_numpy(own[learnt], other[learnt], 2.0)
    teacher = teacher_of(master, alpha=0.3)
    loss, _ = asked(student, teacher, given, chunk)
    assert loss == pytest.approx((0.7 * hard + 0.3 * 4 * soft) / 40, rel=1e-5)
    said = teacher.window(lambda sums: sums)
    assert said == pytest.approx({"hard_loss": hard / int(learnt.sum()), "kl": soft / int(learnt.sum())}, rel=1e-5)
    assert teacher.window(lambda sums: sums) == {}


@pytest.mark.parametrize("learnt", [0.7, 0.0])
@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_gradients_in_chunks_are_those_of_the_whole(alpha: float, learnt: float) -> None:
    (loss, whole), (in_chunks, parts) = (
        asked(gptlite(1), teacher_of(gptlite(2, hidden=24), alpha), batch(learnt), chunk) for chunk in (0, CHUNK)
    )
    assert in_chunks == pytest.approx(loss, rel=1e-6)
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_no_gradient_is_made_of_a_frozen_head() -> None:
    student = gptlite(1)
    student.lm_head.weight.requires_grad_(False)
    _, parts = asked(student, teacher_of(gptlite(2)), batch(), CHUNK)
    assert parts.pop("lm_head.weight") is None
    assert all(gradient is not None for gradient in parts.values())


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_from_itself_a_model_learns_nothing(chunk: int) -> None:
    teacher = teacher_of(gptlite(1), alpha=1.0)
    loss, gradients = asked(gptlite(1), teacher, batch(), chunk)
    assert abs(loss) < 1e-6
    assert teacher.window(lambda sums: sums)["kl"] == pytest.approx(0, abs=1e-6)
    assert max(gradient.abs().max().item() for gradient in gradients.values()) < 1e-6


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_with_alpha_1_the_labels_do_not_count(chunk: int) -> None:
    one, other = batch(), batch()
    other["labels"] = other["shift_labels"] = torch.where(
        one["labels"] == IGNORED, IGNORED, (one["labels"] + 1) % VOCABULARY
    )
    (_, first), (_, second) = (asked(gptlite(1), teacher_of(gptlite(2), 1.0), given, chunk) for given in (one, other))
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], rtol=1e-5, atol=1e-8)


def test_a_chunk_of_logits_is_all_that_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()
    whole = divergence
    monkeypatch.setattr(
        "finetune.training.distilling.divergence", lambda s, t, at: (rows.extend((len(s), len(t))), whole(s, t, at))[1]
    )
    asked(gptlite(1), teacher_of(gptlite(2)), batch(), CHUNK)
    assert max(rows) == CHUNK < sum(rows) / 2


def test_classes_are_compared_in_the_students_order() -> None:
    class Fixed(torch.nn.Module):
        def __init__(self, logits: list[list[float]]) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor(logits))

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.logits}

    student, teacher = Fixed([[1.0, 2.0, 0.0], [0.0, 0.5, 1.0]]), teacher_of(Fixed([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5]]))
    teacher.classes = [1, 2, 0]
    loss = teacher.mixed(weighted_loss([1.0] * 3, 0.0))
    outputs = teacher.beside(student)(input_ids=torch.zeros(2, 1))
    labels = torch.tensor([1, 2])
    hard = weighted_loss([1.0] * 3, 0.0)({"logits": student.logits}, labels, torch.tensor(6))
    assert loss(outputs, labels, num_items_in_batch=torch.tensor(6)).item() == pytest.approx(
        0.5 * hard.item(), rel=1e-6
    )
    assert loss({"logits": student.logits}, labels, torch.tensor(6)).item() == hard.item(), (
        "an evaluation has no teacher"
    )
