"""A file that is hashed on its way to the disk has the bytes and the record of one that is read back."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.training.checkpoints import hashed_file
from finetune.training.checkpoints.hashed_file import BLOCK_BYTES, DIRECT, Disk, HashedFile
from finetune.training.checkpoints.manifest import record_of

CHUNK = 4 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_file, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(hashed_file, "PIECE_BYTES", BLOCK_BYTES + 7)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def put(path: Path, content: bytes, disk: Disk, cut: int = 10**9) -> Any:
    with HashedFile(path, disk) as file:
        for begin in range(0, len(content), cut):
            assert file.write(content[begin : begin + cut]) == len(content[begin : begin + cut])
        return file.closed()


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 9 * CHUNK + 5])
@pytest.mark.parametrize("cut", [1000, 10**9])
def test_it_has_the_content_and_the_record_of_a_file_that_is_read_back(
    size: int, cut: int, disk: Disk, tmp_path: Path
) -> None:
    content = random.Random(size).randbytes(size)
    found = put(tmp_path / "file", content, disk, cut).result()
    assert (tmp_path / "file").read_bytes() == content
    assert found == record_of(tmp_path / "file")


def test_files_written_one_after_another_do_not_mix(disk: Disk, tmp_path: Path) -> None:
    contents = [random.Random(i).randbytes(CHUNK // 2 * i + i) for i in range(9)]
    records = [put(tmp_path / str(i), content, disk) for i, content in enumerate(contents)]
    assert [record.result() for record in records] == [record_of(tmp_path / str(i)) for i in range(9)]
    assert [(tmp_path / str(i)).read_bytes() for i in range(9)] == contents


def test_whole_chunks_go_past_the_page_cache_and_the_rest_does_not(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct_here(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    seen, write = [], os.pwrite

    def watched(handle: int, content: Any, offset: int) -> int:
        seen.append((bool(fcntl.fcntl(handle, fcntl.F_GETFL) & DIRECT), len(content)))
        return write(handle, content, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    put(tmp_path / "file", bytes(2 * CHUNK + 5), disk).result()
    assert seen == [(True, CHUNK), (True, CHUNK), (False, 5)]


def is_direct_here(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "tried", os.O_WRONLY | os.O_CREAT | DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_a_file_system_without_such_writes_gets_the_others(
    refuses: str, answer: int, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = getattr(os, refuses), []

    def stubborn(one: Any, *more: Any) -> Any:
        flags = more[0] if refuses == "open" else fcntl.fcntl(one, fcntl.F_GETFL)
        if flags & DIRECT:
            refused.append(one)
            raise OSError(answer, os.strerror(answer))
        return real(one, *more)

    monkeypatch.setattr(os, refuses, stubborn)
    content = random.Random(0).randbytes(2 * CHUNK + 5)
    found = put(tmp_path / "file", content, disk).result()
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == content
    assert found == record_of(tmp_path / "file")
    assert refused or not is_direct_here(tmp_path)


def test_a_short_write_is_completed(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, part, offset: write(handle, part[: BLOCK_BYTES + 9], offset))
    content = random.Random(1).randbytes(3 * CHUNK)
    put(tmp_path / "file", content, disk).result()
    assert (tmp_path / "file").read_bytes() == content


def test_a_full_disk_is_an_error_of_its_file_alone(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as while_full:
        while_full.setattr(os, "pwrite", full)
        lost = put(tmp_path / "lost", bytes(5 * CHUNK), disk)
        with pytest.raises(OSError, match="No space left") as error:
            lost.result()
    assert error.value.errno == errno.ENOSPC
    assert put(tmp_path / "next", bytes(5 * CHUNK), disk).result() == record_of(tmp_path / "next")


def test_a_disk_that_takes_nothing_is_an_error(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0])  # a second call would fail
    monkeypatch.setattr(os, "pwrite", lambda *_: next(answers))
    with pytest.raises(OSError, match="the disk takes nothing of 5 bytes at 0") as error:
        put(tmp_path / "file", bytes(5), disk).result()
    assert error.value.errno == errno.EIO


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_it_is_as_readable_as_its_folder(mode: int, disk: Disk, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    folder.chmod(mode)
    put(folder / "file", b"content", disk).result()
    assert stat.S_IMODE((folder / "file").stat().st_mode) == mode & 0o666


@pytest.mark.parametrize("is_zip", [True, False])
def test_torch_opens_what_it_has_saved_there(is_zip: bool, disk: Disk, tmp_path: Path) -> None:
    states: dict[str, Any] = {"many": torch.arange(10_000), "few": torch.ones(2), "word": "text"}
    with HashedFile(tmp_path / "file.pt", disk) as file:
        torch.save(states, file, _use_new_zipfile_serialization=is_zip)
        record = file.closed()
    assert record.result() == record_of(tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["word"] == "text"
    assert all(torch.equal(found[name], states[name]) for name in ("many", "few"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_that_torch_cannot_save_takes_neither_handle_nor_memory_with_it(
    is_zip: bool, disk: Disk, tmp_path: Path
) -> None:
    states = {"many": torch.arange(10_000), "none": lambda: None}  # pickle refuses it
    chunks = len(disk.chunks)
    for number in range(chunks + 1):
        with (
            pytest.raises((pickle.PicklingError, AttributeError), match="lambda"),
            HashedFile(tmp_path / str(number), disk) as file,
        ):
            torch.save(states, file, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file.handle)
    assert len(disk.chunks) == chunks
    content = bytes(5 * CHUNK)
    assert put(tmp_path / "next", content, disk).result() == record_of(tmp_path / "next")
