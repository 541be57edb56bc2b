"""What a manifest says of a folder is found again, byte by byte; and what is no manifest is refused in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from finetune.errors import RequestError
from finetune.training.checkpoints.manifest import (
    MANIFEST,
    FileRecord,
    Layout,
    Manifest,
    checkpoints_in,
    files_of,
    hash_of,
    in_short,
    problems,
    read_manifest,
    record_of,
    shares,
    write_manifest,
)

FILES = {
    "model.safetensors": b"w" * 10_000,
    "optimizer.pt": b"o" * 20_000,
    "latest": b"global_step4",
    "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt": b"z" * 5_000,
    "pytorch_model_fsdp_0/.metadata": b"",
}
LAYOUT = Layout("deepspeed", 2, zero_stage=3)


def make(folder: Path, step: int = 4) -> Manifest:
    """A checkpoint with a manifest."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    files = {name: FileRecord(size, hash_of(folder / name)) for name, size in files_of(folder)[0].items()}
    manifest = Manifest(step, 0.5, "2026-01-02T03:04:05Z", 32, LAYOUT, {"torch": "2.13.0"}, files)
    write_manifest(folder, manifest)
    return manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make(tmp_path / "checkpoint-4")
    return tmp_path / "checkpoint-4"


def test_what_is_written_is_read_again_and_verifies(tmp_path: Path) -> None:
    manifest = make(tmp_path / "checkpoint-4")
    assert read_manifest(tmp_path / "checkpoint-4") == manifest
    assert set(manifest.files) == set(FILES)
    assert manifest.bytes == sum(map(len, FILES.values()))
    assert problems(tmp_path / "checkpoint-4", hashes=True) == []


def test_the_hash_is_that_of_the_xxhash_library(tmp_path: Path) -> None:
    path = tmp_path / "more than one block"
    path.write_bytes(os.urandom(9_000_001))
    assert hash_of(path) == xxhash.xxh3_128_hexdigest(path.read_bytes())
    path.chmod(0o600)
    path.parent.chmod(0o750)
    assert record_of(path, to_disk=True) == FileRecord(9_000_001, hash_of(path))
    assert path.stat().st_mode & 0o777 == 0o640  # as its folder


@pytest.mark.parametrize("name", [name for name, content in FILES.items() if content])
def test_one_flipped_bit_is_found_by_hashes_alone(name: str, checkpoint: Path) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)
    assert problems(checkpoint, hashes=False) == []
    assert problems(checkpoint, hashes=True) == [f"checkpoint-4/{name} has changed since it was saved."]


def test_every_flipped_bit_of_the_manifest_itself_is_found(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    whole = path.read_bytes()
    before = read_manifest(checkpoint)
    missed = []
    for at in range(len(whole)):
        torn = bytearray(whole)
        torn[at] ^= 4
        path.write_bytes(torn)
        if not problems(checkpoint, hashes=True):
            missed.append(read_manifest(checkpoint) == before)  # in the space between two words
    assert all(missed)
    assert len(missed) < len(whole) / 20


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda f: (f / "optimizer.pt").unlink(), ["checkpoint-4/optimizer.pt is missing."], id="missing"),
        pytest.param(
            lambda f: os.truncate(f / "optimizer.pt", 19_999),
            ["checkpoint-4/optimizer.pt has 19,999 bytes, and manifest.json says 20,000."],
            id="truncated",
        ),
        pytest.param(
            lambda f: (f / "global_step4/more.pt").write_bytes(b"x"),
            ["checkpoint-4/global_step4/more.pt is not in manifest.json."],
            id="one too many",
        ),
        pytest.param(
            lambda f: ((f / "latest").unlink(), (f / "latest").symlink_to("optimizer.pt")),
            ["checkpoint-4/latest is a link or not a regular file, and is not opened."],
            id="a link",
        ),
        pytest.param(
            lambda f: ((f / "global_step4").rename(f.parent / "away"), (f / "global_step4").symlink_to("../away")),
            [
                "checkpoint-4/global_step4 is a link or not a regular file, and is not opened.",
                "checkpoint-4/global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt is missing.",
            ],
            id="a folder that is a link",
        ),
        pytest.param(
            lambda f: ((f / "latest").unlink(), os.mkfifo(f / "latest")),
            ["checkpoint-4/latest is a link or not a regular file, and is not opened."],
            id="a pipe",
        ),
        pytest.param(
            lambda f: (f / "/".join("d" * 60)).mkdir(parents=True),
            [f"checkpoint-4/{'/'.join('d' * 51)} is a link or not a regular file, and is not opened."],
            id="folders in each other, as Python 3.11 cannot walk",
        ),
        pytest.param(
            lambda f: (f / MANIFEST).unlink(),
            ["checkpoint-4/manifest.json: cannot be read (there is no such file)."],
            id="no manifest",
        ),
        pytest.param(
            lambda f: write_manifest(f, replace(read_manifest(f), step=8)),
            ["checkpoint-4: manifest.json is for step 8."],
            id="another step's",
        ),
    ],
)
def test_other_names_sizes_and_kinds_are_found_without_reading(
    spoil: Callable[[Path], Any], said: list[str], checkpoint: Path
) -> None:
    spoil(checkpoint)
    assert problems(checkpoint, hashes=False) == said
    assert problems(checkpoint, hashes=True) == said


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.safetensors", "a/../../b", "", ".", "a//b", "./a", "a\\b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, files={**manifest.files, name: FileRecord(0, "0" * 32)}))
    with pytest.raises(RequestError, match="which is not a file inside the checkpoint"):
        read_manifest(checkpoint)


