"""Checkpoints of the Hugging Face Trainer that are written while it trains on (--async_save): whether a run has them,
and what waits for one."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from finetune.training.checkpoints.beside import Writer
from finetune.training.checkpoints.space import copied_bytes, free_memory
from finetune.training.checkpoints.writer_process import Job
from finetune.training.checkpoints.writing import About, every, explained, leads, of_first, rank, ranks, together

if TYPE_CHECKING:
    from finetune.training.checkpoints.trainer_adapter import TrainerSaves

WORTH_BYTES = 256 * 2**20  # of a checkpoint, from which `auto` saves it beside the training
MEMORY_SHARE = 0.5  # of what is free on a host, that the copies may take


class SavesBeside(TrainerCallback):
    """Of one run. Add it before StopOnSignal, which ends a run at a save. All ranks must call `choose`, `of` and
    `finish`."""

    def __init__(self, saves: TrainerSaves) -> None:
        self.saves = saves
        self.writer: Writer | None = None  # None where a save is finished before the training goes on
        self.about: About | None = None
        self.place: Path | None = None  # of the checkpoint under way
        self.said: set[str] = set()

    def choose(self, asked: str) -> None:
        """Before the first step; rank 0 says what comes of `asked`, the flag."""
        if asked == "off" or self.writer is not None:
            return
        size = self.saves.expected_bytes()
        why = next((words for words in every(obstacle(self.saves.trainer, size)) if words), None)
        if why is None and (asked == "on" or size >= WORTH_BYTES):
            together(self._start)
            self._say(
                f"checkpoints are written beside the training (--async_save {asked}): a copy of about "
                f"{size / 2**20:,.0f} MiB, all ranks together, stays in host memory"
            )
        elif why is not None and (asked == "on" or size >= WORTH_BYTES):
            self._say(f"note: --async_save {asked}: each save is finished before the next step, for {why}.")

    def of(self, about: About) -> SavesBeside | None:
        """Who finishes the next checkpoint; None where the ranks do."""
        self.about = about
        return self if self.writer is not None else None

    def begin(self, place: Path) -> None:
        assert self.writer is not None
        self.place = place
        self.writer.begin(place)

    @property
    def names(self) -> list[str]:
        return self.writer.names if self.writer is not None else []

    def hand_over(self, sizes: dict[str, int]) -> None:
        assert self.writer is not None
        assert self.place is not None
        assert self.about is not None
        trainer = self.saves.trainer
        job = Job(self.place, self.about, rank(), ranks(), sizes, ())
        if leads():
            state = trainer.state
            limit, best = trainer.args.save_total_limit, state.best_model_checkpoint
            job = replace(job, keeper=self.saves.keeper, limit=limit, best=best)
        self.writer.hand_over(job)

    def finish(self, because: str = "") -> None:
        """Until the checkpoint under way has its place. Raises RunError on all ranks where one could not write."""
        if self.writer is None or self.place is None:
            return
        writer, place, self.place = self.writer, self.place, None
        if because and "waits" not in self.said and leads() and not writer.is_done():
            self.said.add("waits")
            self._say(f"note: {because} waits for {place.name}, which is still being written. Save less often, or on a "
                      "faster disk. This is said once.")  # fmt: skip
        with explained(place):
            try:
                together(lambda: writer.wait(whole=False))
                report = of_first(together(lambda: writer.wait(whole=True) if leads() else None))
            except BaseException:
                self.close()
                raise
        assert report is not None
        self.saves.saved_bytes = report.bytes
        if leads():
            self.saves.keeper.trusted = report.trusted

    def close(self, gives_time: bool = False) -> None:
        """Nothing is written any more; with `gives_time` what is under way first, for some seconds."""
        if self.writer is not None:
            self.writer.close(gives_time and self.place is not None)
        self.writer = self.place = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.saves.trainer
        if self.writer is not None and trainer.is_deepspeed_enabled:
            from finetune.training.checkpoints.deepspeed_writer import copy_for

            copy_for(trainer.deepspeed, self.keep)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Each rank by itself: what its writer has met ends the run at its next save, or at its end."""
        if self.writer is None or self.place is None or self.place.name in self.said:
            return
        error = self.writer.look()
        if error is not None:
            self.said.add(self.place.name)
            print(
                f"\nwarning: rank {rank()}: {self.place.name} is not saved: {error}. Earlier checkpoints are whole. "
                "The run ends with status 1 at its next save, or at its end.",
                file=sys.stderr,
                flush=True,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.finish()

    def keep(self, path: str | Path, content: Any, is_zip: bool = True) -> bool:
        """True where the file that torch.save would write is written later."""
        return self.writer is not None and self.writer.keep(path, content, is_zip)

    def _start(self) -> None:
        self.writer = Writer()

    def _say(self, words: str) -> None:
        if leads():
            print(words, flush=True)


def obstacle(trainer: Any, size: int) -> str | None:
    """Why checkpoints of `size` bytes cannot be written beside the training."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create, in which the copies would lie (Linux has)"
    if trainer.args.save_on_each_node:
        return "--save_on_each_node has several ranks write files of one name"
    if trainer.is_deepspeed_enabled:
        offload = trainer.accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        places = [(offload.get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param")]
        if "nvme" in places:
            return "what is offloaded to NVMe is not copied to memory"
    for kind in get_reporting_integration_callbacks(trainer.args.report_to):
        own = "on_save" in vars(kind)
        if own and (kind.__name__ != "WandbCallback" or os.environ.get("WANDB_LOG_MODEL") == "checkpoint"):
            return f"{kind.__name__} may upload each checkpoint as it is saved"
    needed, free = copied_bytes(trainer, size), free_memory()
    if needed > MEMORY_SHARE * free:
        return (
            f"the copies take about {needed / 2**20:,.0f} MiB of this host's memory, of which {free / 2**20:,.0f} MiB "
            "are free, and they may take half"
        )
    return None
