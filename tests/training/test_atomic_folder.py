"""A folder that is written is whole or not there, also where one of its name was there before."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from finetune.errors import RunError
from finetune.run.files import IDENTITY, LOCK
from finetune.training.checkpoints import writing
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.final import save_final
from finetune.training.checkpoints.identity import Identity, new_id
from finetune.training.checkpoints.lock import lock_run_folder
from finetune.training.checkpoints.manifest import Layout, problems, read_manifest
from finetune.training.checkpoints.writing import About
from finetune.training.run_folder import explained_disk_errors

ABOUT = About(step=4, epoch=0.5, global_batch_size=32, layout=Layout("ddp", 1))


def write(folder: Path, word: str) -> None:
    (folder / "global_step4").mkdir()
    (folder / "global_step4" / "shard.pt").write_text(word)
    (folder / "model.safetensors").write_text(word)


def test_it_has_its_name_its_manifest_and_a_pointer(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-4"
    with AtomicFolder(place, ABOUT) as folder:
        write(folder, "one")
        assert not place.exists()
        assert folder == tmp_path / "unfinished-checkpoint-4" / "checkpoint-4"
    assert problems(place, hashes=True) == []
    manifest = read_manifest(place)
    assert (manifest.step, manifest.epoch, manifest.global_batch_size) == (4, 0.5, 32)
    assert manifest.layout == Layout("ddp", 1)
    assert set(manifest.files) == {"global_step4/shard.pt", "model.safetensors"}
    assert manifest.versions["torch"]
    assert (tmp_path / "latest").read_text() == "checkpoint-4\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "latest"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_one_of_the_same_name_gives_way(can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_exchange:
        monkeypatch.setattr(writing, "_exchange", lambda one, other: False)
    for leftover in ("replaced-checkpoint-4", "unfinished-checkpoint-4/checkpoint-4"):  # of saves that were cut off
        (tmp_path / leftover / "global_step4").mkdir(parents=True)
        (tmp_path / leftover / "model-00001.safetensors").write_text("another")
    for word in ("one", "two"):
        with AtomicFolder(tmp_path / "checkpoint-4", ABOUT) as folder:
            write(folder, word)
    assert (tmp_path / "checkpoint-4" / "model.safetensors").read_text() == "two"
    assert problems(tmp_path / "checkpoint-4", hashes=True) == []
    aside = ["replaced-checkpoint-4"] if can_exchange else []  # which nothing looks at there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "latest", *aside]


def test_one_that_was_moved_aside_for_none_is_had_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(folder: Path, place: Path) -> None:
        if place.name == "checkpoint-4" and not place.exists():
            raise KeyboardInterrupt
        rename(folder, place)

    rename = os.replace
    with AtomicFolder(tmp_path / "checkpoint-4", ABOUT) as folder:
        write(folder, "one")
    monkeypatch.setattr(writing, "_exchange", lambda one, other: False)
    monkeypatch.setattr(writing.os, "replace", stop)
    second = AtomicFolder(tmp_path / "checkpoint-4", ABOUT)
    with pytest.raises(KeyboardInterrupt), second as folder:
        write(folder, "two")
    assert not (tmp_path / "checkpoint-4").exists()
    writing.clear_leftovers(tmp_path)
    assert (tmp_path / "checkpoint-4" / "model.safetensors").read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "latest"]


@dataclass(frozen=True)
class Flushed:
    """What was forced to the disk: its name in the run folder, how many bytes it had then, and who was there."""

    name: str
    bytes: int
    there: frozenset[str]


@pytest.fixture
def flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Flushed]:
    """Every fsync from now on, in order."""
    seen: list[Flushed] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        size = 0 if path.is_dir() else os.fstat(handle).st_size
        there = frozenset(one.name for one in tmp_path.iterdir())
        seen.append(Flushed(path.relative_to(tmp_path).as_posix(), size, there))

    monkeypatch.setattr(os, "fsync", watched)
    return seen


@pytest.mark.parametrize("identity", [None, Identity(new_id(), {}, {}, {}, ())], ids=["", "of a run"])
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "in place of another"])
def test_all_of_it_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_pointer(
    identity: Identity | None, replaces: bool, tmp_path: Path, flushes: list[Flushed]
) -> None:
    if replaces:
        with AtomicFolder(tmp_path / "checkpoint-4", ABOUT) as folder:
            write(folder, "another")
        (tmp_path / "latest").unlink()
        flushes.clear()
    with AtomicFolder(tmp_path / "checkpoint-4", replace(ABOUT, identity=identity)) as folder:
        write(folder, "one")
    inside = "unfinished-checkpoint-4/checkpoint-4"
    records = [] if identity is None else [f"{inside}/{IDENTITY}"]
    names = [flushed.name for flushed in flushes]
    assert sorted(names[:2]) == [f"{inside}/global_step4/shard.pt", f"{inside}/model.safetensors"]
    folders = [f"{inside}/global_step4", inside]
    assert names[2:] == [*records, f"{inside}/manifest.json", *folders, ".", "latest.unfinished", "."]
    for flushed in flushes:  # of a file that is written to afterwards, or not yet, the disk would have a part
        written = tmp_path / flushed.name.replace(f"{inside}/", "checkpoint-4/").removesuffix(".unfinished")
        if written.is_file():
            assert flushed.bytes == written.stat().st_size > 0, flushed.name
    *within, renamed, pointer, pointed = flushes
    assert replaces or all("checkpoint-4" not in flushed.there for flushed in within)
    assert {"checkpoint-4", "unfinished-checkpoint-4"} <= renamed.there, "what was there before goes last"
    assert "latest" not in renamed.there | pointer.there
    assert "latest" in pointed.there


def test_a_text_is_written_beside_its_place_and_flushed_before_it_takes_it(
    tmp_path: Path, flushes: list[Flushed]
) -> None:
    (tmp_path / "latest").write_text("checkpoint-2\n")
    writing.write_durably(tmp_path / "latest", "checkpoint-4\n")
    assert [(flushed.name, flushed.bytes) for flushed in flushes] == [("latest.unfinished", 13), (".", 0)]
    assert [flushed.there for flushed in flushes] == [{"latest", "latest.unfinished"}, {"latest"}]
    assert (tmp_path / "latest").read_text() == "checkpoint-4\n"


def test_old_weights_are_gone_from_the_disk_before_new_ones_come_and_these_before_the_copy_is(
    tmp_path: Path, flushes: list[Flushed]
) -> None:
    save_final(tmp_path, lambda folder: files(folder, "config.json", "model.safetensors"))
    flushes.clear()
    save_final(tmp_path, lambda folder: files(folder, "config.json", "model.safetensors"))
    names = [flushed.name for flushed in flushes]
    inside = "unfinished-final/final"
    assert sorted(names[:2]) == [f"{inside}/config.json", f"{inside}/model.safetensors"]
    assert names[2:] == [inside, ".", ".", "."]
    placed, gone, moved = (flushed.there for flushed in flushes[-3:])
    assert {"final", "model.safetensors"} <= placed
    assert "final" in gone
    assert "model.safetensors" not in gone
    assert {"final", "model.safetensors"} <= moved


def fail_half_way(folder: Path) -> None:
    (folder / "model.safetensors").write_text("tw")
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_fails_in_the_middle_leaves_the_earlier_one(tmp_path: Path) -> None:
    with AtomicFolder(tmp_path / "checkpoint-4", ABOUT) as folder:
        write(folder, "one")
    second = AtomicFolder(tmp_path / "checkpoint-4", ABOUT)
    with pytest.raises(RunError, match=r"checkpoint-4 could not be saved: .*Input/output error"), second as folder:
        fail_half_way(folder)
    assert (tmp_path / "checkpoint-4" / "model.safetensors").read_text() == "one"
    assert problems(tmp_path / "checkpoint-4", hashes=True) == []
    with AtomicFolder(tmp_path / "checkpoint-4", ABOUT) as folder:
        write(folder, "three")  # nothing of the second attempt is in its way
    assert problems(tmp_path / "checkpoint-4", hashes=True) == []


def by_torch(path: Path) -> None:
    torch.save({"x": torch.zeros(3_000_000)}, path)


def by_safetensors(path: Path) -> None:
    save_file({"x": torch.zeros(3_000_000)}, path)


def by_tokenizers(path: Path) -> None:
    """In a bare Exception, as a tokenizer is saved that fills what is left of a disk."""
    words = {str(i): i for i in range(400_000)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(path))


def save_after(command: list[Any], save: Any, folder: Path) -> None:
    subprocess.run(command, check=True)
    save(folder / "model.safetensors")


@pytest.mark.parametrize(
    "save", [by_torch, by_safetensors, by_tokenizers, lambda path: path.write_bytes(b"x" * 12_000_000)]
)
@pytest.mark.parametrize("becomes", ["full", "read-only"])
def test_what_a_disk_does_not_take_is_said_whichever_library_wrote(save: Any, becomes: str, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here: that takes root")
    try:
        with AtomicFolder(disk / "checkpoint-2", replace(ABOUT, step=2)) as folder:
            write(folder, "one")
        second = AtomicFolder(disk / "checkpoint-4", ABOUT)
        freeze = ["mount", "-o", "remount,ro", disk] if becomes == "read-only" else ["true"]
        with pytest.raises(RunError) as refused, explained_disk_errors(disk), second as folder:
            save_after(freeze, save, folder)
        words = {"full": f"the disk of {disk} is full", "read-only": "checkpoint-4 could not be saved: "}
        assert words[becomes] in str(refused.value)
        assert "Earlier checkpoints are whole" in str(refused.value)
        assert problems(disk / "checkpoint-2", hashes=True) == []
        assert not (disk / "checkpoint-4").exists()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_tokenizer_that_cannot_be_written_is_a_failed_save(tmp_path: Path) -> None:
    """tokenizers raises a bare Exception, which ended a run in a traceback, without a word of ours."""
    with (
        pytest.raises(RunError, match=r"checkpoint-4 could not be saved: .*\(os error 2\).* Earlier checkpoints"),
        AtomicFolder(tmp_path / "checkpoint-4", ABOUT) as folder,
    ):
        Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "missing" / "tokenizer.json"))


def files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text(folder.name + name)


def test_a_final_model_leaves_no_part_of_the_one_before(tmp_path: Path) -> None:
    sharded = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    save_final(tmp_path, lambda folder: files(folder, "config.json", *sharded))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", *sharded}
    save_final(tmp_path, lambda folder: files(folder, "config.json", "model.safetensors"))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("shards", [0, 2])
def test_a_final_model_is_never_a_mix_of_two(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after each of its moves: old weights beside the new config or tokenizer would open without a word."""
    new = [f"model-{i}-of-{shards}.safetensors" for i in range(shards)] + ["model.safetensors.index.json"]
    new = ["config.json", "tokenizer.json", *(new if shards else ["model.safetensors"])]
    old = {"config.json", "tokenizer.json", "model.safetensors"}
    opens = {"model.safetensors", "model.safetensors.index.json"}
    moves = 0

    def stop_at(count: int, do: object) -> object:
        def step(*args: object) -> None:
            nonlocal moves
            if moves == count:
                raise KeyboardInterrupt
            moves += 1
            do(*args)  # type: ignore[operator]

        return step

    seen = set()
    for count in range(1, len(old) + len(new) + 2):
        folder, moves = tmp_path / str(count), 0
        folder.mkdir()
        save_final(folder, lambda target: files(target, *old))
        before = {path.name: path.read_text() for path in folder.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr("os.replace", stop_at(count, writing.os.replace))
            patch.setattr(Path, "unlink", stop_at(count, Path.unlink))
            try:
                save_final(folder, lambda target: [(target / name).write_text("new") for name in new])
            except KeyboardInterrupt:
                seen.add(count)
        now = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
        assert now == before or not opens & set(now) or {now[name] for name in new} == {"new"}, (count, now)
    assert len(seen) >= len(new)


@pytest.mark.parametrize(("number", "is_said"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_flushes_no_folders_is_none_that_has_failed(
    number: int, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") if is_said else nullcontext():
        writing.flush(tmp_path)


def test_a_save_locks_its_run_folder_again_if_the_lock_was_deleted_and_makes_none_that_is_gone(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    assert lock_run_folder(run, "a test") is None
    (run / LOCK).unlink()
    with AtomicFolder(run / "checkpoint-4", ABOUT) as folder:
        write(folder, "one")
    assert (run / LOCK).is_file()
    shutil.rmtree(run)
    with pytest.raises(RunError, match="run is gone: it was deleted"), AtomicFolder(run / "checkpoint-8", ABOUT):
        pass
    assert not run.exists()


def test_a_folder_that_is_deleted_during_a_save_is_said_to_be_gone(tmp_path: Path) -> None:
    def save() -> None:
        with AtomicFolder(tmp_path / "run" / "checkpoint-4", ABOUT) as folder:
            shutil.rmtree(tmp_path / "run")
            torch.save({}, folder / "optimizer.pt")

    with pytest.raises(RunError, match="run is gone: it was deleted"):
        save()
