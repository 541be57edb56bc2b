"""What the closing chapters of a recipe ask of a trainer, whichever engine it has."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from transformers.trainer_utils import PredictionOutput, TrainOutput

from finetune.training.checkpoints.identity import Identity


class Closing(Protocol):
    """FinetuneTrainer, or any class of FinetuneMixin, and PipelineTrainer. Every method must be called on all ranks;
    files are written by rank 0. What is returned is the same on every rank."""

    args: Any
    state: Any
    identity: Identity | None
    train_dataset: Any
    sampler: Any  # the order of training; None of a stream
    global_batch_size: int

    def watched(self) -> AbstractContextManager[Any]:
        """Around a whole run: a rank whose process is killed ends it in words."""

    def train(self, resume_from_checkpoint: str | None = None) -> TrainOutput:
        """Train to the end; the closing figures are its `metrics`."""

    def evaluated_at_end(self) -> PredictionOutput:
        """Over the evaluation set by the final weights; its figures are logged, too."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The final model, where `from_pretrained` looks for it: the run folder unless told."""

    def save_state(self) -> None:
        """`trainer_state.json` in the run folder."""

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """`train_results.json`, `eval_results.json`, ..., and all of them in all_results.json."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Tell the callbacks: a file, the terminal, a tracker."""

    def peak_memory_gib_per_rank(self) -> list[float]:
        """In GiB."""


if TYPE_CHECKING:
    from finetune.training.pipeline.trainer import PipelineTrainer
    from finetune.training.trainer import FinetuneTrainer

    def of_any_engine(trainer: FinetuneTrainer, pipeline: PipelineTrainer) -> tuple[Closing, Closing]:
        return trainer, pipeline  # mypy holds them to it
