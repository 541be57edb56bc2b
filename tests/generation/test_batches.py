"""Which prompts are answered together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from finetune.generation.batches import WINDOW, batches_of, rounds_of

POSITIONS = 100


@given(st.lists(st.integers(1, POSITIONS - 1), max_size=300), st.integers(1, 150), st.integers(1, 5), st.integers(1, 4))
def test_every_prompt_is_in_one_batch_with_room_for_its_answer(
    lengths: list[int], most_new: int, size: int, ranks: int
) -> None:
    batches = batches_of(lengths, POSITIONS, most_new, size)
    assert sorted(number for batch in batches for number in batch.numbers) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch.numbers) <= size
        # Until the last row has ended all go on, from the longest prompt's width.
        assert max(lengths[number] for number in batch.numbers) + batch.limit <= POSITIONS
        assert all(batch.limit == min(most_new, POSITIONS - lengths[number]) for number in batch.numbers)
    rounds = list(rounds_of(batches, ranks))
    assert [batch for some in rounds for batch in some] == batches
    for some in rounds:
        assert 1 <= len(some) <= ranks
        assert len({batch.limit for batch in some}) == 1


def test_like_lengths_are_together_within_a_window() -> None:
    lengths = [3, 50] * (WINDOW * 2)
    batches = batches_of(lengths, POSITIONS, 10, 2)
    assert all(len({lengths[number] for number in batch.numbers}) == 1 for batch in batches)
    assert {number // (WINDOW * 2) for batch in batches[:WINDOW] for number in batch.numbers} == {0}
