"""The training loss of each file of a mixture, from the forward pass that trains: nats and learnt tokens are summed by
file on the device, and read when the run logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.numbered import NUMBER
from finetune.data.packing import IGNORED
from finetune.models.chunked_loss import LossHead
from finetune.run.mixture import COUNT_OF_FILE, MOST_LOGGED, OF_FILE

SLICE_TOKENS = 256  # rows of logits whose loss is computed at a time: little memory beside the model's own


class SourceLosses:
    """`names` of the sources; `ends` (k,) of their blocks in the data set that joins them (finetune.data.mixture);
    `head`, if the loss is computed in chunks. Every sum is (k, 2): nats, and learnt tokens."""

    def __init__(self, names: Sequence[str], ends: Sequence[int], head: LossHead | None = None) -> None:
        self.names, self.ends, self.head = tuple(names), torch.as_tensor(ends), head
        if head is not None:
            head.keeps_losses = True
        self.found: Tensor | None = None  # in the current micro-batch
        self.now = self.before = torch.zeros(0)  # on this rank since the last log; and at the start of the step
        self.total: Any = 0.0  # on all ranks up to the last log

    def beside(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """A stand-in for the model: returns its outputs and, in training, keeps what each source adds to the loss."""
        return partial(self._ask, model)

    def _ask(self, model: Callable[..., Any], **given: Any) -> Any:
        numbers, targets = given.pop(NUMBER, None), given.get("shift_labels")
        outputs = model(**given)
        if numbers is None or targets is None or not torch.is_grad_enabled():
            return outputs
        if self.head is None:
            losses = token_losses(outputs["logits"], targets)
        else:
            assert self.head.losses is not None, "a head in training keeps its losses"
            losses, self.head.losses = self.head.losses.reshape(targets.shape), None
        self.found = self._sums(losses, targets, numbers)
        return outputs

    def _sums(self, losses: Tensor, targets: Tensor, numbers: Tensor) -> Tensor:
        """From losses and targets (B, T), and the numbers of the blocks (B,). Does not synchronize the device."""
        if self.ends.device != numbers.device:
            self.ends = self.ends.to(numbers.device)
        source = torch.bucketize(numbers, self.ends, right=True)
        rows = torch.stack([losses.double().sum(1), (targets != IGNORED).sum(1).double()], dim=1)
        is_of = source == torch.arange(len(self.ends), device=source.device)[:, None]  # (k, B)
        return torch.where(is_of[:, :, None], rows, 0.0).sum(1)  # a product would spread NaN to other sources

    def begin(self, device: Any, kept: Mapping[str, Sequence[float]], is_first_rank: bool) -> None:
        """At the start of a run; `kept` is what `noted` returned for the checkpoint it continues from, if any."""
        self.now = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        self.total, self.found = 0.0, None
        if tuple(kept) == self.names:
            since, self.total = torch.tensor(list(kept.values()), dtype=torch.float64).split(2, dim=1)
            self.now = since.to(device) if is_first_rank else self.now
        self.before = self.now

    def add(self, filters: bool) -> None:
        """Add the micro-batch; with `filters`, not what is not finite."""
        if self.found is not None:
            found = torch.where(torch.isfinite(self.found[:, :1]), self.found, 0.0) if filters else self.found
            self.now, self.found = self.now + found, None

    def window(self, gather: Any) -> dict[str, float]:
        """The mean loss of each source over its tokens learnt since the last log, over all ranks, and their number;
        without sources that had none. All ranks must call it."""
        sums = self._of_ranks(gather)
        self.total, self.now = self.total + sums, torch.zeros_like(self.now)
        found: dict[str, float] = {}
        for name, (nats, tokens) in zip(self.names, sums.tolist(), strict=True):
            found |= {f"{OF_FILE}{name}": nats / tokens, f"{COUNT_OF_FILE}{name}": int(tokens)} if tokens else {}
        return found if len(self.names) <= MOST_LOGGED else {}

    def means(self, gather: Any) -> dict[str, dict[str, float]]:
        """By source: the mean loss over all its tokens learnt so far, and their number. All ranks must call it."""
        sums = zip(self.names, (self.total + self._of_ranks(gather)).tolist(), strict=True)
        return {name: {"loss": nats / tokens, "learnt_tokens": int(tokens)} for name, (nats, tokens) in sums if tokens}

    def noted(self, gather: Any) -> dict[str, list[float]]:
        """For a checkpoint: by source, the sums since the last log, and those before it. All ranks must call it."""
        since = self._of_ranks(gather)
        sums = torch.cat([since, self.total + torch.zeros_like(since)], dim=1)
        return dict(zip(self.names, sums.tolist(), strict=True))

    def _of_ranks(self, gather: Any) -> Tensor:
        found: Tensor = gather(self.now).cpu().reshape(-1, len(self.names), 2).sum(0)
        return found


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token in nats (B, T), 0 where there is no target, from logits (B, T, V) and targets (B, T);
    without gradients."""
    pairs = zip(logits.detach().flatten(0, 1).split(SLICE_TOKENS), targets.flatten().split(SLICE_TOKENS), strict=True)
    losses = [
        nn.functional.cross_entropy(some.float(), wanted, reduction="none", ignore_index=IGNORED)
        for some, wanted in pairs
    ]
    return torch.cat(losses).reshape(targets.shape)
