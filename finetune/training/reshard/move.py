"""Converts a verified checkpoint into a temporary folder that this run's engine can load, and deletes it afterwards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.errors import FinetuneError, RequestError, RunError, first_line
from finetune.run.files import PIPELINE_RECORD, UNFINISHED
from finetune.training.checkpoints.tag import newest_tag
from finetune.training.checkpoints.writing import every
from finetune.training.pipeline.checkpoint import read_record
from finetune.training.pipeline.files import file_name, find_tensors, read_tensor
from finetune.training.reshard.expert_shards import as_layers, fit_schedule, regrouped
from finetune.training.reshard.one_file import Names, read_plain, read_zero0, write_plain, write_zero0
from finetune.training.reshard.portable import WEIGHT, Group, Portable, load_pickle
from finetune.training.reshard.sharding import Sharding
from finetune.training.reshard.zero_shards import read_zero, write_record, write_weight
from finetune.training.run_folder import write_json

PREFIX = UNFINISHED + "resharded-"  # no run resumes from such a folder, and the next start deletes it
SCHEDULE = "scheduler.pt"
RANDOM_STATES = "rng_state"  # prefix of the ranks' files
OWN = ("global_step", "model", "optimizer", RANDOM_STATES, "latest", "manifest.json", "pipeline.json", "scaler.pt")
TELL_SECONDS = 10.0  # between two progress lines
ADAM = {"exp_avg", "exp_avg_sq"}  # the only states that ZeRO-3's loader supports (runtime/zero/stage3.py)


def read_any(checkpoint: Path, written: Sharding, names: Names) -> Portable:
    """Read a checkpoint with the reader for the layout that wrote it. Raises RequestError."""
    if written.engine == "pipeline":
        return read_pipeline(checkpoint, names.filled)
    if written.engine == "ddp":
        return read_plain(checkpoint, names)
    folder = newest_tag(checkpoint)
    assert folder is not None, "its layout was read from there"
    return read_zero(folder) if written.zero_stage else read_zero0(folder, names)


class Mover:
    """Moves `checkpoint` to the layout `here`. All ranks must call every method; each writes a share of the weights."""

    def __init__(self, checkpoint: Path, run_folder: Path, here: Sharding, rank: int) -> None:
        self.checkpoint, self.run_folder, self.here = checkpoint, run_folder, here
        self.rank, self.ranks = rank, here.ranks
        self.folder = run_folder / (PREFIX + checkpoint.name)

    def move(self, written: Sharding, names: Names, pipeline: tuple[int, str] = (0, "")) -> Portable:
        """Write the folder, and return what was read. `pipeline` is the global batch size and the optimizer for a
        pipeline's record. Raises RequestError and RunError, the same on every rank."""
        start = time.monotonic()
        portable: Portable = self._together(lambda: self._read(written, names))
        self._together(lambda: self._begin(written, portable, names))
        share = list(portable.shapes)[self.rank :: self.ranks]
        self._together(lambda: self._write(portable, share))
        self._together(lambda: self._end(portable, names, pipeline))
        self._say(f"resume: moved in {time.monotonic() - start:.1f} s")
        return portable

    def _read(self, written: Sharding, names: Names) -> Portable:
        portable = read_any(self.checkpoint, written, names)
        if written.expert_ranks == self.here.expert_ranks == 1:
            return portable
        portable = regrouped(portable, names.spread or names.groups)
        return as_layers(portable) if self.here.expert_ranks > 1 else portable

    def link(self) -> None:
        """Make the folder from links only: the checkpoint's files, and random states for each rank of this run. With
        another number of ranks the Trainer would find none (transformers 5.23, trainer.py, _load_rng_state)."""

        def make() -> None:
            self.clear()
            self._link(lambda path: not path.name.startswith(RANDOM_STATES))
            self._link_random_states()

        self._together(make if self.rank == 0 else lambda: None)

    def _link(self, is_wanted: Callable[[Path], bool]) -> None:
        self.folder.mkdir(parents=True)
        for path in filter(is_wanted, self.checkpoint.iterdir()):
            (self.folder / path.name).symlink_to(path.resolve())

    def clear(self) -> None:
        """On rank 0, delete the folder, and any left by killed runs."""
        if self.rank == 0:
            for folder in self.run_folder.glob(PREFIX + "*"):
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _engine_folder(self) -> Path:
        """DeepSpeed's folder, with a name that its loader and the Trainer's look for."""
        source = newest_tag(self.checkpoint)
        name = source.name if source else f"global_step{self.checkpoint.name.rsplit('-', 1)[-1]}"
        return self.folder / (name + "_universal" if self.here.zero_stage else name)

    def _begin(self, written: Sharding, portable: Portable, names: Names) -> None:
        if self.here.zero_stage and set(portable.keys) != ADAM:
            raise RequestError(
                f"--resume: {self.checkpoint} holds the optimizer states {', '.join(portable.keys) or 'none'}, but "
                f"only Adam's ({', '.join(sorted(ADAM))}) can be moved into ZeRO's. Resume with {written}."
            )
        if self.rank != 0:
            return
        self.clear()
        disk = shutil.disk_usage(self.run_folder)
        if disk.total and disk.free < portable.bytes:  # some network file systems do not say
            raise RunError(
                f"{self.run_folder}: moving {self.checkpoint.name} to another layout needs "
                f"{portable.bytes / 2**30:.1f} GiB temporarily, but {disk.free / 2**30:.1f} GiB are free."
            )
        self._say(
            f"resume: {self.checkpoint.name} was written by {written}, this run has {self.here}: moving "
            f"{len(portable.shapes)} weights with their optimizer states ({portable.bytes / 2**20:,.1f} MiB)"
        )
        self._link(lambda path: not path.name.startswith(OWN) and path.is_file())
        if self.here.engine == "deepspeed":
            self._engine_folder.mkdir()
        if "pipeline" not in (written.engine, self.here.engine):
            self._link_random_states()
        if written.expert_ranks != self.here.expert_ranks and (schedule := self.folder / SCHEDULE).is_symlink():
            fit_schedule(schedule, len(names.spread or names.groups))

    def _link_random_states(self) -> None:
        """Link each rank's random states under the name that the Trainer looks for; extra ranks share them."""
        found = sorted(self.checkpoint.glob(f"{RANDOM_STATES}*.pth"), key=lambda path: (len(path.name), path.name))
        for rank in range(self.ranks if found else 0):
            name = f"rng_state_{rank}.pth" if self.ranks > 1 else "rng_state.pth"
            (self.folder / name).symlink_to(found[rank % len(found)].resolve())

    def _write(self, portable: Portable, share: list[str]) -> None:
        if self.here.engine == "pipeline":
            write_share(self.folder, portable, share, self.rank, self.ranks)
        elif self.here.zero_stage:
            told = time.monotonic()
            for done, name in enumerate(share):
                write_weight(self._engine_folder, portable, name)
                if time.monotonic() - told > TELL_SECONDS:
                    told = time.monotonic()
                    self._say(f"resume: {done + 1} of {len(share)} weights moved, on each rank")

    def _end(self, portable: Portable, names: Names, pipeline: tuple[int, str]) -> None:
        if self.rank != 0:
            return
        if self.here.engine == "pipeline":
            write_pipeline_record(self.folder, portable, *pipeline)
        elif self.here.engine == "ddp":
            write_plain(self.folder, portable, names)
        elif self.here.zero_stage:
            write_record(self._engine_folder, portable, self.here.zero_stage, self.ranks)
        else:
            write_zero0(self._engine_folder, portable, self.ranks, self.here.precision == "fp32")

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def _together(self, do: Callable[[], Any]) -> Any:
        """Do a part of the work on every rank, and wait for all. A failure on one rank is raised on all of them."""
        result, problem = None, None
        try:
            result = do()
        except FinetuneError as error:
            problem = (type(error), str(error))
        except OSError as error:
            problem = RunError, f"{self.folder}: cannot be written ({error.strerror or first_line(error)})."
        if problem is not None:
            with suppress(OSError):
                self.clear()
        try:
            met = every(problem)
        except RuntimeError as error:
            raise RunError(
                f"rank {self.rank} has its part of {self.checkpoint.name} ready, but the other ranks did not finish "
                f"reading or writing theirs ({first_line(error)}). If the disk is slow, raise --ddp_timeout."
            ) from error
        for found in met:
            if found is not None:
                raise found[0](found[1])
        return result


