"""One process prepares, the others wait, and nothing half-made is ever taken for whole."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from finetune.data import cache
from finetune.errors import RequestError, RunError
from finetune.run.launch import Launch

WAITING = Launch(rank=1, local_rank=1, world_size=2, local_world_size=2)


def prepare_slowly(folder: Path) -> None:
    time.sleep(0.5)
    (folder / "data").write_text("whole")


def once(folder: Path, leads: bool, results: multiprocessing.Queue) -> None:
    made = cache.prepare_once(
        folder, prepare_slowly, what="to test", launch=Launch() if leads else WAITING, timeout_seconds=20
    )
    results.put((leads, made, (folder / "data").read_text()))


def test_of_many_processes_one_prepares_and_all_see_it_whole(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    folder = tmp_path / "key"
    # Two that may prepare (two nodes on one file system) and two that wait.
    processes = [context.Process(target=once, args=(folder, i < 2, results)) for i in range(4)]
    for process in processes:
        process.start()
    seen = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(made for _, made, _ in seen) == 1
    assert all(made is False for leads, made, _ in seen if not leads)
    assert {content for *_, content in seen} == {"whole"}


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x"])
def test_a_cache_that_cannot_be_written_to_is_refused_by_the_variables_name(place: str) -> None:
    with pytest.raises(RequestError, match=rf"FINETUNE_CACHE: no prepared data can be kept in {place} \("):
        cache.prepare_once(Path(place, "key"), prepare_slowly, what="to test", launch=Launch(), timeout_seconds=1)


def test_a_cache_on_a_full_disk_is_told_by_the_variables_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is full.*FINETUNE_CACHE"), cache.kept_in(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_waiting_ends_with_the_name_of_what_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"for another process to tokenize, and gave up.*--data_timeout_seconds"):
        cache.prepare_once(tmp_path / "key", prepare_slowly, what="to tokenize", launch=WAITING, timeout_seconds=0.3)


def test_a_preparation_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "data").write_text("half")
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        cache.prepare_once(tmp_path / "key", fail, what="", launch=Launch(), timeout_seconds=1)
    assert not (tmp_path / "key").exists()
    assert not (tmp_path / "key.unfinished").exists()


def test_what_a_killed_run_left_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "key.unfinished").mkdir()
    (tmp_path / "key.unfinished" / "old").touch()
    assert cache.prepare_once(tmp_path / "key", prepare_slowly, what="", launch=Launch(), timeout_seconds=5)
    assert [path.name for path in (tmp_path / "key").iterdir()] == ["data"]


def test_a_changed_file_has_another_key(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("one")
    before = cache.file_state(str(path))
    path.write_text("three")
    assert cache.file_state(str(path)) != before
    assert cache.cache_key("a", before) != cache.cache_key("a", cache.file_state(str(path)))


def test_a_file_that_was_given_its_old_time_back_has_another_key(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("one")
    before, times = cache.file_state(str(path)), path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.file_state(str(path)) != before
