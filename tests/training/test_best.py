"""The best checkpoint becomes the final model: only one of this run folder, that verifies and runs no code."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from test_choice import FILES, MANIFEST, flip, save

from finetune.training.checkpoints.final import best_to_load


def test_one_that_verifies_is_loaded_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = save(tmp_path, 4)
    assert best_to_load(tmp_path, str(place)) == best_to_load(tmp_path, "/moved/since/checkpoint-4") == place
    assert capsys.readouterr().out == ""


def test_one_with_a_flipped_bit_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = save(tmp_path, 4)
    flip(place / "model.safetensors")
    assert best_to_load(tmp_path, str(place)) is None
    (said,) = capsys.readouterr().out.splitlines()
    assert "model.safetensors has changed since it was saved" in said
    assert said.endswith("The last weights are kept.")


@pytest.mark.parametrize("named", ["checkpoint-8", "../evil", "/", "", None])
def test_one_that_is_not_in_the_run_folder_is_not(named: str | None, tmp_path: Path) -> None:
    save(tmp_path / "run", 4)
    (tmp_path / "evil").mkdir()
    assert best_to_load(tmp_path / "run", named) is None


def test_one_elsewhere_is_not_though_it_verifies(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert best_to_load(tmp_path / "run", str(save(tmp_path / "evil", 4))) is None


@pytest.mark.parametrize("has_manifest", [True, False])
def test_one_that_would_run_code_is_not(has_manifest: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = save(tmp_path, 4, {**FILES, "global_step4/mp_rank_00_model_states.pt": pickle.dumps(print)})
    if not has_manifest:
        (place / MANIFEST).unlink()
    assert best_to_load(tmp_path, str(place)) is None
    assert "mp_rank_00_model_states.pt" in capsys.readouterr().out