def edited(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {**content, **changes}


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(edited(step=-1), id="step"),
        pytest.param(edited(step=True), id="a step that is no number"),
        pytest.param(edited(epoch="1"), id="epoch"),
        pytest.param(edited(files=[]), id="files"),
        pytest.param(edited(files={"a": {"bytes": 1}}), id="no hash"),
        pytest.param(edited(files={"a": {"bytes": 1, "xxh3_128": 7}}), id="a hash that is no text"),
        pytest.param(edited(files={"a": None}), id="no record"),
        pytest.param(edited(layout=None), id="layout"),
        pytest.param(edited(layout={"engine": "ddp"}), id="half a layout"),
        pytest.param(edited(versions="2.13"), id="versions"),
        pytest.param(edited(format=2), id="format"),
        pytest.param(edited(global_batch_size=16), id="changed by hand"),
        pytest.param(lambda content: {k: v for k, v in content.items() if k != "saved"}, id="a key less"),
        pytest.param(lambda content: [content], id="a list"),
    ],
)
def test_a_manifest_of_another_form_is_refused_in_words(edit: Callable[[Any], Any], checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(RequestError, match=r"^checkpoint-4/manifest\.json"):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "is not valid JSON", id="empty"),
        pytest.param(b'{"format": 1', "is not valid JSON", id="torn"),
        pytest.param(b"\xff\xfe", "is UTF-16.*not UTF-8", id="UTF-16"),
        pytest.param(b"\xff\xff", "is not UTF-8 text", id="no UTF-8"),
        pytest.param(b"[" * 100_000, "deeper than 50 levels", id="deep"),
        pytest.param(b'{"a":' * 51 + b"1" + b"}" * 51, "deeper than 50 levels", id="a little too deep"),
        pytest.param(b'{"step": ' + b"9" * 5000 + b"}", "is not valid JSON", id="a long number"),
        pytest.param(b" " * (64 * 2**20 + 1), "more than 64 MiB", id="large"),
    ],
)
def test_json_has_bounds(content: bytes, said: str, checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(RequestError, match=said):
        read_manifest(checkpoint)


def test_brackets_in_a_string_are_not_levels(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, versions={"torch": '[[[[[[[[[["\\['}))
    assert read_manifest(checkpoint).versions == {"torch": '[[[[[[[[[["\\['}


def test_a_manifest_that_is_a_pipe_or_a_link_is_not_waited_for(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).rename(checkpoint / "away")
    (checkpoint / MANIFEST).symlink_to("away")
    assert "is a link" in problems(checkpoint, hashes=False)[0]
    (checkpoint / "away").rename(checkpoint.parent / "away")
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).symlink_to("../away")
    assert "leads out of" in problems(checkpoint, hashes=False)[0]
    (checkpoint / MANIFEST).unlink()
    os.mkfifo(checkpoint / MANIFEST)
    assert problems(checkpoint, hashes=False) == ["checkpoint-4/manifest.json: is not a regular file, and is not read."]


def test_checkpoints_are_ordered_by_step_whatever_their_age(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-100", "checkpoint-20", "unfinished-checkpoint-300", "checkpoint-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("no folder")
    os.utime(tmp_path / "checkpoint-9", (4e9, 4e9))
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-100", "checkpoint-20", "checkpoint-9"]


def test_a_record_is_on_the_disk_where_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.readlink(f"/proc/self/fd/{handle}")))
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 10)
    assert record_of(path) == FileRecord(10, hash_of(path))
    assert flushed == []
    record_of(path, to_disk=True)
    assert flushed == [str(path)]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout("ddp", 2), "ddp"),
        (Layout("deepspeed", 2, 0), "deepspeed ZeRO-0"),
        (Layout("pipeline", 6, 1, stages=3, pipelines=2), "3 stage(s) x 2 pipeline(s)"),
    ],
)
def test_a_layout_is_said_in_words(layout: Layout, said: str) -> None:
    assert str(layout) == said


def test_of_many_problems_the_first_three_are_said() -> None:
    assert in_short(["a.", "b.", "c."]) == "a. b. c."
    assert in_short(["a.", "b.", "c.", "d.", "e."]) == "a. b. c. And 2 more."


def test_shares_are_even_and_leave_nothing_out() -> None:
    sizes = {f"file-{i}": (i * 7919) % 1000 for i in range(200)} | {"large": 30_000}
    lists = shares(sizes, 4)
    assert sorted(name for share in lists for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in lists]
    assert max(loads) - min(loads) <= 1000
    assert shares({}, 2) == [[], []]
