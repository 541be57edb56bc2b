"""What is kept of a teacher, and what is learnt of that, against a page of numpy."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import gate_has
from scipy.special import log_softmax

from finetune.data import digests
from finetune.data.numbered import NUMBER, Numbered, NumberedCollator
from finetune.data.packing import IGNORED, Collator
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.run.flags.distillation import DistillArguments
from finetune.training.cached_teacher import OPEN_PIECES, Asked, TopK, asked_before, divergence_of_top, likeliest
from finetune.training.distilling import Teacher, divergence
from finetune.training.preference_model import reference_key
from finetune.training.teachers import answers_key

DRAW = torch.Generator().manual_seed(0)
STUDENT, TEACHER = (torch.randn(7, 13, generator=DRAW) * 3 for _ in range(2))
VOCABULARY = 11


def kl(teacher: Any, student: Any) -> Any:
    return (teacher * np.log(teacher / student)).sum(axis=-1)


def probabilities(logits: torch.Tensor, temperature: float) -> Any:
    return np.exp(log_softmax(logits.double().numpy() / temperature, axis=-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_of_the_whole_vocabulary_the_divergence_is_that_of_a_teacher_who_is_asked(temperature: float) -> None:
    kept = divergence_of_top(STUDENT, *likeliest(TEACHER, 13, temperature), temperature)
    assert kept.item() == pytest.approx(divergence(STUDENT, TEACHER, temperature).item(), rel=1e-6)


@pytest.mark.parametrize("k", [1, 4, 12])
def test_all_other_tokens_count_as_one_and_what_is_missing_is_the_divergence_among_them(k: int) -> None:
    found = divergence_of_top(STUDENT, *likeliest(TEACHER, k, 2.0), 2.0).item()
    whole = missing = joined = 0.0
    for p, q in zip(probabilities(TEACHER, 2.0), probabilities(STUDENT, 2.0), strict=True):
        top, others = np.argsort(-p)[:k], np.argsort(-p)[k:]
        rest = p[others].sum(), q[others].sum()
        joined += kl(np.append(p[top], rest[0]), np.append(q[top], rest[1]))
        missing += rest[0] * kl(p[others] / rest[0], q[others] / rest[1])
        whole += kl(p, q)
    assert found == pytest.approx(joined, rel=1e-5)
    assert found + missing == pytest.approx(whole, rel=1e-5)
    assert 0 < found <= whole * (1 + 1e-6)


@pytest.mark.parametrize("k", [3, 13])
def test_from_itself_a_model_learns_nothing(k: int) -> None:
    student = TEACHER.clone().requires_grad_(True)
    found = divergence_of_top(student, *likeliest(TEACHER, k, 1.0), 1.0)
    found.backward()
    assert abs(found.item()) < 1e-6
    assert student.grad is not None
    assert student.grad.abs().max().item() < 1e-6


def test_a_teacher_who_is_certain_gives_finite_gradients() -> None:
    certain, student = TEACHER.clone(), STUDENT.clone().requires_grad_(True)
    certain[:, 0] = 1e4
    logs, tokens, rest = likeliest(certain, 1, 1.0)
    assert rest.exp().sum() == 0
    found = divergence_of_top(student, logs, tokens, rest, 1.0)
    found.backward()
    assert found.item() == pytest.approx(-torch.log_softmax(STUDENT, -1)[:, 0].sum().item(), rel=1e-5)
    assert student.grad is not None
    assert student.grad.isfinite().all()


def rows() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    found = []
    for length in (8, 3, 5, 8, 1, 6, 2):
        targets = torch.randint(VOCABULARY, (length,), generator=draw)
        targets[torch.rand(length, generator=draw) > 0.7] = IGNORED
        ids = torch.randint(VOCABULARY, (length,), generator=draw)
        found.append({"input_ids": ids, "shift_labels": targets})
    return found


class Counted(torch.nn.Module):
    """A teacher that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
        config = GPTLiteConfig(vocab_size=VOCABULARY, initializer_range=0.5, dropout=0.0, **shape)
        self.model, self.times = GPTLiteForCausalLM(config).eval(), 0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        self.times += 1
        return self.model(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("k", [4, VOCABULARY])
def test_rows_find_what_was_kept_and_only_what_is_lost_is_asked_again(k: int, tmp_path: Path) -> None:
    model, every = Counted(), rows()
    reads = ("input_ids", "attention_mask")
    asked = Asked(every, Collator(0), k, VOCABULARY, 2.0, tmp_path / "kept", 2, 2, True)
    teacher = lambda: Teacher(model, 0.5, 2.0, reads, contextlib.nullcontext)  # noqa: E731
    kept = asked_before(asked, teacher, torch.device("cpu"), 3)
    assert model.times == len(asked.pieces) == 4

    numbered, collator = Numbered(every), NumberedCollator(Collator(0))
    batch = collator([numbered[i] for i in (5, 0, 2)])
    assert batch[NUMBER].tolist() == [5, 0, 2]
    learnt = batch["shift_labels"] != IGNORED
    with torch.no_grad():
        logits = model.model(batch["input_ids"], batch["attention_mask"]).logits[learnt]
    student = torch.randn(logits.shape, generator=DRAW)
    said = kept.say(batch[NUMBER], "cpu")
    expected = divergence_of_top(student, *likeliest(logits, k, 2.0), 2.0).item()
    assert said(student, slice(None)).item() == pytest.approx(expected, rel=1e-5)
    parts = [said(student[part], part).item() for part in (slice(0, 4), slice(4, None))]
    assert sum(parts) == pytest.approx(expected, rel=1e-5)

    def nobody() -> Teacher:
        raise AssertionError("all is kept")

    asked_before(replace(asked, batch=5), nobody, torch.device("cpu"), 3)
    asked.file(asked.pieces[1], "records").unlink()
    before = model.times
    again = asked_before(asked, teacher, torch.device("cpu"), 3)
    assert model.times == before + 1
    assert_alike(kept, again, len(every))


def assert_alike(one: TopK, other: TopK, rows: int) -> None:
    assert one.bytes == other.bytes > 0
    assert all(np.array_equal(one.of_row(row), other.of_row(row)) for row in range(rows))


class Said:
    """A teacher that likes the tokens in their order, and needs no model."""

    model = None
    head_weights = contextlib.nullcontext

    def answers(self, inputs: dict[str, torch.Tensor]) -> Any:
        count = int((inputs["shift_labels"] != IGNORED).sum())
        logits = -torch.arange(VOCABULARY, dtype=torch.float32).repeat(count, 1)
        return lambda some: logits[some]


def said(folder: Path, rows: list[Any], piece_rows: int) -> TopK:
    asked = Asked(rows, Collator(0), 2, VOCABULARY, 1.0, folder, piece_rows, 1, True)
    return asked_before(asked, Said, torch.device("cpu"), 3)  # type: ignore[arg-type]


def test_any_number_of_files_needs_few_descriptors(tmp_path: Path) -> None:
    target = torch.zeros(1, dtype=torch.long)
    every = [{"input_ids": target, "shift_labels": target}] * (4 * OPEN_PIECES)
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = said(tmp_path, every, 1)
    assert [len(kept.of_row(row)) for row in range(len(every))] == [1] * len(every)
    held = [kept.of_row(row) for row in range(len(every))]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= OPEN_PIECES
    assert len(held) == len(every)


@pytest.mark.parametrize(("first", "then"), gate_has((2, 4), [(2, 4), (4, 2)]))
def test_rows_that_another_block_size_cuts_otherwise_find_what_is_theirs(first: int, then: int, tmp_path: Path) -> None:
    said(tmp_path / "both", rows(), first)
    assert_alike(said(tmp_path / "both", rows(), then), said(tmp_path / "one", rows(), 7), 7)


class Settings(dict[Any, Any]):
    """A session, as far as keys ask it."""

    training = SimpleNamespace(bf16=False, fp16=False, seed=0)
    run = SimpleNamespace(value={"teacher_top_k": 4, "model_revision": "main"}.get)


def test_another_commit_of_the_hub_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "HF_HUB_CACHE", str(tmp_path))
    ref = tmp_path / "models--name--of-hub" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    session: Any = Settings({DistillArguments: SimpleNamespace(teacher="name/of-hub", distill_temperature=1.0)})
    source: Any = SimpleNamespace(pretrained="name/of-hub", adapter=None)
    data: Any = SimpleNamespace(splits={"train": None})
    keys = []
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        ref.write_text(commit)
        config = GPTLiteConfig()
        keys.append((answers_key(session, data, config, 8), reference_key(session, source, data, config)))
    assert keys[0] == keys[2]
    assert not {*keys[0]} & {*keys[1]}
