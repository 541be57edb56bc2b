"""A pipeline's layout-independent checkpoint: weights and optimizer states under the names of the whole model.

A folder holds `model*.safetensors` (fp32), which `from_pretrained` opens directly, `optimizer*.safetensors`, and the
rest of what a run needs to resume. Each stage writes what it owns and reads what it needs: no rank ever holds the whole
model, and a run can resume with any number of stages and pipelines. The folder is renamed into place once complete.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from finetune.errors import RequestError
from finetune.run.files import PIPELINE_RECORD
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.beside import Writer
from finetune.training.checkpoints.final import open_final, save_final
from finetune.training.checkpoints.manifest import Layout
from finetune.training.checkpoints.space import OTHER_BYTES, stage_bytes
from finetune.training.checkpoints.writing import every, leads, rank
from finetune.training.pipeline.engine import Built, Named
from finetune.training.pipeline.files import (
    FlatStates,
    ReadState,
    file_name,
    find_tensors,
    read_tensor,
    save_tensors,
    saved_states,
)
from finetune.training.pipeline.stages import Cut, owned
from finetune.training.reshard.portable import Portable
from finetune.training.resuming import OwnSettings, random_states, set_random_states
from finetune.training.run_folder import write_json

SCHEDULER, RNG = "scheduler.pt", "rng_state_{rank}.pth"
METADATA = {"format": "pt"}  # as transformers writes it
Put = Callable[[Path, Iterable[tuple[str, torch.Tensor]], dict[str, str]], None]


class Checkpoints:
    """Writes and loads this rank's part of a run, and implements saves.Saved; all ranks must call every method.
    `save_config` writes the other files that `from_pretrained` needs. With `weights_only`, a checkpoint cannot be
    resumed."""

    def __init__(
        self,
        built: Built,
        parts: Cut,
        save_config: Callable[[Path], None] | None,
        processing_class: Any,
        weights_only: bool = False,
    ) -> None:
        self.built, self.parts, self.weights_only = built, parts, weights_only
        self.save_config, self.processing_class = save_config, processing_class
        grid = built.engine.grid
        self.stage, self.stages = grid.get_stage_id(), grid.get_pipe_parallel_world_size()
        self.mine = owned(parts, self.stage)  # the names of the tensors that this stage saves
        self.pipelines = grid.get_data_parallel_world_size()
        self.states = FlatStates(built.optimizer, built.groups, grid.get_data_parallel_group())
        self.optim = type(built.optimizer).__name__
        self.own_settings = OwnSettings.of(built.engine.optimizer)
        self.writes = grid.get_data_parallel_rank() == 0  # the other pipelines have the same weights

    def write(self, folder: Path, global_batch_size: int, writer: Writer | None) -> None:
        """Write this rank's part of a checkpoint. A `writer` gets copies of the large files, to write them later."""
        put = save_tensors if writer is None else writer.keep_weights
        self._write_model(folder, put)
        if not self.weights_only:
            own = folder / file_name("optimizer", self.stage, self.stages)
            self._write(put, own, self.states.whole(self.mine if self.writes else set()))
            torch.save(random_states(), folder / RNG.format(rank=rank()))
            if leads():
                torch.save(self.built.scheduler.state_dict(), folder / SCHEDULER)
        if leads():
            record = {
                "stages": self.stages,
                "pipelines": self.pipelines,
                "partition_method": self.parts.method,
                "bounds": list(self.parts.bounds),
                "global_batch_size": global_batch_size,
                "optimizer": self.optim,
                "optimizer_steps": self.states.steps(),
                "loss_scale": self._loss_scale(),
            }
            write_json(folder / PIPELINE_RECORD, record)

    @property
    def layout(self) -> Layout:
        zero_stage = self.built.engine.zero_optimization_stage()
        return Layout("pipeline", distributed.get_world_size(), zero_stage, self.stages, self.pipelines)

    def expected_bytes(self) -> int:
        return sum(every(self._own_bytes())) + OTHER_BYTES

    def copied_bytes(self, size: int) -> int:
        hosts = Counter[str]()
        for host, own in every((socket.gethostname(), self._own_bytes())):
            hosts[host] += own
        return max(hosts.values())

    def obstacle(self) -> str | None:
        return None  # a pipeline keeps nothing on NVMe

    def ahead(self) -> tuple[torch.Tensor, ...]:
        return ()  # what it saves is cut from DeepSpeed's tensors

    def _own_bytes(self) -> int:
        counts = [p.numel() for name, p in self.built.named.items() if name in self.mine and self.writes]
        has_momentum = bool(self.built.engine.optimizer.param_groups[0].get("momentum"))
        return stage_bytes(counts, self.optim, has_momentum, self.weights_only)

    def load(self, folder: Path, record: dict[str, Any]) -> None:
        """Load weights, optimizer, schedule and, in the same layout, random states. `record`: see `read_record`."""
        if record["optimizer"] != self.optim:
            raise RequestError(
                f"--resume: {folder} holds the states of {record['optimizer']}, but --optim is {self.optim}. Resume "
                "with the --optim in recipe.yaml."
            )
        if not (folder / SCHEDULER).is_file():
            raise RequestError(f"--resume: {folder} was saved with --save_only_model, so it cannot be resumed.")
        self.load_weights(folder)
        self._load_states(folder, *saved_states(folder), record["optimizer_steps"], record["loss_scale"])
        if (record["stages"], record["pipelines"]) == (self.stages, self.pipelines):
            set_random_states(torch.load(folder / RNG.format(rank=rank()), weights_only=True))

    def load_portable(self, folder: Path, portable: Portable) -> None:
        """Load what another engine saved in `folder`."""
        put_weights(folder, portable.weight, self.built.named, self.built.buffers)
        self._load_states(folder, portable.keys, portable.state, portable.steps, portable.loss_scale)

    def _load_states(
        self, folder: Path, keys: Iterable[str], read: ReadState, steps: float | None, loss_scale: Mapping[str, Any]
    ) -> None:
        self.states.fill(keys, read, steps)
        if self.built.engine.fp16_enabled():
            vars(self.built.engine.optimizer.loss_scaler).update(loss_scale)
        self.load_schedule(torch.load(folder / SCHEDULER, weights_only=True))

    def _loss_scale(self) -> dict[str, Any]:
        """The state of fp16's dynamic loss scaler; empty for other precisions."""
        if not self.built.engine.fp16_enabled():
            return {}
        scaler = self.built.engine.optimizer.loss_scaler
        return {name: value for name, value in vars(scaler).items() if isinstance(value, int | float)}

    def load_schedule(self, record: dict[str, Any]) -> None:
        """Continue the schedule from the state `record`, with the learning rates of this run's flags."""
        self.built.scheduler.load_state_dict(record)
        self.own_settings.put_back(self.built.engine.optimizer, self.built.scheduler)

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a checkpoint, or of any folder in Hugging Face's format."""
        load_weights(folder, self.built.named, self.built.buffers)

    def save_model(self, folder: Path) -> None:
        """Save the final model in a run folder, replacing any earlier one."""
        own = {name: list(p.shape) for name, p in self.built.named.items() if name in self.mine}
        records = save_final(folder, lambda place: self._write_model(place, save_tensors))
        open_final(folder, records, {name: shape for part in every(own) for name, shape in part.items()})

    def _write_model(self, folder: Path, put: Put) -> None:
        """Write this stage's part of the model and, on rank 0, the index of all parts and the config."""
        buffers = ((name, buffer) for name, buffer in self.built.buffers.items() if name in self.mine)
        own = file_name("model", self.stage, self.stages)
        sizes = self._write(put, folder / own, chain(whole_weights(self.built.named, self.mine), buffers))
        parts = every((own, sizes if self.writes else {}))
        if not leads():
            return
        if self.stages > 1:
            places = {name: file for file, names in parts for name in names}
            total = sum(size for _, names in parts for size in names.values())
            write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places})
        if self.save_config is not None:
            self.save_config(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _write(self, put: Put, path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        """Write the tensors, unless another pipeline does; their sizes in bytes. All data-parallel ranks of a stage
        must call it, because ZeRO-1 shards what the tensors are made of."""
        sizes: dict[str, int] = {}

        def taken() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                sizes[name] = tensor.nbytes
                yield name, tensor

        if self.writes:
            put(path, taken(), METADATA)
        else:
            deque(taken(), maxlen=0)
        return sizes


def read_record(folder: Path) -> dict[str, Any]:
    """The layout, global batch size and optimizer that a checkpoint was written with."""
    return read_json_object(folder / PIPELINE_RECORD)


def whole_weights(named: Named, mine: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The fp32 weights named in `mine`. All data-parallel ranks of a stage must take them all."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in named.items():
        if name in mine and (value := safe_get_full_fp32_param(parameter)) is not None:
            yield name, value.detach().float()


def load_weights(folder: Path, named: Named, buffers: dict[str, torch.Tensor]) -> None:
    """Read this stage's weights and buffers. Raises RequestError if one is missing or has the wrong shape."""
    places = find_tensors(folder, "model")
    put_weights(folder, lambda name: read_tensor(places, name) if name in places else None, named, buffers)


def put_weights(
    folder: Path, read: Callable[[str], torch.Tensor | None], named: Named, buffers: dict[str, torch.Tensor]
) -> None:
    """Like `load_weights`; `read` returns a weight or buffer of `folder` by name, or None."""
    from deepspeed.utils import safe_set_full_fp32_param

    for name, parameter in (named | buffers).items():
        value = read(name)
        if value is None:
            raise RequestError(f"{folder}: has no weight {name}. Does the folder hold a model with this architecture?")
        if value.shape != parameter.shape:
            raise RequestError(f"{folder}: {name} is {tuple(value.shape)}, but this model's {tuple(parameter.shape)}.")
        with torch.no_grad():
            parameter.copy_(value)
        if name in named:
            safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))
