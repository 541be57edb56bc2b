"""A pipeline's layout-independent checkpoint: weights and optimizer states under the names of the whole model.

A folder holds `model*.safetensors` (fp32), which `from_pretrained` opens directly, `optimizer*.safetensors`, and the
rest of what a run needs to resume. Each stage writes what it owns and reads what it needs: no rank ever holds the whole
model, and a run can resume with any number of stages and pipelines. The folder is renamed into place once complete.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from finetune.errors import RequestError
from finetune.run.files import PIPELINE_RECORD, STATE_FILE
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.final import open_final, save_final
from finetune.training.checkpoints.identity import Identity
from finetune.training.checkpoints.manifest import Spread
from finetune.training.checkpoints.space import OTHER_BYTES, check_space, stage_bytes
from finetune.training.checkpoints.writing import About, every, leads, rank
from finetune.training.pipeline.engine import Built, Named
from finetune.training.pipeline.files import FlatStates, file_name, find_tensors, read_tensor
from finetune.training.pipeline.stages import Cut, owned
from finetune.training.resuming import OwnSettings, random_states, set_random_states
from finetune.training.run_folder import write_json

SCHEDULER, RNG = "scheduler.pt", "rng_state_{rank}.pth"


class Checkpoints:
    """Saves and loads this rank's part of a run; all ranks must call every method. `save_config` writes the other files
    that `from_pretrained` needs."""

    def __init__(
        self,
        built: Built,
        parts: Cut,
        save_config: Callable[[Path], None] | None,
        processing_class: Any,
        identity: Identity | None = None,
    ) -> None:
        self.built, self.parts, self.identity = built, parts, identity
        self.save_config, self.processing_class = save_config, processing_class
        grid = built.engine.grid
        self.stage, self.stages = grid.get_stage_id(), grid.get_pipe_parallel_world_size()
        self.mine = owned(parts, self.stage)  # the names of the tensors that this stage saves
        self.pipelines = grid.get_data_parallel_world_size()
        self.states = FlatStates(built.optimizer, built.groups, grid.get_data_parallel_group())
        self.optim = type(built.optimizer).__name__
        self.own_settings = OwnSettings.of(built.engine.optimizer)
        self.saved_bytes = 0  # size of the last checkpoint, all files
        self.writes = grid.get_data_parallel_rank() == 0  # the other pipelines have the same weights

    def save(self, place: Path, state: Any, global_batch_size: int, weights_only: bool) -> None:
        """Write the folder `place` atomically."""
        self.check_space(place.parent, f"step {state.global_step}", weights_only)
        with (whole := AtomicFolder(place, self._about(state, global_batch_size))) as folder:
            self._write_model(folder)
            if not weights_only:
                states = self.states.whole(self.mine if self.writes else set())
                if self.writes:
                    save_file(states, folder / file_name("optimizer", self.stage, self.stages))
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
                state.save_to_json(str(folder / STATE_FILE))
        self.saved_bytes = whole.bytes

    def check_space(self, run_folder: Path, when: str, weights_only: bool) -> None:
        """Raises RunError if the disk has no room for a checkpoint. All ranks must call it."""
        counts = [p.numel() for name, p in self.built.named.items() if name in self.mine and self.writes]
        has_momentum = bool(self.built.engine.optimizer.param_groups[0].get("momentum"))
        own = stage_bytes(counts, self.optim, has_momentum, weights_only)
        check_space(run_folder, self.saved_bytes or sum(every(own)) + OTHER_BYTES, when)

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
        self.states.fill(folder, record["optimizer_steps"])
        if self.built.engine.fp16_enabled():
            vars(self.built.engine.optimizer.loss_scaler).update(record["loss_scale"])
        self.load_schedule(torch.load(folder / SCHEDULER, weights_only=True))
        if (record["stages"], record["pipelines"]) == (self.stages, self.pipelines):
            set_random_states(torch.load(folder / RNG.format(rank=rank()), weights_only=True))

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
        records = save_final(folder, self._write_model)
        open_final(folder, records, {name: shape for part in every(own) for name, shape in part.items()})

    def _about(self, state: Any, global_batch_size: int) -> About:
        zero_stage = self.built.engine.zero_optimization_stage()
        layout = Spread("pipeline", distributed.get_world_size(), zero_stage, self.stages, self.pipelines)
        return About(state.global_step, state.epoch, global_batch_size, layout, self.identity)

    def _write_model(self, folder: Path) -> None:
        weights = whole_weights(self.built.named, self.mine, self.writes)
        if self.writes:
            own = {name: buffer for name, buffer in self.built.buffers.items() if name in self.mine}
            weights |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in own.items()}
        write_weights(folder, weights, self.stage, self.stages, self.writes)
        if leads() and self.save_config is not None:
            self.save_config(folder)
        if leads() and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)


def read_record(folder: Path) -> dict[str, Any]:
    """The layout, global batch size and optimizer that a checkpoint was written with."""
    return read_json_object(folder / PIPELINE_RECORD)


def whole_weights(named: Named, mine: set[str], keeps: bool) -> dict[str, torch.Tensor]:
    """The fp32 weights named in `mine`, on the CPU. All data-parallel ranks of a stage must call it, because ZeRO-1
    shards them; with `keeps` false, a rank gets nothing back."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in named.items():
        if name in mine and (value := safe_get_full_fp32_param(parameter)) is not None and keeps:
            found[name] = value.detach().to("cpu", torch.float32).contiguous()
    return found


def write_weights(folder: Path, weights: dict[str, torch.Tensor], stage: int, stages: int, writes: bool) -> None:
    """Write this stage's part of the model and, on rank 0, the index of all parts. Every rank must call it."""
    own = file_name("model", stage, stages)
    if writes:
        save_file(weights, folder / own, metadata={"format": "pt"})
    parts = every((own, {name: tensor.nbytes for name, tensor in weights.items()} if writes else {}))
    if leads() and stages > 1:
        places = {name: file for file, names in parts for name in names}
        total = sum(size for _, names in parts for size in names.values())
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places})


def load_weights(folder: Path, named: Named, buffers: dict[str, torch.Tensor]) -> None:
    """Read this stage's weights and buffers. Raises RequestError if one is missing or has the wrong shape."""
    from deepspeed.utils import safe_set_full_fp32_param

    places = find_tensors(folder, "model")
    for name, parameter in (named | buffers).items():
        if name not in places:
            raise RequestError(f"{folder}: has no weight {name}. Does the folder hold a model with this architecture?")
        value = read_tensor(places, name)
        if value.shape != parameter.shape:
            raise RequestError(f"{folder}: {name} is {tuple(value.shape)}, but this model's {tuple(parameter.shape)}.")
        with torch.no_grad():
            parameter.copy_(value)
        if name in named:
            safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))
