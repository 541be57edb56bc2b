"""What a checkpoint holds, whatever its layout: every weight and optimizer state by the weight's name, read when asked.

Nothing here holds a model: the tensors lie in mapped files, and one weight's are put together at a time.
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

COUNTERS = ("global_steps", "skipped_steps", "global_samples")  # of DeepSpeed's engine


@dataclass(frozen=True)
class Group:
    """One of the optimizer's groups: the names of its weights in order, and its settings (lr, betas, weight_decay)."""

    names: tuple[str, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Portable:
    """A checkpoint read by name. `read(name, key)` gives a whole fp32 tensor on the CPU; `key` is WEIGHT or one of
    `keys`, such as "exp_avg". `steps` are the optimizer's, by which Adam mends its bias."""

    shapes: dict[str, torch.Size]
    keys: tuple[str, ...]
    groups: tuple[Group, ...]
    steps: float | None
    read: Callable[[str, str], torch.Tensor]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] = field(default_factory=dict)  # the numbers of DeepSpeed's DynamicLossScaler
    counters: Mapping[str, Any] = field(default_factory=dict)  # of DeepSpeed's engine
    schedule: Any = None  # of a schedule that DeepSpeed keeps itself

    @property
    def bytes(self) -> int:
        """Of all weights and states in fp32."""
        elements: int = sum(shape.numel() for shape in self.shapes.values())
        return elements * 4 * (1 + len(self.keys))


def load_pickle(path: Path) -> dict[str, Any]:
    """A file that torch or DeepSpeed wrote, mapped into memory. Raises RequestError where it holds anything but
    tensors, plain values and stand-ins of DeepSpeed's own records."""
    found = load_checked(path)
    if not isinstance(found, dict):
        raise RequestError(f"{path}: holds a {type(found).__name__}, and not values by their names.")
    return found


def joined(pieces: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Flat pieces from end to end, as a tensor of its own: a view would be saved with all of its file."""
    return torch.cat([piece.detach().reshape(-1).float() for piece in pieces]).reshape(shape)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of an optimizer's `state_dict` without what belongs to one layout."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "step")}


def steps_of(states: Mapping[Any, Mapping[str, Any]], groups: list[Any]) -> float | None:
    """How many steps an optimizer has taken. DeepSpeed's FusedAdam may count them in its groups
    (deepspeed/ops/adam/fused_adam.py, step)."""
    counts = {float(state["step"]) for state in states.values() if "step" in state}
    counts |= {float(group["step"]) for group in groups if "step" in group}
    return max(counts) if counts else None


def state_keys(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Of one weight's or group's states, those with an element a weight."""
    return tuple(sorted(key for key, value in state.items() if torch.is_tensor(value) and value.dim()))
