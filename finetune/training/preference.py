"""Training on preferences: the trainer, and the reference model that the policy is compared with.

The reference is the model before its first step. With an adapter, it is the model without the adapter. Otherwise its
log-probabilities are computed once, by all ranks, and cached; --reference online keeps a second model instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import concatenate_datasets
from torch import Tensor

from finetune.data.cache import cache_home, kept_in
from finetune.data.preference_batches import CHOSEN, REJECTED, collate_shared
from finetune.data.preferences import PreferenceData
from finetune.errors import RequestError
from finetune.models.chunked_loss import LossHead, token_figures
from finetune.models.probes import shared_mask
from finetune.run.recipes.preference import BETAS, PreferenceArguments
from finetune.run.reference import OF_REFERENCE
from finetune.training.checkpoints.writing import leads, of_first, together
from finetune.training.evaluation import AtTrainBegin, evaluating
from finetune.training.metrics import first_output
from finetune.training.preference_losses import LOSSES, Pairs, Settings, kto, squared_log_ratio
from finetune.training.preference_model import MISSING, PIECE_ROWS, Reference, answers_of, read_pieces
from finetune.training.run_folder import write_whole
from finetune.training.samples import Answers
from finetune.training.start import Session
from finetune.training.trainer import FinetuneTrainer

# An evaluation's numbers for each row. A row of KTO has one answer, and NaN in the other answer's columns. The
# divergence is `squared_log_ratio`, or for KTO the log ratio that its baseline averages.
COLUMNS = ("loss", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", "divergence")


def settings_of(session: Session) -> Settings:
    """The settings of the loss from the flags."""
    asked = session[PreferenceArguments]
    beta = BETAS[asked.loss] if asked.beta is None else asked.beta
    return Settings(**{name: getattr(asked, name) for name in Settings.__annotations__} | {"beta": beta})


class PreferenceTrainer(FinetuneTrainer):
    """Call `judge_by` before training or evaluating."""

    settings: Settings
    reference: Reference
    margins: Tensor
    baseline: Tensor  # KTO's, for the current step
    answers: Answers
    seen: list[Tensor]  # the columns of training rows since the last log

    def judge_by(self, session: Session, reference: Reference, data: PreferenceData) -> None:
        """Set the loss and the reference."""
        self.settings, self.reference, self.margins, self.seen = settings_of(session), reference, data.margins, []
        self.by_token = any(isinstance(module, LossHead) for module in self.model.modules())
        if session[PreferenceArguments].share_prompt:
            self.data_collator = partial(collate_shared, data.pad)
        if reference.form == "cached":
            self.add_callback(AtTrainBegin(self.precompute))
        self.answers = answers_of(session, self.model.config, data)
        self.add_callback(self.answers)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        def judged(**given: Any) -> dict[str, Tensor]:
            columns = self.judge(model, given)
            if torch.is_grad_enabled():
                self.seen.append(columns.detach())
            return {"logits": columns}

        return super().compute_loss(judged, inputs, return_outputs, num_items_in_batch)

    def judge(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The COLUMNS (B, 6) of B rows."""
        count = len(inputs["desirable"])
        if self.settings.loss == "kto":
            return self._judge_single(model, inputs)
        if self.settings.loss == "reward":
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].float()
            logps, tokens = scores, torch.ones_like(scores)
        else:
            logps, tokens = self.log_probabilities(model, inputs)
        of_reference = self._of_reference(model, inputs, logps)
        sides: Any = [side for some in (logps, tokens, of_reference) for side in some.split(count)]
        margins = self.margins[inputs["places"][:count].cpu() // 2]
        pairs = Pairs(*[*sides, margins.to(logps.device)])
        losses, chosen, rejected = LOSSES[self.settings.loss](pairs, self.settings)
        return torch.stack([losses, chosen, rejected, *sides[:2], squared_log_ratio(pairs)], dim=1)

    def _judge_single(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """KTO: in training, only the answers, with the step's baseline; in evaluation, with the batch's baseline, for
        which the metrics correct."""
        count, learns = len(inputs["desirable"]), torch.is_grad_enabled()
        some = first_half(inputs, count) if learns else inputs
        logps, _ = self.log_probabilities(model, some)
        ratios = logps - self._of_reference(model, some, logps)
        others = self.baseline.expand(count) if learns else ratios[count:]
        baseline = others.mean().clamp(min=0)
        good = inputs["desirable"]
        losses, rewards = kto(ratios[:count], good, baseline, self.settings)
        parts = [(value, where) for value in (rewards, logps[:count]) for where in (good, ~good)]
        apart = [torch.where(where, value, torch.nan) for value, where in parts]
        return torch.stack([losses, *apart, others], dim=1)

    def log_probabilities(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The sum of log-probabilities of each text's learnt tokens, and their number, (texts,) each, in fp32. Logits
        of all tokens are made only if the model has no chunked loss."""
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        targets, segments = inputs["targets"], inputs.get("segments")
        if segments is not None:
            given |= {"attention_mask": shared_mask(segments), "position_ids": inputs["position_ids"]}
        if self.by_token:
            figures = model(**given, labels=targets, shift_labels=targets).logits
        else:
            logits = model(**given).logits
            figures = token_figures(logits.flatten(0, 1), targets.flatten()).reshape(*targets.shape, 3)
        if segments is not None:
            figures = torch.cat([figures * (segments == side).unsqueeze(-1) for side in (CHOSEN, REJECTED)])
        sums = figures.float().sum(1)
        return -sums[:, 0], sums[:, 2].clamp(min=1)

    def _of_reference(self, model: Any, inputs: dict[str, Any], like: Tensor) -> Tensor:
        """The reference's log-probabilities of the same texts, without gradients."""
        form = self.reference.form
        if form == "none":
            return torch.zeros_like(like)
        if self.reference.values is not None:
            return self.reference.values.reshape(-1)[inputs["places"].cpu()].to(like.device)
        asked = self.reference.model if form == "online" else model
        with torch.no_grad(), self._as_reference(), evaluating(asked):
            return self.log_probabilities(asked, inputs)[0]

    def _as_reference(self) -> Any:
        """In this block the model has no adapter, if the reference is the base model."""
        model = self.accelerator.unwrap_model(self.model)
        return model.disable_adapter() if self.reference.is_base else contextlib.nullcontext()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Like the Trainer's; also computes KTO's baseline over all ranks and micro-batches of the step."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.settings.loss == "kto" and samples:
            total = torch.zeros((), device=self.args.device)
            with torch.no_grad(), evaluating(self.model_wrapped):
                for sample in samples:
                    others = second_half(self._prepare_inputs(sample), len(sample["desirable"]))
                    logps, _ = self.log_probabilities(self.model_wrapped, others)
                    total += (logps - self._of_reference(self.model_wrapped, others, logps)).sum()
            self.baseline = (self.accelerator.reduce(total, "sum") / items).clamp(min=0)
        return samples, items

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the metrics of all ranks' training rows since the last log."""
        if "loss" in logs and self.seen:
            rows = torch.cat(self.seen)
            sums = torch.stack([rows.nansum(0), (~rows.isnan()).sum(0)])
            right = torch.stack([_in_order(rows[:, 1] - rows[:, 2]).sum(), rows.new_tensor(len(rows))])
            sums, right = self._sum_over_ranks(sums), self._sum_over_ranks(right)
            means = dict(zip(COLUMNS, (sums[0] / sums[1]).tolist(), strict=True))
            accuracy = None if self.settings.loss == "kto" else float(right[0] / right[1])
            named = _named(means, self.settings, accuracy)
            logs.update({name: value for name, value in named.items() if not math.isnan(value)})  # NaN: no such row
            self.seen = []
        super().log(logs, start_time)

    def precompute(self) -> None:
        """Get the reference's log-probabilities of all rows, from the cache or from the model before its first step.
        All ranks must call it. Raises RequestError if a resumed run cannot find them."""
        splits = [split for split in (self.train_dataset, self.eval_dataset) if split is not None]
        table, folder = concatenate_datasets(splits), cache_home() / "reference" / self.reference.key
        kept = Path(self.args.output_dir) / MISSING
        begins = range(0, len(table), PIECE_ROWS)
        found = of_first(read_pieces(folder, kept, self.reference.key, begins) if leads() else {})
        if self.state.global_step > 0 and not self.reference.is_base and len(found) < len(begins):
            raise RequestError(
                f"--resume: the reference's log-probabilities are neither in {kept} nor in {folder} ($FINETUNE_CACHE), "
                "and the model has moved on since. Start the run again; without an adapter, "
                "--reference online can continue, too."
            )
        for begin in begins:
            if begin not in found:
                found[begin] = piece = self._piece(table, range(begin, min(begin + PIECE_ROWS, len(table))))
                together(partial(self._keep, folder / f"{begin}.npy", piece))
        values = np.concatenate([found[begin] for begin in begins])
        self.reference.values = torch.from_numpy(values)
        if leads():
            write_whole(kept, partial(np.savez, key=np.array(self.reference.key), values=values))

    def _keep(self, path: Path, piece: npt.NDArray[Any]) -> None:
        """Raises RequestError if the cache is not writable."""
        with kept_in(path.parent):
            if leads():
                write_whole(path, partial(np.save, arr=piece))

    def _piece(self, table: Any, rows: range) -> npt.NDArray[Any]:
        """The reference's log-probabilities (rows, 2)."""

        def compute(inputs: dict[str, Any]) -> Tensor:
            return self.log_probabilities(self.model_wrapped, inputs)[0].reshape(2, -1).T

        with self._as_reference():
            found: npt.NDArray[Any] = self.computed(rows, table.__getitem__, compute).numpy()
        return found


def first_half(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    return {name: value[:count] for name, value in inputs.items()}


def second_half(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    return {name: value[count:] if len(value) > count else value for name, value in inputs.items()}


def _in_order(margins: Any) -> Any:
    """1 where the chosen answer has the greater reward, 1/2 where both are equal."""
    return (margins > 0) + 0.5 * (margins == 0)


def _named(means: dict[str, float], settings: Settings, accuracy: float | None) -> dict[str, float]:
    """Metrics by name, without the loss. A reward model has no log-probabilities."""
    own = {name: means[name] for name in (COLUMNS[1:3] if settings.loss == "reward" else COLUMNS[1:5])}
    own["reward_margin"] = own["reward_chosen"] - own["reward_rejected"]
    own |= {"kl": max(means["divergence"], 0.0)} if settings.loss in OF_REFERENCE else {}
    return own if accuracy is None else {"preference_accuracy": accuracy, **own}


def preference_metrics(session: Session) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` over the COLUMNS (N, 6). KTO's answers are not paired, so its accuracy is over all pairs of a
    desirable and an undesirable answer."""
    settings = settings_of(session)

    def metrics(evaluated: Any) -> dict[str, float]:
        rows = first_output(evaluated.predictions)
        loss = float(rows[:, 0].mean())
        if settings.loss == "kto":
            good = ~np.isnan(rows[:, 1])
            ratios = torch.from_numpy(np.where(good, rows[:, 1], rows[:, 2]) / settings.beta)
            divergence = torch.tensor(max(float(rows[:, 5].mean()), 0.0))
            loss = float(kto(ratios, torch.from_numpy(good), divergence, settings)[0].mean())
            better, worse = rows[good, 1], np.sort(rows[~good, 2])
            below = [np.searchsorted(worse, better, side) for side in ("left", "right")]
            accuracy = float(np.mean(below) / len(worse)) if len(better) and len(worse) else math.nan
        else:
            accuracy = float(_in_order(rows[:, 1] - rows[:, 2]).mean())
        counts = (~np.isnan(rows)).sum(axis=0)
        of_columns = np.nansum(rows, axis=0) / np.where(counts, counts, np.nan)  # NaN: no answer of this kind
        means = dict(zip(COLUMNS, of_columns.tolist(), strict=True))
        return {"loss": loss, **_named(means, settings, accuracy)}

    return metrics
