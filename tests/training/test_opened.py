"""A final model counts as saved once it opens as it was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.errors import RunError
from finetune.training.checkpoints.final import open_final, save_final
from finetune.training.saving import trained_shapes

SHAPES = {"a.weight": [2, 3], "b.bias": [4]}


def saved(folder: Path, **other: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | other
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_what_was_written_opens(tmp_path: Path) -> None:
    open_final(tmp_path, save_final(tmp_path, lambda folder: saved(folder) and None), SHAPES)


def test_a_model_that_is_no_numbers_has_diverged(tmp_path: Path) -> None:
    records = save_final(tmp_path, lambda folder: saved(folder, **{"b.bias": torch.full((4,), float("nan"))}) and None)
    with pytest.raises(RunError, match=r"diverged: b\.bias .*non-finite"):
        open_final(tmp_path, records, SHAPES)


def test_shapes_are_those_of_the_training(tmp_path: Path) -> None:
    records = save_final(tmp_path, lambda folder: saved(folder, **{"b.bias": torch.zeros(5)}) and None)
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(RunError, match=r"has shape \[5\], but was trained with \[4\]") as error:
        open_final(tmp_path, records, SHAPES)
    assert str(tmp_path / "checkpoint-4") in str(error.value)


def test_a_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    records = save_final(tmp_path, lambda folder: saved(folder) and None)
    with pytest.raises(RunError, match=r"c\.weight is missing"):
        open_final(tmp_path, records, {**SHAPES, "c.weight": [1]})


def test_a_weight_that_transformers_does_not_save_is_not_missed() -> None:
    class Positions(torch.nn.Module):
        _keys_to_ignore_on_save = ("positions.weight",)

        def __init__(self) -> None:
            super().__init__()
            self.positions, self.head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2, bias=False)

    assert trained_shapes(Positions()) == {"head.weight": [2, 2]}


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    records = save_final(tmp_path, lambda folder: (folder / "config.json").write_text("{}") and None)
    with pytest.raises(RunError, match="no weights"):
        open_final(tmp_path, records, SHAPES)


@pytest.mark.parametrize("spoil", ["a byte", "all of it"])
def test_a_file_that_is_no_longer_what_was_written_is_named(spoil: str, tmp_path: Path) -> None:
    records = save_final(tmp_path, lambda folder: saved(folder) and None)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content) if spoil == "a byte" else path.unlink()
    with pytest.raises(RunError, match=r"model\.safetensors"):
        open_final(tmp_path, records, SHAPES)
