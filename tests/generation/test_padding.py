"""Prompts of different lengths, padded on the left into one batch, are answered as each is alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, POSITIONS, VOCABULARY, answerer

from finetune.generation.batches import Batch
from finetune.generation.sampling import Decoding

LENGTHS = (1, 3, 4, 9, 17, 30)  # of which some are longer than a sliding window of 8
NEW = 24


def prompts() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY - 1, (length,), generator=drawn).tolist() for length in LENGTHS]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_padded_prompt_is_answered_as_it_is_alone(kind: str) -> None:
    one, ids = answerer(kind), prompts()
    numbers = list(range(len(ids)))
    together = one.answer(ids, Batch(numbers, NEW))
    alone = [one.answer([ids[number]], Batch([number], NEW))[0] for number in numbers]
    assert together == alone
    assert [row["prompt_tokens"] for row in together] == list(LENGTHS)
    assert {row["tokens"] for row in together} == {NEW}
    assert len({row["text"] for row in together}) == len(LENGTHS), "the model says the same to all, and shows nothing"


@pytest.mark.parametrize("kind", ["gptlite", "gpt2", "llama"])
def test_the_test_above_sees_a_mask_that_is_left_out(kind: str) -> None:
    one, ids = answerer(kind), prompts()
    width = max(LENGTHS)
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    wrong = one.model.generate(padded, attention_mask=torch.ones_like(padded), max_new_tokens=NEW)
    right = one.answer(ids, Batch(list(range(len(ids))), NEW))
    said = [one.tokenizer.decode(row[width:], skip_special_tokens=True) for row in wrong]
    differs = [text != row["text"] for text, row in zip(said, right, strict=True)]
    assert differs == [True] * (len(ids) - 1) + [False]


@pytest.mark.parametrize("kind", ["gptlite", "gpt2"])  # which have a table of positions, and nothing beyond it
def test_the_last_position_is_written_and_none_after_it(kind: str) -> None:
    one = answerer(kind)
    ids = [[5] * (POSITIONS - 3), [6] * (POSITIONS - 3)]
    assert [row["tokens"] for row in one.answer(ids, Batch([0, 1], 3))] == [3, 3]


@pytest.mark.parametrize("kind", ["gptlite", "llama"])
def test_an_answer_that_ends_early_does_not_change_the_others(kind: str) -> None:
    ids = prompts()
    free = answerer(kind).answer(ids, Batch(list(range(len(ids))), NEW))
    first = answerer(kind).model.generate(torch.tensor([ids[2]]), max_new_tokens=1, pad_token_id=0)[0, -1].item()
    one = answerer(kind, ends=[first])
    rows = one.answer(ids, Batch(list(range(len(ids))), NEW))
    assert (rows[2]["finish_reason"], rows[2]["tokens"]) == ("end", 1)
    for row, before in zip(rows, free, strict=True):
        assert before["text"].startswith(row["text"].rstrip("\ufffd"))  # an end may fall into a letter of two bytes
        assert row["finish_reason"] == ("end" if row["tokens"] < NEW else "length")


@pytest.mark.parametrize("kind", ["gptlite", "llama"])
def test_padding_is_not_penalised_as_if_it_had_been_said(kind: str) -> None:
    penalties = Decoding(repetition_penalty=3.0, no_repeat_ngram_size=2)
    one, ids = answerer(kind, penalties, pad=first_of(kind)), prompts()
    numbers = list(range(len(ids)))
    together = one.answer(ids, Batch(numbers, NEW))
    assert together == [one.answer([ids[number]], Batch([number], NEW))[0] for number in numbers]
    assert together != answerer(kind).answer(ids, Batch(numbers, NEW))


def first_of(kind: str) -> int:
    """What the shortest prompt is answered first: as padding, a penalty on it would show."""
    (row,) = prompts()[:1]
    return int(answerer(kind).model.generate(torch.tensor([row]), max_new_tokens=1, pad_token_id=0)[0, -1])
