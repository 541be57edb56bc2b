"""Saving and resuming a pipeline's training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from finetune.errors import RequestError
from finetune.run.files import STATE_FILE
from finetune.training.checkpoints.final import best_to_load
from finetune.training.checkpoints.writing import read_together
from finetune.training.pipeline.checkpoint import read_record
from finetune.training.reshard.portable import Portable
from finetune.training.reshard.resuming import read_for_pipeline
from finetune.training.resuming import restore_callbacks


def alike(tensor: torch.Tensor) -> torch.Tensor:
    """A gather function for a value that is already the same on all ranks."""
    return tensor


def save_checkpoint(trainer: Any) -> None:
    """Save a PipelineTrainer's checkpoint atomically, and delete those beyond --save_total_limit."""
    state, saves = trainer.state, trainer.saves
    trainer.running_loss.note(alike)
    kept = [callback for callback in trainer.handler.callbacks if isinstance(callback, ExportableState)]
    state.stateful_callbacks = {type(callback).__name__: callback.state() for callback in kept}
    batch = trainer.global_batch_size
    saves.save(lambda folder: trainer.checkpoints.write(folder, batch, saves.beside.writer_of(folder)))


def resume(trainer: Any, folder: Path) -> TrainerState:
    """Resume from a checkpoint of any layout. Raises RequestError if the global batch size differs."""
    portable = read_for_pipeline(folder, trainer)
    state = read_together(folder, lambda: _load(trainer, folder, portable))
    if trainer.launch.speaks:
        trainer.saves.keeper.go_on_from(folder, state.global_step)
    return state


def _load(trainer: Any, folder: Path, portable: Portable | None) -> TrainerState:
    if portable is None:
        record = read_record(folder)
        batch = record["global_batch_size"]
        if batch != trainer.global_batch_size:
            raise RequestError(
                f"--resume: {folder} was trained with a global batch of {batch}, but this run has "
                f"{trainer.args.train_batch_size} x {trainer.micro_batches} x {trainer.pipelines} = "
                f"{trainer.global_batch_size} (micro-batch x accumulation x pipelines). Change "
                "--gradient_accumulation_steps or --per_device_train_batch_size so that they agree."
            )
        trainer.checkpoints.load(folder, record)
    else:
        trainer.checkpoints.load_portable(folder, portable)
    state = TrainerState.load_from_json(str(folder / STATE_FILE))
    restore_callbacks(trainer.handler.callbacks, state, trainer.args.restore_callback_states_from_checkpoint)
    sums = trainer.running_loss.sums  # another engine's ranks had losses of their own
    trainer.running_loss.sums = [sum(sums) / max(len(sums), 1)]
    return state


def load_best(trainer: Any) -> None:
    trainer.saves.beside.finish()
    best = best_to_load(Path(trainer.args.output_dir), trainer.state.best_model_checkpoint)
    if best is not None:
        read_together(best, lambda: trainer.checkpoints.load_weights(best))
