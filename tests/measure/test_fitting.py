"""Which sizes are those of texts that are filled up to whole chunks."""

from __future__ import annotations

from typing import Any

from finetune.measure.fitting import fill
from finetune.measure.recording import Recording
from finetune.plan.families.parts import CAUSAL
from finetune.plan.forward.parts import Batch

ROWS, TOKENS, CHUNK = 2, 129, 64
EACH_TOKEN = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]  # of `terms`: rows x tokens


def op(name: str, *out: int) -> dict[str, Any]:
    return {"name": name, "segment": 0, "part": False, "out": [*out], "weights": []}


def test_a_size_that_is_a_filled_texts_is_told_from_one_that_is_not() -> None:
    """A text that is no whole chunk is cut after it was filled up, and another is not."""
    like, odd = Recording({}), Recording({})
    like.ops = [op("pad", 0), op("mul", 1), op("mm", 2)]
    odd.ops = [op("pad", 0), op("mul", 1), op("slice", 2), op("mm", 3)]
    odd.facts = [[ROWS * size, 2, at, 1] for at, size in enumerate((192, 192, TOKENS, TOKENS))]
    trace: dict[str, Any] = {"values": [[EACH_TOKEN, 2, at, 1] for at in range(3)], "ops": like.ops}
    fill(trace, like, Batch(ROWS, TOKENS), odd, CAUSAL)
    assert [value[4:] for value in trace["values"]] == [[CHUNK], [CHUNK], []]
