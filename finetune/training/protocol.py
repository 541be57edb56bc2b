"""The interface that `finish` and its helpers need from a trainer of either engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from transformers.trainer_utils import PredictionOutput, TrainOutput

from finetune.training.checkpoints.identity import Identity
from finetune.training.running_loss import RunningLoss


class Closing(Protocol):
    """Implemented by FinetuneTrainer, by any class with FinetuneMixin, and by PipelineTrainer. Call every method on all
    ranks; rank 0 writes files. Results are the same on every rank."""

    args: Any
    state: Any
    identity: Identity | None
    train_dataset: Any
    sampler: Any  # the order of training samples; None for a stream
    global_batch_size: int
    running_loss: RunningLoss

    def watched(self) -> AbstractContextManager[Any]:
        """Around a whole run: if a rank's process is killed, the run ends with a message."""

    def train(self, resume_from_checkpoint: str | None = None) -> TrainOutput:
        """Train to the end; the result's `metrics` are those of the whole training."""

    def evaluated_at_end(self) -> PredictionOutput:
        """Evaluate the final weights on the evaluation set; the metrics are also logged."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the final model where `from_pretrained` looks for it: in the run folder by default."""

    def save_state(self) -> None:
        """Write `trainer_state.json` in the run folder."""

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write `train_results.json`, `eval_results.json`, ..., and add to all_results.json."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Pass logs to the callbacks: metrics file, terminal, trackers."""

    def peak_memory_gib_per_rank(self) -> list[float]:
        """The peak memory of each rank, in GiB."""


if TYPE_CHECKING:
    from finetune.training.pipeline.trainer import PipelineTrainer
    from finetune.training.trainer import FinetuneTrainer

    def of_any_engine(trainer: FinetuneTrainer, pipeline: PipelineTrainer) -> tuple[Closing, Closing]:
        return trainer, pipeline  # mypy checks that both fit the protocol
