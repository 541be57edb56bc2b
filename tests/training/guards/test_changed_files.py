"""A data file that changes while it is read is named; what does the run no harm is not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from finetune.data import changes
from finetune.data.changes import UnchangedFiles, mapped_files, unchanged_rows
from finetune.errors import RunError


def test_a_file_that_is_cut_off_while_it_is_read_is_named_in_place_of_what_its_reader_says(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("1\n" * 40)

    def rows() -> object:
        for number in range(40):
            if number == 20:
                file.write_text("1\n")
                raise ValueError("the reader's own words")
            yield number

    read = []
    with pytest.raises(RunError, match=r"rows\.txt has changed .* had 80 bytes, and now has 2 bytes"):
        read += list(unchanged_rows(rows(), UnchangedFiles([file])))


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.memmap:
    """Prepared data that this process has mapped."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(changes, "ASK_AGAIN_SECONDS", (0.0,))
    (tmp_path / "train").mkdir()
    (tmp_path / "train/tokens.bin").write_bytes(bytes(8192))
    return np.memmap(tmp_path / "train/tokens.bin", np.uint8, "r")


def cut_off(file: Path) -> None:
    os.truncate(file, 4096)


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"\1" * 8192)
    os.utime(file, (1, 1))


@pytest.mark.parametrize(("harm", "said"), [(cut_off, "now has 4,096 bytes"), (overwrite, "now has different content")])
def test_mapped_data_that_is_cut_off_or_written_is_named(
    harm: object, said: str, tokens: np.memmap, tmp_path: Path
) -> None:
    found = mapped_files()
    assert list(found.states) == [str(tmp_path / "train/tokens.bin")]
    found.check()
    harm(tmp_path / "train/tokens.bin")
    with pytest.raises(RunError, match=rf"tokens\.bin has changed .* {said}"):
        found.check()


def touch(file: Path) -> None:
    os.utime(file, (1, 1))


def replace(file: Path) -> None:
    file.with_name("new").write_bytes(b"another run's")
    file.with_name("new").replace(file)


@pytest.mark.parametrize("change", [touch, replace, Path.unlink])
def test_mapped_data_may_be_touched_replaced_or_deleted_for_the_run_has_it(
    change: object, tokens: np.memmap, tmp_path: Path
) -> None:
    found = mapped_files()
    change(tmp_path / "train/tokens.bin")
    found.check()
    found.check()
    assert not tokens.any()


def test_what_the_system_maps_is_no_data(tmp_path: Path, tokens: np.memmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "elsewhere"))
    assert tokens[0] == 0
    assert mapped_files().states == {}


def test_a_file_system_that_fails_to_answer_once_is_asked_again(
    tmp_path: Path, tokens: np.memmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train/tokens.bin"
    found, stat, asked = UnchangedFiles([file]), os.stat, []

    def fails_once(path: str) -> os.stat_result:
        asked.append(path)
        if len(asked) == 1:
            raise OSError(116, "Stale file handle")
        return stat(path)

    monkeypatch.setattr(changes.os, "stat", fails_once)
    found.check()
    assert asked == [str(file)] * 2
    monkeypatch.undo()
    file.unlink()
    with pytest.raises(RunError, match="is gone"):
        found.check()


def test_one_that_never_answers_is_asked_for_four_seconds_and_some_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, slept = tmp_path / "rows.txt", []
    file.write_text("1\n")
    found = UnchangedFiles([file])
    file.unlink()
    monkeypatch.setattr(changes.time, "sleep", slept.append)
    with pytest.raises(RunError, match=r"rows\.txt .*is gone"):
        found.check()
    assert slept == [0.2, 1.0, 3.0, 0.0]
