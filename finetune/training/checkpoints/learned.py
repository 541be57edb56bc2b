"""Learns from the files that transformers wrote how it saves a model: which tensors, under which names, with which
metadata, and the files beside the weights. Another process can then write the next ones, byte for byte the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Form:
    """The form of one weights file, and the content of the other files: config, tokenizer, arguments."""

    file: str
    names: tuple[str, ...]
    metadata: dict[str, str]
    others: dict[str, bytes]


class Learned:
    """Empty until a model is written to a single file whose tensors equal those of the state dict bit by bit."""

    def __init__(self) -> None:
        self.seen: tuple[Shapes, bytes | None] | None = None
        self.form: Form | None = None

    def of(self, weights: dict[str, torch.Tensor], settings: bytes | None) -> Form | None:
        """The form, or None if the shapes or settings are not those that `look` saw."""
        return self.form if (_shapes(weights), settings) == self.seen else None

    def look(self, folder: Path, weights: dict[str, torch.Tensor], settings: bytes | None) -> str | None:
        """`folder` holds the model and nothing else; its other files depend on `settings` alone. Returns why there is
        no form, if `settings` are known."""
        self.seen, self.form = (_shapes(weights), settings), None
        files, every = sorted(folder.glob("*.safetensors")), list(folder.iterdir())
        if settings is None:
            return None
        if not weights:
            return "its state dict is empty"
        if len(files) != 1:
            return f"it is saved in {len(files)} weights files"
        if not all(path.is_file() for path in every):
            return "it is saved with other models"
        others = {path.name: path.read_bytes() for path in every if path != files[0]}
        with safe_open(files[0], framework="pt") as file:
            names = tuple(file.keys())
            for name in names:
                if name not in weights or not _are_same(file.get_tensor(name), weights[name]):
                    return "its file has other names or values than the memory (an adapter, or converted weights)"
            self.form = Form(files[0].name, names, dict(file.metadata() or {}), others)
        return None


def _shapes(weights: dict[str, torch.Tensor]) -> Shapes:
    return {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bits, so NaN equals NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = [part.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for part in (one, other)]
    return bool(torch.equal(*flat))
