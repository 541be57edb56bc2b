"""The files of a checkpoint: tensors by name in however many files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def file_name(kind: str, stage: int, stages: int) -> str:
    """The file of one stage, in the names by which transformers finds the parts of a model."""
    if stages == 1:
        return f"{kind}.safetensors"
    return f"{kind}-{stage + 1:05d}-of-{stages:05d}.safetensors"


def find_tensors(folder: Path, kind: str) -> dict[str, Path]:
    """Name to file, from the headers of `kind`*.safetensors."""
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
