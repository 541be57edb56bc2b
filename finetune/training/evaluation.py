"""Evaluation, and the final one of a run, which reuses the last one of training if no weight has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PredictionOutput

from finetune.models.chunked_loss import row_figures
from finetune.training.resuming import kept_random_states

if TYPE_CHECKING:
    from transformers import Trainer as AnyTrainer
else:
    AnyTrainer = object  # classes list the Trainer's class after the mixin


class EvaluatesOnce:
    """Mixin for the trainers of both engines; their `evaluate` calls `keep_evaluation`."""

    args: Any
    state: Any
    control: Any
    evaluated: PredictionOutput | None = None

    def keep_evaluation(self, output: PredictionOutput) -> None:
        """Keep this evaluation if training ends here; otherwise drop it, to free its logits."""
        is_end = self.state.global_step >= self.state.max_steps or self.control.should_training_stop
        self.evaluated = output if is_end else None

    def evaluated_at_end(self) -> PredictionOutput:
        """The evaluation of the final weights over the whole evaluation set; its metrics have been logged. All ranks
        must call it. A pipeline's has no predictions."""
        args, trainer = self.args, cast(Any, self)
        took_best = args.load_best_model_at_end and self.state.best_global_step != self.state.global_step
        is_cast = args.bf16_full_eval or args.fp16_full_eval  # only after training (Trainer.evaluation_loop)
        if self.evaluated is None or took_best or is_cast:
            trainer.evaluate()
        assert self.evaluated is not None
        return self.evaluated


class EvaluatingMixin(EvaluatesOnce, AnyTrainer):
    """A part of FinetuneMixin, whose `__init__` sets the attributes used here."""

    looped: Any = None  # the output of an evaluation loop, until `evaluate` returns
    loaders: Mapping[str, tuple[Any, Any]] = {}  # by the name of an evaluation set: the set, and its loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Like the Trainer's, but one for all evaluations of a set: accelerate keeps every loader that it has prepared,
        with its copy of the set (1.15, accelerator.py, prepare_data_loader)."""
        name = eval_dataset if isinstance(eval_dataset, str) else ""
        rows = self.eval_dataset if eval_dataset is None else self.eval_dataset[name] if name else eval_dataset
        if name not in self.loaders or self.loaders[name][0] is not rows:
            self.loaders = {**self.loaders, name: (rows, super().get_eval_dataloader(eval_dataset))}
        return self.loaders[name][1]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's, but it leaves the random states of training unchanged."""
        with kept_random_states():
            self.looped = super().evaluation_loop(dataloader, *args, **kwargs)
            more = self.more_figures(dataloader.dataset, prefix := kwargs.get("metric_key_prefix", "eval"))
        self.looped.metrics.update({f"{prefix}_{name}": value for name, value in more.items()})
        return self.looped

    def more_figures(self, dataset: Any, prefix: str) -> dict[str, float]:
        """Override it for metrics that need more than the loop's output, such as generated texts. All ranks call it
        after the loop, whose metrics begin with `prefix`."""
        return {}

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Like the Trainer's."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        if self.looped is not None and not args and kwargs.keys() <= {"ignore_keys"}:
            self.keep_evaluation(PredictionOutput(self.looped.predictions, self.looped.label_ids, metrics))
        self.looped = None
        return metrics

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Like the Trainer's. If the metrics need only numbers per row, return only these: otherwise the labels of all
        tokens of a large evaluation set would stay on the device until it ends."""
        self.progress()
        self.data_files.look()
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if self.preprocess_logits_for_metrics is row_figures and logits is not None and labels is not None:
            return loss, row_figures(logits, labels), labels[:, :1]
        return loss, logits, labels

    def computed(
        self, rows: Sequence[int], row: Callable[[int], Any], compute: Callable[[dict[str, Any]], Tensor]
    ) -> Tensor:
        """What `compute` returns for the batches of these rows (rows, ...), in their order, on the CPU. It runs without
        gradients and dropout. Each rank computes its share of every batch, so all ranks must call it."""
        size, world, rank, parts = self.args.eval_batch_size, self.args.world_size, self.args.process_index, []
        with torch.no_grad(), evaluating(self.model_wrapped):
            for begin in range(0, len(rows), size * world):
                self.progress()
                some = rows[begin : begin + size * world]
                own = [some[min(rank * size + i, len(some) - 1)] for i in range(size)]  # pads with the last row
                made = compute(self._prepare_inputs(self.data_collator([row(i) for i in own])))
                parts.append(self.accelerator.gather(made.contiguous())[: len(some)].cpu())
        return torch.cat(parts)

    def predict_in_input_order(self, dataset: Any) -> PredictionOutput:
        """Like `predict`, with results in the order of the rows. If the data set has a column `length`, batches hold
        rows of similar length."""
        if "length" not in getattr(dataset, "column_names", ()):
            return self.predict(dataset, metric_key_prefix="predict")
        order = np.argsort(-np.asarray(dataset["length"]), kind="stable")
        output = self.predict(dataset.select(order), metric_key_prefix="predict")
        back = np.argsort(order)
        first = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        truth = None if output.label_ids is None else output.label_ids[back]
        return PredictionOutput(first[back], truth, output.metrics)


class AtTrainBegin(TrainerCallback):
    """Does this work once the engine is built, before the first step."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.work()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """In this block the model is in evaluation mode, without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
