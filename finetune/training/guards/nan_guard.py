"""A step whose loss or gradients are not finite: noticed before it changes a weight, explained, and then dealt with.

Noticing costs next to nothing, for the norm of the gradients is computed anyway, and a loss that is not finite makes it
so (`poisoned`). Only after a hit is the same batch run again, by all ranks, with a hook on every module."""

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
from finetune.training.checkpoints.writing import every, leads, of_first, rank, together
from finetune.training.guards.finder import Found
from finetune.training.guards.replay import FOLDER, write_batch, write_report
from finetune.training.resuming import rng_state, set_rng_state

LIMIT_STEPS = 1000  # in as many --nan_limit counts: one odd batch a week is no reason to end a run of months
MOST_SHOWN = 16  # samples of a micro-batch
NOT_THE_MODELS = (REAL_TOKENS, NUMBER, WHOLE_POSITIONS)  # what a trainer takes out of a batch


@dataclass(frozen=True)
class Finding:
    """What one rank found when it ran its micro-batches again; `found` is None where all was finite."""

    rank: int
    micro_batch: int
    found: Found | None
    samples: list[int] | None  # None: not known, of a stream


class Suspect:
    """What the guard asks of a training loop, which leaves its micro-batches in `window` as each step begins."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.window: list[dict[str, Any]] = []
        self.loss_before: Any = 0.0  # of the steps since the last log
        self.bad_norm = False

    @property
    def engine(self) -> Any:
        """DeepSpeed's; None without it."""
        raise NotImplementedError

    @property
    def engine_leaves_out(self) -> bool:
        """DeepSpeed's own optimizers leave out what is not finite (ZeRO, bf16, fp16: 0.19.8, `overflow`). One of torch,
        at stage 0 in fp32, does not."""
        return self.engine is not None and hasattr(self.engine.optimizer, "overflow")

    @property
    def sharing(self) -> int:
        """Ranks that share each text."""
        return 1

    def prepare(self) -> None:
        """Before the first step, once the engine is there."""
        if self.engine is not None and not self.engine_leaves_out:
            self.engine.optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.saw(torch.nn.utils.get_total_norm(gradients)):
            optimizer.zero_grad(set_to_none=True)  # without gradients it changes nothing

    def saw(self, norm: Any) -> bool:
        """Tell the gradients' norm, the same on all ranks. True where no step may be taken."""
        self.bad_norm = norm is not None and not bool(torch.isfinite(torch.as_tensor(norm)))
        return self.bad_norm

    def hit(self) -> bool:
        """Whether this step's gradients are not finite, and its update was therefore left out. All ranks agree."""
        return bool(self.engine.optimizer.overflow) if self.engine_leaves_out else self.bad_norm

    def losses_are_finite(self) -> bool:
        """Those of this rank's micro-batches of this step."""
        raise NotImplementedError

    def is_scaled(self) -> bool:
        """True where fp16's loss scale makes overflows that are no faults."""
        return bool(self.engine.fp16_enabled())

    def look(self, backward: bool) -> list[Finding]:
        """Run the step's micro-batches again. Every rank calls it."""
        raise NotImplementedError

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """This rank's micro-batches of the step, as a model takes them."""
        tensors = [{k: v for k, v in batch.items() if isinstance(v, torch.Tensor)} for batch in self.window]
        return [{name: value for name, value in batch.items() if name not in NOT_THE_MODELS} for batch in tensors]

    def forget_loss(self) -> None:
        """What is logged is the mean of the steps that were taken."""
        self.trainer.running_loss.now = self.loss_before

    def advance_schedule(self) -> None:
        """As after a step that was taken, where the engine has not done it."""
        raise NotImplementedError

    def finish_saves(self) -> None:
        """So that the newest checkpoint has its place. Every rank calls it."""

    def can_load(self, folder: Path) -> bool:
        """Whether the engine reads this checkpoint as it stands. May raise RequestError."""
        raise NotImplementedError

    def roll_back(self, folder: Path) -> None:
        """Weights and optimizer from a checkpoint; schedule, random states and data go on from here."""
        raise NotImplementedError

    def finding(self, sampler: Any, number: int, found: Found | None, readers: int, reader: int) -> Finding:
        """Of micro-batch `number`, with its rows of the prepared training set: those of `sampler` are dealt to the
        `readers` in turn (accelerate's data_loader.py, BatchSamplerShard; finetune.training.pipeline.batches)."""
        samples = None
        if sampler is not None:
            size, batch = self.trainer.args.train_batch_size, sampler.global_batch_size
            step = self.trainer.state.global_step % (len(sampler) // batch)
            first = step * batch + (number * readers + reader) * size
            samples = list(islice(iter(sampler), first, first + size))
        return Finding(rank(), number, found, samples)


@dataclass
class NanGuard(TrainerCallback):
    """A callback of both trainers; `on_optimizer_step` comes after the update was made or left out, and before
    anything is logged or saved."""

    arguments: GuardArguments
    suspect: Suspect
    hits: int = 0
    recent: list[int] = field(default_factory=list)  # the steps of the hits that still count
    left_out: int = 0  # since the last log
    logged_step: int = 0
    just_hit: bool = False
    back_at: Path | None = None  # the checkpoint of the last rollback, while no step has been finite since
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
            return  # the scale is too high, and goes down by itself
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
        """Where the batch is, in words. A disk that takes it not is no reason to end a run that would go on."""
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
        """For the log of `step`: how many steps were not taken so far, and the mean loss of those that were; NaN where
        all since the last log were left out. `loss` counts these as 0."""
        steps, left_out = step - self.logged_step, self.left_out
        self.logged_step, self.left_out = step, 0
        if not self.hits:
            return {}
        taken = steps - left_out
        return {"loss": loss * steps / taken if taken > 0 else math.nan, "nonfinite_steps": self.hits}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.just_hit:  # not before: what is logged is the rate of this step
            self.just_hit = False
            self.suspect.advance_schedule()
            if self.back_at is not None and not control.should_training_stop:
                control.should_save = False  # weights that may fail again must not push the good ones out

    def _deal_with(self, args: Any, state: Any, said: str, batch: str) -> None:
        policy, limit = self.arguments.on_nan, self.arguments.nan_limit
        kept = f"The weights are those of step {state.global_step}. The batch {batch}."
        if policy == "stop":
            raise self._end(
                f"{said} {kept} docs/faults.md says how to run it alone; --resume auto with --on_nan skip goes past it."
            )
        count = len(self.recent)
        if count > limit:
            raise self._end(
                f"{said} {kept} It is one more than --nan_limit {limit} in {LIMIT_STEPS:,} steps: --on_nan {policy} is "
                "no fix here. Where every batch fails, it is the weights: lower --learning_rate, and go on from an "
                "older checkpoint by --resume PATH."
            )
        what, checkpoint = "the step is left out", None
        if policy == "rollback":
            self.suspect.finish_saves()
            checkpoint = of_first(together(lambda: self._newest(Path(args.output_dir)) if leads() else None))
            if checkpoint is None:
                back = self.back_at
                older = f" older than {back.name}, after which the next step failed, too" if back else ""
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
        """What ends the run, once the newest checkpoint has its place, or what kept it from that. All ranks call it."""
        try:
            self.suspect.finish_saves()
        except RunError as error:
            words += f" {error}"
        return RunError(words)

    def _newest(self, run_folder: Path) -> Path | None:
        """The newest checkpoint that verifies, of those older than the one that was no help; none where the run has
        come from another layout, and saved none yet."""
        there = checkpoints_in(run_folder)
        if self.back_at in there:
            there = there[there.index(self.back_at) + 1 :]
        newest = next((path for path in there if not problems(path, hashes=True)), None)
        try:
            return newest if newest is not None and self.suspect.can_load(newest) else None
        except RequestError:
            return None


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The same number to the bit; but of one that is not finite every gradient becomes NaN, whatever is in between. So
    one flag, the norm of the gradients that all ranks share, tells of every rank's loss as well."""
    return loss * (1 + (loss - loss).detach())


def _said(findings: list[Finding], step: int, losses_are_finite: bool) -> str:
    found = sorted((one for one in findings if one.found), key=lambda one: (one.micro_batch, one.rank))
    if not found:
        what = "the gradients are" if losses_are_finite else "the loss is"
        return (
            f"step {step}: {what} not finite, but the same batch, run again, shows no module of which that comes: a "
            "part without modules, the reduction over ranks, or a fault of the hardware."
        )
    first = found[0]
    assert first.found is not None
    samples = "samples not known (a stream)"
    if first.samples is not None:
        rest = len(first.samples) - MOST_SHOWN
        samples = f"samples {', '.join(map(str, first.samples[:MOST_SHOWN]))}" + f" and {rest} more" * (rest > 0)
    more = len({(one.rank, one.micro_batch) for one in found}) - 1
    others = f" So have {more} more micro-batch(es)." if more else ""
    where = f"rank {first.rank}, micro-batch {first.micro_batch + 1}, {samples}"
    return f"step {step} is not finite: first {first.found.what}; {where}.{others}"
