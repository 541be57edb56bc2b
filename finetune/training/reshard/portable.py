"""A layout-independent view of a checkpoint: every weight and optimizer state by the weight's name, read on demand.

No whole model is held in memory: the tensors are in mapped files, and are assembled one weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.errors import RequestError
from finetune.safe_read.pickles import load_checked

WEIGHT = "fp32"  # the key of the weight itself, as in DeepSpeed's universal checkpoint

COUNTERS = ("global_steps", "skipped_steps", "global_samples")  # DeepSpeed's engine keeps them


@dataclass(frozen=True)
class Group:
    """One of the optimizer's groups: the names of its weights in order, and its settings (lr, betas, weight_decay)."""

    names: tuple[str, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Portable:
    """A checkpoint read by name. `read(name, key)` returns a whole fp32 tensor on the CPU; `key` is WEIGHT or one of
    `keys`, such as "exp_avg". `steps` is the optimizer's step count, which Adam's bias correction uses."""

    shapes: dict[str, torch.Size]
    keys: tuple[str, ...]
    groups: tuple[Group, ...]
    steps: float | None
    read: Callable[[str, str], torch.Tensor]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] = field(default_factory=dict)  # the state of DeepSpeed's DynamicLossScaler
    counters: Mapping[str, Any] = field(default_factory=dict)  # see COUNTERS
    schedule: Any = None  # the state of a learning rate schedule that DeepSpeed manages

    def weight(self, name: str) -> torch.Tensor | None:
        """A weight or buffer; None if there is none of that name."""
        return self.read(name, WEIGHT) if name in self.shapes else self.buffers.get(name)

    def state(self, name: str, key: str) -> torch.Tensor | None:
        """A weight's state; None if there is no weight of that name."""
        return self.read(name, key) if name in self.shapes else None

    @property
    def bytes(self) -> int:
        """The size of all weights and states in fp32."""
        elements: int = sum(shape.numel() for shape in self.shapes.values())
        return elements * 4 * (1 + len(self.keys))


def load_pickle(path: Path) -> dict[str, Any]:
    """Load a file that torch or DeepSpeed wrote, mapped into memory. Raises RequestError if it holds anything except
    tensors, plain values, and DeepSpeed's own records (loaded as stand-ins)."""
    found = load_checked(path)
    if not isinstance(found, dict):
        raise RequestError(f"{path}: holds a {type(found).__name__}, not a dict of named values.")
    return found


def joined(pieces: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The flat pieces concatenated into a new tensor: a view would be saved with the whole file behind it."""
    return torch.cat([piece.detach().reshape(-1).float() for piece in pieces]).reshape(shape)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer group of a `state_dict`, without its layout-dependent keys."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "step")}


def steps_of(states: Mapping[Any, Mapping[str, Any]], groups: list[Any]) -> float | None:
    """The optimizer's step count. DeepSpeed's FusedAdam may keep it in its groups (deepspeed/ops/adam/fused_adam.py,
    step)."""
    counts = {float(state["step"]) for state in states.values() if "step" in state}
    counts |= {float(group["step"]) for group in groups if "step" in group}
    return max(counts) if counts else None


def state_keys(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of the per-element states of one weight or group."""
    return tuple(sorted(key for key, value in state.items() if torch.is_tensor(value) and value.dim()))
