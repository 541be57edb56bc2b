"""How an evaluation goes, and the one that a run ends with: the training's last, where no weight has changed since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from transformers.trainer_utils import PredictionOutput

from finetune.models.chunked_loss import row_figures
from finetune.training.resuming import kept_random_states

if TYPE_CHECKING:
    from transformers import Trainer as AnyTrainer
else:
    AnyTrainer = object  # the Trainer's class is named beside the mixin


class EvaluatesOnce:
    """For the trainer of either engine, whose `evaluate` calls `keep_evaluation`."""

    args: Any
    state: Any
    control: Any
    evaluated: PredictionOutput | None = None

    def keep_evaluation(self, output: PredictionOutput) -> None:
        """For the end, if this is it; else its logits would fill the memory meanwhile."""
        is_end = self.state.global_step >= self.state.max_steps or self.control.should_training_stop
        self.evaluated = output if is_end else None

    def evaluated_at_end(self) -> PredictionOutput:
        """Figures over the whole evaluation set by the final weights, which have been logged. All ranks must call it.
        A pipeline's engine gives no predictions."""
        args, trainer = self.args, cast(Any, self)
        took_best = args.load_best_model_at_end and self.state.best_global_step != self.state.global_step
        is_cast = args.bf16_full_eval or args.fp16_full_eval  # once the training is over (Trainer.evaluation_loop)
        if self.evaluated is None or took_best or is_cast:
            trainer.evaluate()
        assert self.evaluated is not None
        return self.evaluated


class EvaluatingMixin(EvaluatesOnce, AnyTrainer):
    """A part of FinetuneMixin, whose `__init__` makes what is used here."""

    looped: Any = None  # what an evaluation gave, until its figures are known

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; what is learnt after it does not depend on it."""
        with kept_random_states():
            self.looped = super().evaluation_loop(dataloader, *args, **kwargs)
            more = self.more_figures(dataloader.dataset, prefix := kwargs.get("metric_key_prefix", "eval"))
        self.looped.metrics.update({f"{prefix}_{name}": value for name, value in more.items()})
        return self.looped

    def more_figures(self, dataset: Any, prefix: str) -> dict[str, float]:
        """For a task that judges more than what the loop gives, such as texts that the model writes of the data set.
        All ranks call it, once the loop has its figures, which begin with `prefix`."""
        return {}

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        if self.looped is not None and not args and kwargs.keys() <= {"ignore_keys"}:
            self.keep_evaluation(PredictionOutput(self.looped.predictions, self.looped.label_ids, metrics))
        self.looped = None
        return metrics

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """As the Trainer's; where the figures of each row are asked for, these alone: labels of all tokens of a large
        evaluation set would be kept on the device to its end."""
        self.progress()
        self.data_files.look()
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if self.preprocess_logits_for_metrics is row_figures and logits is not None and labels is not None:
            return loss, row_figures(logits, labels), labels[:, :1]
        return loss, logits, labels

    def predict_in_input_order(self, dataset: Any, metric_key_prefix: str = "predict") -> PredictionOutput:
        """As `predict`, with rows out in the order in which they came in; where the data set has a column `length`,
        with batches of like length inside."""
        if "length" not in getattr(dataset, "column_names", ()):
            return self.predict(dataset, metric_key_prefix=metric_key_prefix)
        order = np.argsort(-np.asarray(dataset["length"]), kind="stable")
        output = self.predict(dataset.select(order), metric_key_prefix=metric_key_prefix)
        back = np.argsort(order)
        first = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        truth = None if output.label_ids is None else output.label_ids[back]
        return PredictionOutput(first[back], truth, output.metrics)
