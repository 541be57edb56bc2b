"""1-bit Adam (arXiv 2102.02888): AdamW until a step, then its variance stays and ranks exchange momentum, a bit each.

Before the freeze ranks exchange gradients, and the optimizer is torch's AdamW. After it DDP's hook sends nothing, and
`OneBitAdam.step` does what the paper's algorithm 1 does: each rank puts its own gradient into the momentum, the ranks
average the momentum in two compressed stages, and step by it over the frozen variance. So it is the optimizer that
exchanges, not the hook: gradients are clipped and accumulated before, as ever, and the whole model is one message.

Two things are not in the paper: a scale for each 64 elements (bits.py), and the bound of `_longest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from finetune.training.comm_hooks.bits import BLOCK, decode, encode
from finetune.training.comm_hooks.wire import Wire


class Exchange:
    """The mean over ranks of a flat tensor, at a bit an element each way, with error feedback on both ways."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.worker_error = self.server_error = torch.empty(0)
        self.elements = 0

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of float32 values (N), all ranks get the same (N)."""
        if not self.elements:
            self._allocate(values)
        self.wire.count(self.elements)
        # Compress what this rank has, chunk by chunk; each chunk goes to the rank that serves it.
        whole = self.worker_error
        whole[: self.elements] += values
        if tail := self.elements % BLOCK:  # what fills up the last block must not lower its scale
            whole[self.elements : self.elements - tail + BLOCK] = (
                whole[self.elements - tail : self.elements].abs().mean()
            )
        chunks = [encode(chunk) for chunk in whole.chunk(self.wire.world_size)]
        for chunk, encoded in zip(whole.chunk(self.wire.world_size), chunks, strict=True):
            chunk -= decode(encoded)
        whole[self.elements :] = 0.0  # nobody's
        received = self.wire.swap(torch.stack(chunks))
        # Serve: average the chunk, compress it again, and tell all.
        served = self.server_error
        for one in received:
            served += decode(one) / self.wire.world_size
        encoded = encode(served)
        served -= decode(encoded)
        every, future = self.wire.gather(encoded)
        future.wait()
        return torch.cat([decode(one) for one in every])[: self.elements]

    def _allocate(self, values: torch.Tensor) -> None:
        self.elements = values.numel()
        unit = BLOCK * self.wire.world_size
        padded = -(-self.elements // unit) * unit
        if self.worker_error.numel() != padded:  # else restored
            self.worker_error = values.new_zeros(padded)
            self.server_error = values.new_zeros(padded // self.wire.world_size)

    def state(self) -> dict[str, Any]:
        return {"worker_error": self.worker_error, "server_error": self.server_error}

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        self.worker_error, self.server_error = (state[name].to(device) for name in ("worker_error", "server_error"))


class Lengths:
    """How much longer a rank's own gradient is than the mean over ranks: a running mean of the steps before the freeze.

    After it nobody has the mean gradient, and each rank clips its own, which is longer, up to sqrt(N) times where it is
    mostly noise. The hook makes it shorter by this, so that a limit bites as it did, and the optimizer longer again.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ratio: Any = None
        self.own: list[torch.Tensor] = []  # sums of squares, by bucket
        self.mean: list[torch.Tensor] = []

    def measure(self, buffer: torch.Tensor, exchange: Callable[[torch.Tensor], Any]) -> Any:
        """As `exchange`, whose future it gives."""
        self.own.append(buffer.float().square().sum())

        def measured(future: Any) -> torch.Tensor:
            mean: torch.Tensor = future.value()
            self.mean.append(mean.float().square().sum())
            return mean

        return exchange(buffer).then(measured)

    def end_step(self) -> None:
        if self.own:
            ratio = (sum(self.own) / sum(self.mean).clamp(min=1e-30)).sqrt().clamp(1, self.world_size)
            self.ratio = ratio if self.ratio is None else self.ratio.lerp(ratio, 0.1)
        self.own, self.mean = [], []


