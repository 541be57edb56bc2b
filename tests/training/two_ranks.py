"""One of two ranks without a model, for test_together.py: `torchrun --nproc_per_node 2 two_ranks.py FOLDER`. What each
scene comes to is written to FOLDER/rank-RANK.json."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from finetune.data.packing import Collator
from finetune.errors import FinetuneError
from finetune.run.launch import Launch
from finetune.run.parse import Setting
from finetune.run.recipe import Recipe
from finetune.run.run import Run
from finetune.training import cached_teacher
from finetune.training.checkpoints import choice, writing
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.manifest import MANIFEST, FileRecord, Layout, record_of
from finetune.training.checkpoints.writing import About

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])


def save(run: Path, step: int) -> None:
    with AtomicFolder(run / f"checkpoint-{step}", About(step, 1.0, 8, Layout("ddp", 2))) as target:
        torch.save({"x": torch.zeros(1000)}, target / f"rng_state_{RANK}.pth")
        if RANK == 0:
            state = {"global_step": step, "max_steps": 9, "num_train_epochs": 1}
            (target / "trainer_state.json").write_text(json.dumps(state))


def asked(run: Path, resume: str) -> Run:
    values = {
        "output_dir": Setting(str(run), "test"),
        "resume": Setting(resume, "test"),
        "max_steps": Setting(100, "test"),
    }
    return Run(Recipe("test", (), {}), Launch(), (), values)


def settle(run: Path, resume: str = "auto") -> list[Any]:
    request = asked(run, resume)
    chosen = choice.settle(request, choice.checkpoint_to_resume(request))
    return [chosen.checkpoint, *chosen.notes]


def each_reads_its_share(run: Path) -> list[str]:
    read: list[str] = []

    def note(path: Path, to_disk: bool = False) -> FileRecord:
        read.append(path.name)
        return record_of(path, to_disk)

    writing.record_of = note
    save(run, 4)
    return read


def one_meets_a_broken_disk(run: Path, which: int) -> None:
    def fail(path: Path, to_disk: bool = False) -> FileRecord:
        raise OSError(5, "Input/output error", str(path))

    save(run, 4)
    if which == RANK:
        writing.record_of = fail
    save(run, 8)


def one_reads_another_size(run: Path) -> None:
    if RANK:
        writing.record_of = lambda path, to_disk=False: FileRecord(1, record_of(path, to_disk).xxh3_128)
    save(run, 4)


def the_newest_is_altered(run: Path) -> list[Any]:
    save(run, 4)
    save(run, 8)
    if RANK == 0:
        path = run / "checkpoint-8" / "rng_state_1.pth"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    distributed.barrier()
    return settle(run)


def a_pickle_is_refused(run: Path, which: int) -> list[Any]:
    save(run, 4)
    if RANK == 0:
        (run / "checkpoint-4" / MANIFEST).unlink()
        (run / "checkpoint-4" / f"rng_state_{which}.pth").write_bytes(pickle.dumps(print))
    distributed.barrier()
    return settle(run, str(run / "checkpoint-4"))


def one_does_not_see_what_is_chosen(run: Path) -> list[Any]:
    save(run, 4)
    early = choice.checkpoint_to_resume(asked(run, "auto"))
    choice.SHARED_DISK_SECONDS = 0.1
    if RANK:
        choice.STATE_FILE = "on another disk"
    try:
        return [choice.settle(asked(run, "auto"), early).checkpoint]
    finally:
        choice.STATE_FILE = "trainer_state.json"


def one_sees_what_the_first_does_not(run: Path) -> list[Any]:
    early = choice.Chosen(str(run / "checkpoint-4") if RANK else None)
    return [choice.settle(asked(run, "allow"), early).checkpoint]


def a_predecessor_saves_between_the_looks(run: Path) -> list[Any]:
    save(run, 4)
    request = asked(run, "auto")
    early = choice.checkpoint_to_resume(request) if RANK == 0 else None
    save(run, 8)
    early = early or choice.checkpoint_to_resume(request)
    chosen = choice.settle(request, early)
    return [chosen.checkpoint, early.checkpoint]


def the_caches_disk_is_full(run: Path) -> None:
    def full(path: Path, save: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    if RANK == 0:
        cached_teacher.write_whole = full
    target = torch.zeros(1, dtype=torch.long)
    row = {"input_ids": target, "shift_labels": target}
    asked = cached_teacher.Asked([row], Collator(0), 2, 4, 1.0, run / "kept", 1, 1, RANK == 0)
    answers = lambda inputs: lambda some: torch.zeros(1, 4)[some]  # noqa: E731
    teacher = SimpleNamespace(model=None, answers=answers, head_weights=contextlib.nullcontext)
    cached_teacher.asked_before(asked, lambda: teacher, torch.device("cpu"), 1)  # type: ignore[arg-type,return-value]


def one_cannot_read(which: int) -> str:
    def read() -> str:
        if which == RANK:
            raise OSError(5, "Input/output error", "model.safetensors")
        return "read"

    return writing.read_together(Path("checkpoint-4"), read)


SCENES: dict[str, Callable[[Path], Any]] = {
    "shares": each_reads_its_share,
    "disk 0": lambda run: one_meets_a_broken_disk(run, 0),
    "disk 1": lambda run: one_meets_a_broken_disk(run, 1),
    "size": one_reads_another_size,
    "altered": the_newest_is_altered,
    "pickle 0": lambda run: a_pickle_is_refused(run, 0),
    "pickle 1": lambda run: a_pickle_is_refused(run, 1),
    "unseen": one_does_not_see_what_is_chosen,
    "more": one_sees_what_the_first_does_not,
    "between": a_predecessor_saves_between_the_looks,
    "read 0": lambda run: one_cannot_read(0),
    "read 1": lambda run: one_cannot_read(1),
    "cache": the_caches_disk_is_full,
}


def main() -> None:
    distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting", rank=RANK, world_size=2)
    found = {}
    for name, scene in SCENES.items():
        (FOLDER / name).mkdir(exist_ok=True)
        try:
            found[name] = scene(FOLDER / name)
        except FinetuneError as error:
            found[name] = [type(error).__name__, str(error)]
        writing.record_of = record_of
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()  # its threads may abort over Python's own end


if __name__ == "__main__":
    main()
