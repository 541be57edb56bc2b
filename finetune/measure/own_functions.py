"""Autograd functions that a model brings itself, such as reversible layers: what their backward passes allocate does
not follow from operators of the forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from finetune.measure.memory import Allocations
from finetune.measure.recording import Recording, is_own


def backward_bytes(model: torch.nn.Module, batch: dict[str, torch.Tensor], result: str) -> list[int]:
    """Of each function, in the order of their calls: the peak bytes of its backward pass above what was there before,
    without gradients of parameters. On the meta device; of none if an operator cannot run backward there."""
    with Allocations("meta") as memory, Recording({}):  # which answers what the model asks
        loss = model(**batch)[result].sum()
        before, most = dict[int, int](), dict[int, int]()

        def gradients() -> int:
            return sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)

        def enter(at: int, given: Any) -> None:
            before[at], memory.phase = memory.live - gradients(), f"function {at}"

        def leave(at: int, made: Any, given: Any) -> None:
            most[at], memory.phase = memory.peaks.get(memory.phase, 0) - gradients() - before[at], "others"

        found = _own(loss.grad_fn)
        for at, node in enumerate(found):
            node.register_prehook(partial(enter, at))
            node.register_hook(partial(leave, at))
        try:
            loss.backward()
        except RuntimeError:
            return []
    model.zero_grad()
    return [max(most.get(at, 0), 0) for at in range(len(found))]


def _own(last: Any) -> list[Any]:
    seen, next_ones = {last}, [last]
    while next_ones:
        more = {before for before, _ in next_ones.pop().next_functions} - seen - {None}
        seen |= more
        next_ones += more
    return sorted(filter(is_own, seen), key=lambda node: int(node._sequence_nr()))
