"""A checkpoint's files, which hold tensors by name, and the optimizer states for them: converted from ZeRO-1's flat
tensors and back, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed

from finetune.training.pipeline.engine import Named

ReadState = Callable[[str, str], torch.Tensor | None]  # of a weight's name and a key, such as "exp_avg"


def file_name(kind: str, stage: int, stages: int) -> str:
    """The file of one stage, named so that transformers finds the parts of a model."""
    if stages == 1:
        return f"{kind}.safetensors"
    return f"{kind}-{stage + 1:05d}-of-{stages:05d}.safetensors"


def save_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> None:
    """Write tensors on any device, by their names."""
    save_file({name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors}, path, metadata)


def find_tensors(folder: Path, kind: str) -> dict[str, Path]:
    """The file of each tensor name, from the headers of `kind`*.safetensors."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{kind}*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def read_tensor(places: dict[str, Path], name: str) -> torch.Tensor:
    """The tensor from where `find_tensors` found it."""
    with safe_open(places[name], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def saved_states(folder: Path) -> tuple[list[str], ReadState]:
    """The keys of the states that a pipeline saved in `folder`, and a function that reads one."""
    places = find_tensors(folder, "optimizer")

    def read(name: str, key: str) -> torch.Tensor | None:
        return read_tensor(places, f"{key}:{name}") if f"{key}:{name}" in places else None

    return sorted({name.split(":", 1)[0] for name in places}), read


class FlatStates:
    """The per-element optimizer states, such as Adam's momentum, by the names of the weights.

    Under ZeRO-1 each optimizer group holds one flat tensor: this data-parallel rank's part of the group's weights,
    concatenated in the order given, with padding at the end (deepspeed/runtime/zero/stage_1_and_2.py and
    bf16_optimizer.py). DeepSpeed's own `safe_get_full_optimizer_state` finds only the states of the first group: 0.19.8
    links all groups as soon as the first has stepped (stage_1_and_2.py, _optimizer_step).
    """

    def __init__(self, optimizer: Any, groups: Sequence[Named], process_group: Any) -> None:
        self.optimizer, self.groups, self.process_group = optimizer, groups, process_group

    def whole(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The states of the weights `wanted`, under keys like "exp_avg:WEIGHT_NAME"; each is valid until the next one.
        All data-parallel ranks must take them all, even those that want none."""
        for group, named in zip(self.optimizer.param_groups, self.groups, strict=True):
            (flat,) = group["params"]
            state = self.optimizer.state[flat]
            for key in sorted(key for key, value in state.items() if torch.is_tensor(value) and value.dim()):
                sizes = [p.numel() for p in named.values()]
                pieces = self._gathered(state[key])[: sum(sizes)].split(sizes)
                for (name, p), piece in zip(named.items(), pieces, strict=True):
                    if name in wanted:
                        yield f"{key}:{name}", piece.reshape(p.shape)

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(self.process_group))]
        distributed.all_gather(parts, part.contiguous(), group=self.process_group)
        return torch.cat(parts)

    def fill(self, keys: Iterable[str], read: ReadState, steps: float | None) -> None:
        """Set the states `keys`, and the optimizer's step count."""
        record = self.optimizer.state_dict()
        for index, (group, named) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=True)):
            (flat,) = group["params"]
            state: dict[str, Any] = {} if steps is None else {"step": torch.tensor(steps)}
            for key in keys:
                found = ((read(name, key), p) for name, p in named.items())
                # Only the placeholder of an empty group is in no checkpoint.
                parts = [torch.zeros(p.numel()) if part is None else part.flatten() for part, p in found]
                state[key] = self._own(torch.cat(parts), flat)
            record["state"][index] = state
        self.optimizer.load_state_dict(record)

    def _own(self, whole: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        rank, ranks = (f(self.process_group) for f in (distributed.get_rank, distributed.get_world_size))
        padded = torch.nn.functional.pad(whole, (0, flat.numel() * ranks - whole.numel()))
        return padded[rank * flat.numel() :][: flat.numel()].to(flat.device, flat.dtype, copy=True)

    def steps(self) -> float | None:
        """Adam's step count, which its bias correction uses; None for an optimizer that does not count steps."""
        counts = {float(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        return max(counts) if counts else None