class OneBitAdam(torch.optim.AdamW):
    """AdamW for `freeze_step` steps. `exchange` takes a flat float32 tensor and gives its mean; without one this rank
    is alone."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        self.freeze_step: int | None = None  # None: not yet known, and nothing freezes
        self.exchange: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.longer: Any = 1.0  # what gradients must be multiplied by, once the Trainer has clipped them (Lengths)
        self.steps_taken = 0
        self._flat: _Flat | None = None
        self.register_state_dict_post_hook(_add_freeze)
        self.register_load_state_dict_post_hook(_go_on)

    @property
    def is_frozen(self) -> bool:
        """True where the next step is one by the frozen variance."""
        return self.freeze_step is not None and self.steps_taken >= self.freeze_step

    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the Trainer gives none, and a second backward pass would be exchanged, too"
        if self.is_frozen:
            with torch.no_grad():
                self._step_by_frozen_variance()
        else:
            super().step()
        self.steps_taken += 1

    def _step_by_frozen_variance(self) -> None:
        if self._flat is None:
            self._flat = _Flat(self, int(self.freeze_step or 0))
        flat = self._flat
        flat.add_gradients(self.longer)
        if self.exchange:
            flat.momentum.copy_(self.exchange(flat.momentum))
        for parameter, group, momentum, denominator in flat.each():
            step = self.state[parameter]["step"]
            step += 1
            bound = _longest(group, flat.freeze_step)
            direction = (
                (momentum / denominator).div_(1 - group["betas"][0] ** (self.steps_taken + 1)).clamp_(-bound, bound)
            )
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(direction.view_as(parameter).to(parameter.dtype), alpha=float(group["lr"]))


class _Flat:
    """Momentum and denominator of all parameters that had a gradient before the freeze (others stay as they are), one
    after the other, in fp32. The momentum in the optimizer's state is a view of it, so that a checkpoint holds it."""

    def __init__(self, optimizer: OneBitAdam, freeze_step: int) -> None:
        every = [(p, group) for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
        pairs = [(p, group) for p, group in every if optimizer.state[p]["exp_avg_sq"].any()]
        self.freeze_step = freeze_step
        self.parameters, self.groups = [p for p, _ in pairs], [group for _, group in pairs]
        self.sizes = [p.numel() for p in self.parameters]
        states = [optimizer.state[p] for p in self.parameters]
        self.momentum = torch.cat([state["exp_avg"].reshape(-1).float() for state in states])
        self.denominator = torch.cat(
            [
                _denominator(state["exp_avg_sq"], group, freeze_step)
                for state, group in zip(states, self.groups, strict=True)
            ]
        )
        for state, part in zip(states, self.momentum.split(self.sizes), strict=True):
            state["exp_avg"] = part.view_as(state["exp_avg"])

    def each(self) -> Iterator[tuple[Any, dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Parameters, their groups, and their parts of momentum and denominator."""
        parts = self.momentum.split(self.sizes), self.denominator.split(self.sizes)
        return zip(self.parameters, self.groups, *parts, strict=True)

    def add_gradients(self, longer: Any) -> None:
        """m = b1 m + (1 - b1) g, with this rank's own gradient, within the bound of `_longest`."""
        for parameter, group, momentum, denominator in self.each():
            beta = group["betas"][0]
            momentum.mul_(beta)
            if parameter.grad is not None:
                bound = denominator * _longest(group, self.freeze_step)
                gradient = parameter.grad.reshape(-1).float() * longer
                momentum.add_(gradient.clamp_(-bound, bound), alpha=1 - beta)


def _denominator(variance: torch.Tensor, group: dict[str, Any], freeze_step: int) -> torch.Tensor:
    """sqrt(v) / sqrt(1 - b2^T) + eps, as AdamW's at the freeze.

    An element that had no gradient until then (the embedding of a word not met) has v = 0, and any momentum over that
    is without bounds: it gets the mean of its tensor.
    """
    flat = variance.reshape(-1).float() / (1 - group["betas"][1] ** freeze_step)
    return torch.where(flat > 0, flat, flat.mean()).sqrt_().add_(group["eps"])


def _longest(group: dict[str, Any], freeze_step: int) -> float:
    """How many times the root of its variance a gradient may be, and so momentum: sqrt((1 - b2^T) / (1 - b2)).

    In Adam neither is more, for the variance holds the gradient's square. A frozen one does not: the embedding of a
    word that was met once, when gradients were small, would be thrown far out each time that it comes.
    """
    beta = group["betas"][1]
    return float(((1 - beta**freeze_step) / (1 - beta)) ** 0.5)


def _add_freeze(optimizer: OneBitAdam, state_dict: dict[str, Any]) -> None:
    """What goes with a frozen variance is saved with it, so that ranks of any number find it."""
    if optimizer.is_frozen:
        for group in state_dict["param_groups"]:
            group |= {"freeze_step": optimizer.freeze_step, "longer": float(optimizer.longer)}


def _go_on(optimizer: OneBitAdam) -> None:
    """After a checkpoint is loaded."""
    steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    optimizer.steps_taken = max(steps, default=0)
    optimizer._flat = None
    for group in optimizer.param_groups:
        if "freeze_step" in group:
            optimizer.freeze_step, optimizer.longer = group.pop("freeze_step"), group.pop("longer")
