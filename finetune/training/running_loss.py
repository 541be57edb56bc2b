"""The losses of a run since its last log, and of all its steps; of each file of a mixture, too, from the forward pass
that trains: nats and learnt tokens are summed by file on the device. Checkpoints keep all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

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


class RunningLoss(TrainerCallback, ExportableState):
    """Keeps the losses since the last log, and those logged before, in each checkpoint's trainer_state.json.

    The Trainer loses both (transformers 5.23, Trainer._inner_training_loop sets them to 0): the first loss that a
    resumed run logs would omit the steps before the interruption, and `train_loss` would omit all earlier steps. The
    Trainer's sums are private, so they are repeated here, bit for bit as it adds them (Trainer._run_epoch).
    """

    def __init__(self, experts: Any = None) -> None:
        """`experts`: an Experts or a StageExperts, of a mixture of experts."""
        self.experts = experts
        self.sums: list[float] = []  # each rank's sum since the last log, as of the last checkpoint
        self.logged_step = -1  # the step of the last log; -1 if nothing was restored
        self.total = 0.0  # the sum up to that step
        self.first_step = 0  # the step after which counting began
        self.now = self.before = torch.zeros(())  # this rank's sum since the last log; and at the start of the step
        self.sources: SourceLosses | None = None  # of a mixture
        self.kept_of_sources: dict[str, list[float]] = {}  # what `sources` noted for the last checkpoint
        self.of_sources: dict[str, dict[str, float]] = {}  # of the whole run, once it has ended
        self.kept_of_experts: dict[str, Any] = {}  # what `experts` noted for the last checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """By now the Trainer knows its first step, and a checkpoint's values have been restored."""
        step, kept = state.global_step, 0.0
        goes_on = bool(step) and 0 <= self.logged_step <= step
        if goes_on:
            kept, self.first_step = self.of_rank(args.process_index, args.world_size), 0
        else:
            self.total, self.first_step, self.logged_step = 0.0, step, step
        # With a router loss, some losses are in fp64, and so is their sum.
        dtype = torch.float32 if float(torch.tensor(kept, dtype=torch.float32)) == kept else torch.float64
        self.now = self.before = torch.tensor(kept, dtype=dtype, device=args.device)
        if self.experts and goes_on and self.kept_of_experts:
            self.experts.restore(self.kept_of_experts, args.process_index, args.world_size, args.device)
        if self.sources:
            self.sources.begin(args.device, self.kept_of_sources if goes_on else {}, not args.process_index)

    def begin_step(self) -> None:
        self.before = self.now
        if self.sources:
            self.sources.before = self.sources.now

    def forget_step(self) -> None:
        """Drop what was added since `begin_step`."""
        self.now = self.before
        if self.sources:
            self.sources.now = self.sources.before

    def add(self, loss: torch.Tensor, step: int, filters: bool) -> None:
        """Add a micro-batch's loss; with `filters`, one that is not finite is replaced by the mean of those before."""
        if filters:
            loss = torch.where(torch.isfinite(loss), loss, self.now / (1 + step - self.logged_step))
        self.now = self.now + loss
        if self.sources:
            self.sources.add(filters)

    def window(self, step: int, gather: Any) -> float:
        """The mean loss of the steps since the last log, over all ranks. All ranks must call it."""
        losses = float(self._of_ranks(gather).mean())
        mean = losses / max(step - self.logged_step, 1)
        self.total, self.now, self.logged_step = self.total + losses, torch.zeros_like(self.now), step
        return mean

    def window_of_sources(self, gather: Any) -> dict[str, float]:
        """The same for each source of a mixture. All ranks must call it."""
        return self.sources.window(gather) if self.sources else {}

    def mean(self, step: int, gather: Any) -> float:
        """The mean loss of all steps, including those of earlier launches; also sets `of_sources`. All ranks must call
        it."""
        self.of_sources = self.sources.means(gather) if self.sources else {}
        return (self.total + float(self._of_ranks(gather).mean())) / max(step - self.first_step, 1)

    def note(self, gather: Any) -> None:
        """Record the sums for a checkpoint. All ranks must call it."""
        self.sums = self._of_ranks(gather).tolist()
        self.kept_of_sources = self.sources.noted(gather) if self.sources else {}
        self.kept_of_experts = self.experts.noted(gather, self.now.device) if self.experts else {}

    def _of_ranks(self, gather: Any) -> torch.Tensor:
        found: torch.Tensor = gather(self.now.reshape(1))
        return found

    def state(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"sums": self.sums, "logged_step": self.logged_step, "total": self.total}
        kept |= {"kept_of_sources": self.kept_of_sources, "kept_of_experts": self.kept_of_experts}
        return {"args": {}, "attributes": kept}

    def of_rank(self, rank: int, world_size: int) -> float:
        """This rank's sum; if the world size has changed, the mean over ranks, which gives the same logged loss."""
        if len(self.sums) == world_size:
            return self.sums[rank]
        return sum(self.sums) / max(len(self.sums), 1)
