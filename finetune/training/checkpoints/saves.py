"""The checkpoints of one run, with any engine: saving with a manifest, rotation, and optionally writing while training
continues (--async_save)."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerCallback

from finetune.errors import RunError, first_line
from finetune.run.files import STATE_FILE
from finetune.run.flags.guards import saves_beside_from
from finetune.run.launch import read_launch
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.beside import Writer
from finetune.training.checkpoints.final import note_place_of_best
from finetune.training.checkpoints.manifest import Layout
from finetune.training.checkpoints.obstacles import lacking, obstacle
from finetune.training.checkpoints.rotation import Keeper
from finetune.training.checkpoints.space import check_space, refuse_full_disk
from finetune.training.checkpoints.writer_process import Job
from finetune.training.checkpoints.writing import (
    About,
    by_first,
    every,
    explained,
    gathered,
    leads,
    outer_of,
    rank,
    ranks,
)

NOTED_SECONDS = 1.0  # that a save waits for the one before it: from here on the run says so


class Saved(Protocol):
    """What the ranks of one engine save. All ranks must call every method."""

    @property
    def layout(self) -> Layout:
        """How it is sharded over the ranks, for the manifest."""

    def expected_bytes(self) -> int:
        """The approximate size of a checkpoint, all ranks together."""

    def copied_bytes(self, size: int) -> int:
        """Of a checkpoint of `size` bytes, how many the ranks of the busiest host copy before it is written."""

    def obstacle(self) -> str | None:
        """Why it cannot be copied to memory, or None."""

    def ahead(self) -> Iterable[torch.Tensor]:
        """Tensors of this rank that every save copies and that can be copied before the engine saves."""


class Saves:
    """The saves of one trainer's run. All ranks must call every method except `go_on`."""

    def __init__(self, trainer: Any, saved: Saved) -> None:
        self.trainer, self.saved = trainer, saved
        self.keeper = Keeper(Path(trainer.args.output_dir))
        self.saved_bytes = 0  # size of the last checkpoint, all files
        self.beside = SavesBeside(self)
        self.chosen: Path | None = None  # the checkpoint that the run resumes from

    @property
    def place(self) -> Path:
        """The folder for this step's checkpoint."""
        return Path(self.trainer.args.output_dir) / f"checkpoint-{self.trainer.state.global_step}"

    def save(self, write: Callable[[Path], None]) -> None:
        """`write` writes this rank's files into the unfinished folder, or gives them to the writer. The state that it
        may have written there is written again if the path in it is that of a folder in the unfinished one."""
        trainer, state, place = self.trainer, self.trainer.state, self.place
        size, layout = trainer.global_batch_size, self.saved.layout
        about = About(state.global_step, state.epoch, size, layout, trainer.identity)
        self.beside.settle(place.name)
        beside = self.beside.of(about)
        check = partial(refuse_full_disk, place.parent, self.expected_bytes(), f"step {about.step}")
        with (whole := AtomicFolder(place, about, beside, check)) as folder:
            write(folder)
            written = state.best_model_checkpoint
            note_place_of_best(state, place)
            if leads() and (state.best_model_checkpoint != written or not (folder / STATE_FILE).is_file()):
                state.save_to_json(str(folder / STATE_FILE))
        if beside is not None:
            if trainer.stop.agreed:  # the run stops after this save
                beside.finish()
            return
        self.saved_bytes = whole.bytes
        if leads():
            self.keeper.trust(place)
            self.keeper.rotate(trainer.args.save_total_limit, place, state.best_model_checkpoint)

    def go_on(self) -> None:
        """Called on rank 0 once the Trainer knows the step after which a resumed run begins."""
        if self.chosen is not None:
            self.keeper.go_on_from(self.chosen, self.trainer.state.global_step)

    def check_space(self, when: str) -> None:
        """Raises RunError if there is too little room for the next checkpoint."""
        check_space(Path(self.trainer.args.output_dir), self.expected_bytes(), when)

    def expected_bytes(self) -> int:
        """The size of the next checkpoint, all ranks together."""
        return self.saved_bytes or self.saved.expected_bytes()


