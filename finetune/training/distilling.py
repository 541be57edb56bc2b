"""Distillation from a frozen teacher: its probabilities are learnt along with the data's own labels.

    loss = (1 - alpha) x hard loss + alpha x T^2 x KL(teacher || student), both at temperature T

(Hinton et al., arXiv 1503.02531, section 2: T^2 keeps the size of the gradients independent of T). Both parts are sums
over rows, or learnt tokens, divided by their number in the global batch, like the hard loss alone. If the loss of a
causal language model is computed in chunks, so is this one: logits of both models and gradients, a chunk at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.numbered import NUMBER
from finetune.data.packing import IGNORED
from finetune.models.chunked_loss import LossHead

READ = ("input_ids", "attention_mask", "position_ids", "token_type_ids")  # inputs that a teacher may receive
TAUGHT = "taught"  # the key of the teacher's logits among a classifier's outputs
# Takes the student's logits (N, V) of a slice of the learnt tokens, and the slice; returns the sum of divergences.
Say = Callable[[Tensor, slice], Tensor]


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) summed over rows, in nats, from logits (N, classes), computed in fp32. Vocabularies may be
    padded to different lengths: only the classes that both have are compared."""
    both = min(student.shape[-1], teacher.shape[-1])
    own, other = (nn.functional.log_softmax(x[:, :both].float() / temperature, -1) for x in (student, teacher))
    return nn.functional.kl_div(own, other, reduction="sum", log_target=True)


