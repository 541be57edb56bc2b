"""The newest checkpoints that verify are kept, and the best; nothing else of what is older."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_manifest import make

from finetune.training.checkpoints import rotation
from finetune.training.checkpoints.manifest import checkpoints_in, problems
from finetune.training.checkpoints.rotation import Keeper
from finetune.training.checkpoints.writing import clear_leftovers, delete


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in checkpoints_in(folder)]


def run_of(folder: Path, *steps: int) -> Keeper:
    for step in steps:
        make(folder / f"checkpoint-{step}", step)
    return Keeper(folder)


def break_silently(checkpoint: Path) -> None:
    """Other content of the same size and age."""
    path = checkpoint / "optimizer.pt"
    its = path.stat()
    path.write_bytes(b"x" * its.st_size)
    os.utime(path, ns=(its.st_atime_ns, its.st_mtime_ns))


def test_the_newest_stay(tmp_path: Path) -> None:
    run_of(tmp_path, 2, 4, 6, 8).rotate(2, tmp_path / "checkpoint-8", None)
    assert steps_in(tmp_path) == [8, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-8"]


def test_the_best_stays_beside_them(tmp_path: Path) -> None:
    run_of(tmp_path, 2, 4, 6, 8).rotate(1, tmp_path / "checkpoint-8", str(tmp_path / "checkpoint-2"))
    assert steps_in(tmp_path) == [8, 2]


def test_without_a_limit_all_stay(tmp_path: Path) -> None:
    keeper = run_of(tmp_path, 2, 4)
    keeper.trust(tmp_path / "checkpoint-4")
    keeper.rotate(None, tmp_path / "checkpoint-4", None)
    assert steps_in(tmp_path) == [4, 2]
    assert keeper.trusted == {}, "each save hands it to another process and back"


def test_steps_count_and_not_the_clock(tmp_path: Path) -> None:
    keeper = run_of(tmp_path, 100, 20, 9)
    for age, step in enumerate((100, 20, 9)):
        os.utime(tmp_path / f"checkpoint-{step}", (1e9 + age, 1e9 + age))
    keeper.rotate(1, tmp_path / "checkpoint-100", None)
    assert steps_in(tmp_path) == [100]


def test_what_is_broken_does_not_count_as_kept(tmp_path: Path) -> None:
    keeper = run_of(tmp_path, 2, 4, 6, 8)
    break_silently(tmp_path / "checkpoint-6")
    keeper.rotate(2, tmp_path / "checkpoint-8", None)
    assert steps_in(tmp_path) == [8, 6, 4]


def test_nothing_goes_where_nothing_verifies(tmp_path: Path) -> None:
    keeper = run_of(tmp_path, 2, 4)
    for step in (2, 4):
        break_silently(tmp_path / f"checkpoint-{step}")
    keeper.rotate(1, tmp_path / "checkpoint-4", None)
    assert steps_in(tmp_path) == [4, 2]


def test_a_run_that_goes_back_sets_later_ones_aside_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = run_of(tmp_path, 2, 4, 8, 12)
    (tmp_path / "superseded-checkpoint-12" / "of an earlier time").mkdir(parents=True)
    keeper.go_on_from(tmp_path / "checkpoint-4", 4)
    assert steps_in(tmp_path) == [4, 2]
    assert problems(tmp_path / "superseded-checkpoint-12", hashes=True) == []
    assert (tmp_path / "latest").read_text() == "checkpoint-4\n"
    (said,) = capsys.readouterr().out.splitlines()
    assert "checkpoint-12, checkpoint-8." in said
    make(tmp_path / "checkpoint-6", 6)
    keeper.trust(tmp_path / "checkpoint-6")
    keeper.rotate(1, tmp_path / "checkpoint-6", None)
    assert steps_in(tmp_path) == [6]
    assert sorted(p.name for p in tmp_path.glob("s*")) == ["superseded-checkpoint-12", "superseded-checkpoint-8"]


def test_a_run_that_goes_on_from_the_newest_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, 2, 4).go_on_from(tmp_path / "checkpoint-4", 4)
    assert steps_in(tmp_path) == [4, 2]
    assert capsys.readouterr().out == ""


def test_the_one_that_was_chosen_is_not_read_again_nor_any_that_nothing_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, read = run_of(tmp_path, 2, 4, 6), []
    keeper.go_on_from(tmp_path / "." / "checkpoint-6", 6)
    make(tmp_path / "checkpoint-8", 8)
    keeper.trust(tmp_path / "checkpoint-8")
    monkeypatch.setattr(rotation, "problems", lambda path, hashes: read.append(path.name) or [])
    keeper.rotate(4, tmp_path / "checkpoint-8", None)
    assert (steps_in(tmp_path), read) == ([8, 6, 4, 2], [])
    keeper.rotate(3, tmp_path / "checkpoint-8", None)
    assert (steps_in(tmp_path), read) == ([8, 6, 4], ["checkpoint-4"])
    keeper.rotate(2, tmp_path / "checkpoint-8", None)
    assert (steps_in(tmp_path), read) == ([8, 6], ["checkpoint-4"])


def test_one_without_a_manifest_is_not_trusted_though_a_run_goes_on_from_it(tmp_path: Path) -> None:
    keeper = run_of(tmp_path, 2, 4)
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()
    keeper.go_on_from(tmp_path / "checkpoint-4", 4)
    assert not keeper._verifies(tmp_path / "checkpoint-4")


def test_what_a_disk_says_of_one_checkpoint_does_not_keep_the_others_from_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = run_of(tmp_path, 2, 4, 6, 8)

    def fail(path: Path) -> None:
        if path.name == "checkpoint-4":
            raise PermissionError(13, "Permission denied", str(path))
        delete(path)

    monkeypatch.setattr(rotation, "delete", fail)
    keeper.rotate(2, tmp_path / "checkpoint-8", None)
    assert steps_in(tmp_path) == [8, 6, 4]
    assert capsys.readouterr().out == "warning: checkpoint-4 stays as it is: Permission denied.\n"
    keeper.trust(tmp_path / "checkpoint-7")  # which somebody has removed
    assert "checkpoint-7" in capsys.readouterr().out


def test_the_best_is_known_by_its_name_where_the_run_folder_has_moved(tmp_path: Path) -> None:
    run_of(tmp_path, 2, 4, 6).rotate(1, tmp_path / "checkpoint-6", "/elsewhere/run/checkpoint-2")
    assert steps_in(tmp_path) == [6, 2]


def test_what_was_trusted_is_read_again_once_a_file_has_changed(tmp_path: Path) -> None:
    keeper = run_of(tmp_path, 2, 4)
    keeper.trust(tmp_path / "checkpoint-4")
    break_silently(tmp_path / "checkpoint-4")
    assert keeper._verifies(tmp_path / "checkpoint-4")  # nothing tells it from what it was
    os.utime(tmp_path / "checkpoint-4" / "optimizer.pt")
    keeper.rotate(1, tmp_path / "checkpoint-4", None)
    assert steps_in(tmp_path) == [4, 2]


def test_a_deletion_that_was_cut_off_before_does_not_stand_in_the_way_of_another(tmp_path: Path) -> None:
    keeper = run_of(tmp_path, 2, 4)
    (tmp_path / "deleting-checkpoint-2/global_step1").mkdir(parents=True)
    keeper.rotate(1, tmp_path / "checkpoint-4", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4"]


def test_what_a_kill_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    (tmp_path / "unfinished-checkpoint-4/checkpoint-4").mkdir(parents=True)
    (tmp_path / "deleting-checkpoint-1/global_step1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "unfinished-link").symlink_to(tmp_path / "elsewhere")
    clear_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "elsewhere", "unfinished-link"]