def read_pipeline(folder: Path, own: tuple[Group, ...]) -> Portable:
    """`own` are the resuming run's groups: the file's only settings are the learning rates. Raises RequestError."""
    record = read_record(folder)
    weights, states = find_tensors(folder, "model"), find_tensors(folder, "optimizer")
    wanted = [name for group in own for name in group.names]
    if missing := sorted(set(wanted) - set(weights)):
        raise RequestError(f"--resume: {folder} has no weight {missing[0]}. Is it a checkpoint of this model?")
    schedule = load_pickle(folder / SCHEDULE)
    # Its groups are the Trainer's: decayed and not decayed (pipeline/engine.py).
    pairs = zip(own, schedule["_last_lr"], strict=False)
    groups = tuple(Group(group.names, {**group.settings, "lr": rate}) for group, rate in pairs)

    def read(name: str, key: str) -> torch.Tensor:
        found = read_tensor(weights, name) if key == WEIGHT else read_tensor(states, f"{key}:{name}")
        return found.float()

    return Portable(
        shapes={name: torch.Size(read(name, WEIGHT).shape) for name in wanted},
        keys=tuple(sorted({name.split(":", 1)[0] for name in states})),
        groups=groups,
        steps=record["optimizer_steps"],
        read=read,
        buffers={name: read_tensor(weights, name) for name in weights if name not in wanted},
        loss_scale=record["loss_scale"],
    )


def write_share(folder: Path, portable: Portable, names: list[str], rank: int, ranks: int) -> None:
    """Write one rank's part of the tensors; rank 0 also writes the buffers."""
    weights = {name: portable.read(name, WEIGHT) for name in names}
    if rank == 0:
        weights |= {name: tensor.contiguous() for name, tensor in portable.buffers.items()}
    save_file(weights, folder / file_name("model", rank, ranks), metadata={"format": "pt"})
    states = {f"{key}:{name}": portable.read(name, key) for name in names for key in portable.keys}
    save_file(states, folder / file_name("optimizer", rank, ranks))


def write_pipeline_record(folder: Path, portable: Portable, global_batch_size: int, optimizer: str) -> None:
    """`stages` and `pipelines` are null, because the folder has no layout's random states."""
    record: dict[str, Any] = {
        "stages": None,
        "pipelines": None,
        "global_batch_size": global_batch_size,
        "optimizer": optimizer,
        "optimizer_steps": portable.steps,
        "loss_scale": dict(portable.loss_scale),
    }
    write_json(folder / PIPELINE_RECORD, record)