class HiddenHead(nn.Linear):
    """Replaces a teacher's head and returns the hidden states unchanged: logits are made later, a chunk at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass
class Teacher:
    """`model` is frozen and on its device, or None if its predictions are `kept`; `reads` names its inputs; `classes`
    are the positions of the student's classes among its own. `head` (the student's) and `hidden` (the teacher's) are
    set if the loss is computed in chunks."""

    model: Any
    alpha: float
    temperature: float
    reads: Sequence[str]
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    classes: Sequence[int] | None = None
    head: LossHead | None = None
    hidden: HiddenHead | None = None
    kept: Any = None  # predictions from before training (finetune.training.cached_teacher, TopK)
    sums: Tensor | None = None  # since the last log: hard loss, divergence, items

    def beside(self, student: Any) -> Callable[..., Any]:
        """A stand-in for the student: returns its outputs, in training mixed with the teacher's."""
        return partial(self._ask, student)

    def mixed(self, hard_loss: Any) -> Any:
        """A `compute_loss_func` for classifiers: `hard_loss`, mixed with the divergence where the teacher was asked."""

        def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            hard: Tensor = hard_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
            if TAUGHT not in outputs:
                return hard
            items = len(labels) if num_items_in_batch is None else num_items_in_batch
            soft = divergence(outputs["logits"], outputs[TAUGHT], self.temperature)
            self._count(hard * items, soft, len(labels))
            return self.mix(hard, soft / items)

        return compute

    def mix(self, hard: Tensor, soft: Tensor) -> Tensor:
        return (1 - self.alpha) * hard + self.alpha * self.temperature**2 * soft

    def window(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Means per row, or per learnt token, since the last log; every rank must call it."""
        if self.sums is None:
            return {}
        (hard, soft, items), self.sums = sum_over_ranks(self.sums).tolist(), None
        return {"hard_loss": hard / max(items, 1), "kl": soft / max(items, 1)}

    def answers(self, given: dict[str, Any]) -> Callable[[slice], Tensor]:
        """A function that returns logits (n, V) of a slice of the batch's learnt tokens; call it inside
        `head_weights`."""
        answer = self._answer(given)[given["shift_labels"] != IGNORED]
        if (head := self.hidden) is None:
            return lambda some: answer[some]
        return lambda some: nn.functional.linear(answer[some], head.weight, head.bias)

    def head_weights(self) -> contextlib.AbstractContextManager[Any]:
        """In this block the teacher's head weights are whole on each rank; no forward pass gathers them in ZeRO-3."""
        own = [] if self.hidden is None else [self.hidden.weight, self.hidden.bias]
        return _gathered([weight for weight in own if weight is not None])

    def _answer(self, given: dict[str, Any]) -> Tensor:
        with torch.no_grad(), self.autocast():
            logits: Tensor = self.model(**{name: given[name] for name in self.reads if name in given})["logits"]
        return logits

    def _ask(self, student: Any, **given: Any) -> Any:
        numbers, targets = given.pop(NUMBER, None), given.get("shift_labels")
        if not torch.is_grad_enabled():
            return student(**given)
        if targets is None:
            answer = self._answer(given)
            of_classes = answer if self.classes is None else answer[:, self.classes]
            return {**student(**given), TAUGHT: of_classes}
        say = self._say(given) if self.kept is None else self.kept.say(numbers, targets.device)
        if self.head is not None:
            return self._ask_in_chunks(student, say, given)
        learnt = targets != IGNORED
        outputs = dict(student(**given))
        count, items = learnt.sum(), given.get("num_items_in_batch")
        items = count.clamp(min=1) if items is None else items
        soft = say(outputs["logits"][learnt], slice(None))
        self._count(outputs["loss"] * items, soft, count)
        return outputs | {"loss": self.mix(outputs["loss"], soft / items)}

    def _say(self, given: dict[str, Any]) -> Say:
        answers = self.answers(given)

        def say(logits: Tensor, some: slice) -> Tensor:
            with torch.no_grad():
                others = answers(some)
            return divergence(logits, others, self.temperature)

        return say

    def _ask_in_chunks(self, student: Any, say: Say, given: dict[str, Any]) -> Any:
        assert self.head is not None
        self.head.lesson = partial(self._lesson, say)
        try:
            with self.head_weights():
                return student(**given)
        finally:
            self.head.lesson = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it differentiates on its way forward
    def _lesson(
        self, say: Say, rows: Tensor, weight: Tensor, bias: Any, targets: Tensor, items: Any, chunk: int
    ) -> Tensor:
        """The loss that a `LossHead` returns in place of its own, for `rows` (B x T, hidden size)."""
        learnt = (targets != IGNORED).nonzero()[:, 0]
        total, hard, soft = _InChunks.apply(rows[learnt], weight, bias, targets[learnt], say, self.mix, chunk)
        self._count(hard, soft, len(learnt))
        items = len(learnt) if items is None else items
        return total / (items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1))

    def _count(self, hard: Tensor, soft: Tensor, items: Any) -> None:
        """Add this micro-batch's sums on the device; they are read at the next log, so nothing is synchronized here."""
        parts = [torch.as_tensor(part, device=soft.device).detach().double() for part in (hard, soft, items)]
        self.sums = torch.stack(parts) + (0 if self.sums is None else self.sums)


class _InChunks(torch.autograd.Function):
    """The mixed loss, the hard loss and the divergence as sums over `rows`. Each chunk's gradients are computed in the
    forward pass, so the backward pass needs neither logits nor the teacher's weights, which ZeRO-3 has released."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        say: Say,
        mix: Callable[[Tensor, Tensor], Tensor],
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:3]
        of_rows = list[Tensor]()
        sums = torch.zeros(3, dtype=torch.float32, device=rows.device)
        shared = [
            None if x is None else x.detach().requires_grad_(w) for x, w in zip((weight, bias), wanted[1:], strict=True)
        ]
        gathered = [torch.zeros_like(x, dtype=torch.float32) for x in shared if x is not None and x.requires_grad]
        for part in range(0, len(rows), chunk):
            some = slice(part, part + chunk)
            with torch.enable_grad():
                own = rows[some].detach().requires_grad_(wanted[0])
                logits = nn.functional.linear(own, *shared)
                hard = nn.functional.cross_entropy(logits.float(), targets[some], reduction="sum")
                soft = say(logits, some)
                loss = mix(hard, soft)
            sums += torch.stack([loss, hard, soft]).detach()
            inputs = [x for x in (own, *shared) if x is not None and x.requires_grad]
            found = list(torch.autograd.grad(loss, inputs)) if inputs else []
            if wanted[0]:
                of_rows.append(found.pop(0))
            for whole, more in zip(gathered, found, strict=True):
                whole += more
        kept = [torch.cat([*of_rows, rows.new_zeros(0, rows.shape[1])])] if wanted[0] else []
        like = [x.dtype for x in shared if x is not None and x.requires_grad]
        kept += [whole.to(dtype) for whole, dtype in zip(gathered, like, strict=True)]
        ctx.save_for_backward(*kept)
        total, hard, soft = sums.unbind()
        ctx.mark_non_differentiable(hard, soft)
        return total, hard, soft

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        kept = iter(ctx.saved_tensors)
        return (*((next(kept) * upstream[0] if w else None) for w in ctx.needs_input_grad[:3]), *[None] * 4)


def _gathered(weights: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """In this block, weights that ZeRO-3 has sharded are whole on each rank."""
    if not any(hasattr(weight, "ds_id") for weight in weights):
        return contextlib.nullcontext()
    import deepspeed

    gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(weights))
    return gathered
