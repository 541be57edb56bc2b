"""Catches a step whose loss or gradients are not finite before it changes a weight, explains it, and handles it.

Detection costs next to nothing: the gradient norm is computed anyway, and a non-finite loss makes it non-finite
(`poisoned`). Only after a hit do all ranks run the same batch again, with a hook on every module."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from finetune.data.numbered import NUMBER
from finetune.data.packing import REAL_TOKENS
from finetune.data.shares import WHOLE_POSITIONS
from finetune.errors import RequestError, RunError, first_line
from finetune.run.flags.guards import GuardArguments
from finetune.training.checkpoints.manifest import checkpoints_in, problems
from finetune.training.checkpoints.writing import by_first, every, leads, rank
from finetune.training.guards.finder import Found, FoundLoss
from finetune.training.guards.replay import FOLDER, write_batch, write_report
from finetune.training.resuming import rng_state, set_rng_state

LIMIT_STEPS = 1000  # the window of --nan_limit: one bad batch a week is no reason to end a run of months
MOST_SHOWN = 16  # samples of a micro-batch
NOT_THE_MODELS = (REAL_TOKENS, NUMBER, WHOLE_POSITIONS)  # keys that a trainer removes from a batch


@dataclass(frozen=True)
class Finding:
    """What one rank found when it ran a micro-batch again; `found` is None if all was finite."""

    rank: int
    micro_batch: int
    found: Found | None
    samples: list[int] | None  # None: unknown, because the data is streamed


class Suspect:
    """The guard's interface to a training loop, which puts its micro-batches in `window` before each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.window: list[dict[str, Any]] = []
        self.bad_norm = False

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine; None without DeepSpeed."""
        raise NotImplementedError

    @property
    def engine_leaves_out(self) -> bool:
        """DeepSpeed's own optimizers skip a non-finite update (ZeRO, bf16, fp16: 0.19.8, `overflow`). torch's, used at
        stage 0 in fp32, do not."""
        return self.engine is not None and hasattr(self.engine.optimizer, "overflow")

    @property
    def sharing(self) -> int:
        """The number of ranks that share each text."""
        return 1

    def prepare(self) -> None:
        """Called before the first step, once the engine exists."""
        if self.engine is not None and not self.engine_leaves_out:
            self.engine.optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.saw(torch.nn.utils.get_total_norm(gradients)):
            optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing

    def saw(self, norm: Any) -> bool:
        """Record the gradient norm, which is the same on all ranks. True if the step must not be taken."""
        self.bad_norm = norm is not None and not bool(torch.isfinite(torch.as_tensor(norm)))
        return self.bad_norm

    def hit(self) -> bool:
        """Whether this step's update was skipped because its gradients are not finite. All ranks agree."""
        return bool(self.engine.optimizer.overflow) if self.engine_leaves_out else self.bad_norm

    def losses_are_finite(self) -> bool:
        """Whether the losses of this rank's micro-batches in this step are finite."""
        raise NotImplementedError

    def is_scaled(self) -> bool:
        """Whether fp16 loss scaling is on: it causes overflows that are not errors."""
        return bool(self.engine.fp16_enabled())

    def look(self, backward: bool) -> list[Finding]:
        """Run the step's micro-batches again. Every rank calls it."""
        raise NotImplementedError

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """This rank's micro-batches of the step, as the model receives them."""
        tensors = [{k: v for k, v in batch.items() if isinstance(v, torch.Tensor)} for batch in self.window]
        return [{name: value for name, value in batch.items() if name not in NOT_THE_MODELS} for batch in tensors]

    def forget_loss(self) -> None:
        """Drop this step's loss: the log shows the mean over the steps that were taken."""
        self.trainer.running_loss.forget_step()
        if experts := getattr(self.trainer, "experts", None):
            experts.forget_step()

    def advance_schedule(self) -> None:
        """Advance the learning rate schedule as a normal step would, unless the engine has."""
        raise NotImplementedError

    def finish_saves(self) -> None:
        """Wait until the newest checkpoint is in place. Every rank calls it."""
        self.trainer.saves.beside.finish()

    def can_load(self, folder: Path) -> bool:
        """Whether the engine can load this checkpoint without resharding. May raise RequestError."""
        raise NotImplementedError

    def roll_back(self, folder: Path) -> None:
        """Load weights and optimizer from a checkpoint; schedule, random states and data position stay."""
        raise NotImplementedError

    def finding(self, sampler: Any, number: int, found: Found | None, readers: int, reader: int) -> Finding:
        """The finding for micro-batch `number`, with its rows in the prepared training set: the `readers` take batches
        of `sampler` in turn (accelerate's data_loader.py, BatchSamplerShard; finetune.training.pipeline.batches)."""
        samples = None
        if sampler is not None:
            size, batch = self.trainer.args.train_batch_size, sampler.global_batch_size
            step = self.trainer.state.global_step % (len(sampler) // batch)
            first = step * batch + (number * readers + reader) * size
            samples = list(islice(iter(sampler), first, first + size))
        return Finding(rank(), number, found, samples)


@dataclass
class NanGuard(TrainerCallback):
    """A callback of both trainers. `on_optimizer_step` runs after the update was made or skipped, and before anything
    is logged or saved."""

    arguments: GuardArguments
    suspect: Suspect
    hits: int = 0
    recent: list[int] = field(default_factory=list)  # the steps of the hits that still count
    left_out: int = 0  # steps skipped since the last log
    logged_step: int = 0
    just_hit: bool = False
    back_at: Path | None = None  # the checkpoint of the last rollback; None once a step has been finite
    rng: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logged_step = state.global_step
        self.suspect.prepare()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rng = rng_state()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.suspect.hit():
            self.back_at = None
            return
        losses_are_finite = all(every(self.suspect.losses_are_finite()))
        if self.suspect.is_scaled() and losses_are_finite:
            return  # the loss scale is too high, and the scaler lowers it
        self.hits += 1
        self.left_out += 1
        self.just_hit = True
        step = state.global_step + 1
        after = rng_state()
        findings: list[Finding] = []
        for backward in (False, True):
            if not any(one.found for one in findings):
                set_rng_state(self.rng)
                findings = [one for some in every(self.suspect.look(backward)) for one in some]
        set_rng_state(after)
        place = Path(args.output_dir) / FOLDER / f"step-{step}"
        said = _said(findings, step, losses_are_finite)
        self.recent = [one for one in self.recent if one > step - LIMIT_STEPS] + [step]
        self._deal_with(args, state, said, self._written(place, step, state.epoch, said, findings))

    def _written(self, place: Path, step: int, epoch: float | None, said: str, findings: list[Finding]) -> str:
        """Write the batch and return a phrase that says where. A failing disk must not end a run that can continue."""
        met = ""
        try:
            write_batch(place, self.suspect.batches(), self.rng)
            if leads():
                write_report(place, step, epoch, said, [vars(one) for one in findings], self.suspect.sharing)
        except (OSError, SafetensorError) as error:
            met = first_line(error)
        failed = [f"rank {rank}: {words}" for rank, words in enumerate(every(met)) if words]
        if failed:
            return f"could not be written to {place} ({failed[0]})"
        sharing = self.suspect.sharing
        return f"is in {place}" + f", where each rank's file has 1/{sharing} of each text" * (sharing > 1)

    def window(self, step: int, loss: float) -> dict[str, float]:
        """For the log of `step`: the number of hits so far, and the mean loss of the steps that were taken, or NaN if
        all steps since the last log were skipped. `loss` counts skipped steps as 0."""
        steps, left_out = step - self.logged_step, self.left_out
        self.logged_step, self.left_out = step, 0
        if not self.hits:
            return {}
        taken = steps - left_out
        return {"loss": loss * steps / taken if taken > 0 else math.nan, "nonfinite_steps": self.hits}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.just_hit:  # not earlier: the log must show this step's learning rate
            self.just_hit = False
            self.suspect.advance_schedule()
            if self.back_at is not None and not control.should_training_stop:
                control.should_save = False  # weights that may fail again must not displace good checkpoints

    def _deal_with(self, args: Any, state: Any, said: str, batch: str) -> None:
        policy, limit = self.arguments.on_nan, self.arguments.nan_limit
        kept = f"The weights are those of step {state.global_step}. The batch {batch}."
        if policy == "stop":
            raise self._end(
                f"{said} {kept} docs/faults.md says how to run it alone. To get past it: --resume allow --on_nan skip."
            )
        count = len(self.recent)
        if count > limit:
            raise self._end(
                f"{said} {kept} It is one more than --nan_limit {limit} in {LIMIT_STEPS:,} steps: --on_nan {policy} is "
                "no fix here. If every batch fails, the weights are bad: lower --learning_rate, and resume from an "
                "older checkpoint with --resume PATH."
            )
        what, checkpoint = "the step is skipped", None
        if policy == "rollback":
            self.suspect.finish_saves()
            checkpoint = by_first(lambda: self._newest(Path(args.output_dir)))
            if checkpoint is None:
                back = self.back_at
                older = f" older than {back.name}, after which the next step failed too" if back else ""
                raise RunError(f"{said} {kept} --on_nan rollback finds no checkpoint to go back to{older}.")
        self.suspect.forget_loss()
        if checkpoint is not None:
            self.back_at = checkpoint
            self.suspect.roll_back(checkpoint)
            what = f"weights and optimizer are those of {checkpoint.name} again"
        if state.is_world_process_zero:
            print(
                f"\nwarning: {said} By --on_nan {policy} ({count} of at most {limit}) {what}, and the run goes on with "
                f"the next batch. This one {batch}.",
                file=sys.stderr,
                flush=True,
            )

    def _end(self, words: str) -> RunError:
        """The error that ends the run, once the newest checkpoint is in place or has failed. All ranks call it."""
        try:
            self.suspect.finish_saves()
        except RunError as error:
            words += f" {error}"
        return RunError(words)

    def _newest(self, run_folder: Path) -> Path | None:
        """The newest checkpoint that verifies and is older than the one of the last rollback; None if it cannot be
        loaded as it is, because the run came from another layout and has not saved since."""
        there = checkpoints_in(run_folder)
        if self.back_at in there:
            there = there[there.index(self.back_at) + 1 :]
        newest = next((path for path in there if not problems(path, hashes=True)), None)
        try:
            return newest if newest is not None and self.suspect.can_load(newest) else None
        except RequestError:
            return None


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The same value bit for bit, but a non-finite loss makes every gradient NaN, whatever lies in between. So the one
    gradient norm that all ranks share also reflects every rank's loss."""
    return loss * (1 + (loss - loss).detach())


def _said(findings: list[Finding], step: int, losses_are_finite: bool) -> str:
    found = sorted(
        (one for one in findings if one.found),
        key=lambda one: (isinstance(one.found, FoundLoss), one.micro_batch, one.rank),  # losses last
    )
    if not found:
        what = "the gradients are" if losses_are_finite else "the loss is"
        return (
            f"step {step}: {what} not finite, but running the same batch again shows no module that causes it. Causes "
            "may be code outside any module, the reduction over ranks, or a hardware fault."
        )
    first = found[0]
    assert first.found is not None
    samples = "samples not known (a stream)"
    if first.samples is not None:
        rest = len(first.samples) - MOST_SHOWN
        samples = f"samples {', '.join(map(str, first.samples[:MOST_SHOWN]))}" + f" and {rest} more" * (rest > 0)
    more = len({(one.rank, one.micro_batch) for one in found}) - 1
    others = f" It also happens in {more} more micro-batch(es)." if more else ""
    where = f"rank {first.rank}, micro-batch {first.micro_batch + 1}, {samples}"
    return f"step {step} is not finite: first {first.found.what}; {where}.{others}"