class SavesBeside(TrainerCallback):
    """The asynchronous saves of one run. Add it before SavesLast, which delays saves, and StopOnSignal, which ends runs
    at one. All ranks must call `choose`, `of` and `finish`."""

    def __init__(self, saves: Saves) -> None:
        self.saves = saves
        self.writer: Writer | None = None  # None if saves are synchronous
        self.about: About | None = None
        self.place: Path | None = None  # of the checkpoint in progress
        self.early: str | None = None  # what some rank had to write at once, and why
        self.held, self.grew = 0, True  # bytes of copies on the fullest host; whether the last save took more of them
        self.said: set[str] = set()

    def choose(self, asked: str) -> None:
        """Called before the first step with the flag's value; rank 0 prints the outcome."""
        self.said.clear()
        saved, args = self.saves.saved, self.saves.trainer.args
        least = saves_beside_from(asked, args.device.type, read_launch())
        if self.writer is not None or least is None or (size := self.saves.expected_bytes()) < least:
            return
        copied = saved.copied_bytes(size)
        if why := _any(saved.obstacle() or obstacle(args, copied)) or _any(self._start()):
            self.close()
            self._say(f"note: --async_save {asked}: saves stay synchronous, because {why}.")
            return
        self._say(
            f"checkpoints are written while training continues (--async_save {asked}): a copy stays in host memory, "
            f"about {copied / 2**20:,.0f} MiB where it is largest"
        )

    def of(self, about: About) -> SavesBeside | None:
        """The object that finishes the next checkpoint, or None if the ranks do so themselves."""
        self.about = about
        if self.writer is None:
            return None
        if not self.grew:  # the look at the memory, and a message, take milliseconds
            return self
        # The run has taken memory since it started, and the weights are copied from the second save on.
        copied = self.saves.saved.copied_bytes(self.saves.expected_bytes())
        if (why := _any(lacking(copied, self.held))) is None:
            return self
        name = self.saves.place.name
        self._say_once("lacking", f"{name} is saved synchronously, because {why}. Later saves look again.")
        return None

    def writer_of(self, folder: Path) -> Writer | None:
        """The writer, if it writes this checkpoint."""
        return self.writer if self.writer is not None and self.writer.folder == folder else None

    def begin(self, place: Path) -> None:
        assert self.writer is not None
        self.place = place
        self.writer.begin(place, self.saves.saved.ahead())

    def later(self) -> set[str]:
        assert self.writer is not None
        told = every((self.writer.names, self.writer.early, self.writer.memory.bytes))
        self.early = next((early for _, early, _ in told if early), None)
        here, sizes = read_launch().local_world_size, [size for _, _, size in told]
        held = max(sum(sizes[first : first + here]) for first in range(0, len(sizes), here))
        self.grew, self.held = held > self.held, held
        return {name for names, _, _ in told for name in names}

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

    def go(self) -> None:
        assert self.writer is not None
        self.writer.go()
        if self.early:
            self._say_once("early", f"--async_save: training waits while a save writes {self.early}")

    def finish(self, because: str = "") -> None:
        """Wait until the checkpoint in progress is in place. Raises RunError on all ranks if one could not write."""
        if self.writer is None or self.place is None:
            return
        writer, place, self.place = self.writer, self.place, None
        began = time.monotonic()
        with explained(place):
            try:
                report = gathered(lambda: writer.wait(whole=False))[0]
                if not report.is_whole:
                    report = by_first(lambda: writer.wait(whole=True))
            except BaseException:
                self.close()
                raise
        waited = time.monotonic() - began
        if because and waited > NOTED_SECONDS:
            said = f"{because} waited {waited:.1f} s for {place.name} to be written."
            self._say_once("waited", f"{said} Save less often, or on a faster disk.")
        self.saves.saved_bytes = report.bytes
        if leads():
            self.saves.keeper.trusted = report.trusted

    def settle(self, because: str) -> None:
        """`finish` before another save. If the checkpoint in progress could not be written, that save and all later
        ones are synchronous: whatever was in the way may be gone, and if not, the save says so."""
        place = self.place
        try:
            self.finish(because)
        except RunError as error:
            assert place is not None
            if leads():
                shutil.rmtree(outer_of(place), ignore_errors=True)
            state = self.saves.trainer.state
            if place.name == f"checkpoint-{state.best_global_step}":  # the best one left is not known
                state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            why = first_line(error.__cause__ or error)
            self._say(f"note: {place.name} could not be saved: {why}. Saves are synchronous from here on.")

    def close(self, gives_time: bool = False) -> None:
        """Stop writing; with `gives_time`, first let the checkpoint in progress finish (Writer.close)."""
        if self.writer is not None:
            self.writer.close(gives_time and self.place is not None)
        self.writer = self.place = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = getattr(self.saves.trainer, "deepspeed", None)  # of a Trainer; a pipeline's writes no files itself
        if self.writer is not None and engine is not None:
            from finetune.training.checkpoints.deepspeed_writer import copy_for

            copy_for(engine, self.keep)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Each rank on its own: after an error of its writer, all save again once they have agreed to."""
        if self.writer is None:
            return
        control.should_save |= self.saves.trainer.stop.owes_a_save
        if self.place is None or self.place.name in self.said:
            return
        error = self.writer.look()
        if error is not None:
            self.said.add(self.place.name)
            print(
                f"\nwarning: rank {rank()}: {self.place.name} is not saved: {error}. Earlier checkpoints are whole. "
                "The ranks save again within three steps.",
                file=sys.stderr,
                flush=True,
            )
            self.saves.trainer.stop.has_lost_a_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves.trainer.stop.owes_a_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.finish()

    def keep(self, path: str | Path, content: Any, is_zip: bool = True) -> bool:
        """True if the file that torch.save would write will be written later."""
        return self.writer is not None and self.writer.keep(path, content, is_zip)

    def _start(self) -> str | None:
        """Why it cannot be started, or None. Some systems restrict memfd_create (the sysctl vm.memfd_noexec)."""
        try:
            self.writer, self.held, self.grew = Writer(), 0, True
        except OSError as error:
            return f"the process that writes them cannot be started ({first_line(error)})"
        return None

    def _say(self, words: str) -> None:
        if leads():
            print(words, flush=True)

    def _say_once(self, what: str, words: str) -> None:
        if what not in self.said:
            self._say(f"note: {words} This is said once.")
        self.said.add(what)


def _any(why: str | None) -> str | None:
    """A reason that some rank has, on all ranks."""
    return next(filter(None, every(why)), None)
