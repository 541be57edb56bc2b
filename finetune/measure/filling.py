"""Layers that fill texts up to whole chunks, blocks or windows: which sizes are those of a filled text."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from finetune.measure.fitting import at_batch
from finetune.measure.loops import mark
from finetune.measure.recording import Recording
from finetune.plan.forward.parts import Batch, filled

CHUNKS = tuple(2**power for power in range(13))  # tokens


def fill(trace: dict[str, Any], like: Recording, batch: Batch, odd: Recording, head: str) -> None:
    """Adds to each value and each loop of `trace`, which was fitted to whole chunks, to how many tokens it is filled
    up, if it is. `like`: a recording that the trace is of; `odd`: one of `batch`, whose texts are no whole chunks. It
    may have further operators, which cut off what was filled."""
    alike = SequenceMatcher(None, [mark(op) for op in like.ops], [mark(op) for op in odd.ops], autojunk=False)
    for block in alike.get_matching_blocks():
        for op, other in zip(trace["ops"][block.a :][: block.size], odd.ops[block.b :][: block.size], strict=True):
            for number, its in zip(op["out"], other["out"], strict=True):
                value = trace["values"][number]
                value[4:] = _chunk(value[0], odd.facts[its][0], head, batch)
            if "times" in op and "times" in other:
                op["filled"] = sum(_chunk(op["times"], other["times"], head, batch))


def _chunk(fitted: list[float], found: int, head: str, batch: Batch) -> list[int]:
    """Nothing if it is as long as the text, or as no other."""
    chunks = (chunk for chunk in CHUNKS if at_batch(fitted, head, filled(batch, chunk)) == found)
    return [chunk for chunk in (next(chunks, 1),) if chunk > 1]
