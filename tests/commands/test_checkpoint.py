"""`finetune checkpoint ls|verify` says what is in a run folder, and its exit status whether all of it is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.training.checkpoints.manifest import (
    FileRecord,
    Layout,
    Manifest,
    files_of,
    hash_of,
    write_manifest,
)


def save(folder: Path, step: int, best: int) -> Path:
    place = folder / f"checkpoint-{step}"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"w" * 3000)
    state = {"global_step": step, "best_model_checkpoint": f"/elsewhere/run/checkpoint-{best}"}
    (place / "trainer_state.json").write_text(json.dumps(state))
    files = {name: FileRecord(size, hash_of(place / name)) for name, size in files_of(place)[0].items()}
    layout = Layout("deepspeed", 8, zero_stage=3) if step < 8 else Layout("pipeline", 4, 1, stages=2, pipelines=2)
    write_manifest(place, Manifest(step, step / 4, "2026-01-02T03:04:05Z", 32, layout, {"torch": "2.13"}, files))
    return place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 8):
        save(tmp_path, step, best=4)
    (tmp_path / "latest").write_text("checkpoint-8\n")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], argv: Sequence[str | Path], status: int) -> str:
    assert main(["checkpoint", *map(str, argv)]) == status
    return capsys.readouterr().out


def test_the_table_has_a_line_for_each_newest_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, ["ls", run], 0).splitlines()
    assert lines[0].split() == "step epoch saved (UTC) size layout ranks state".split()
    assert "2 stage(s) x 2 pipeline(s)      4  unverified  latest" in lines[1]
    assert lines[2].split() == "4 1.00 2026-01-02 03:04:05 3.5 KiB deepspeed ZeRO-3 8 unverified best".split()
    assert lines[3].split()[0] == "2"
    assert lines[4] == "Only names and sizes were checked; `--verify` reads every byte."


def test_a_broken_one_is_said_with_its_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoint-4" / "model.safetensors").write_bytes(b"w" * 2999)
    assert "broken: checkpoint-4/model.safetensors has 2,999 bytes" in said(capsys, ["ls", run], 0)
    out = said(capsys, ["verify", run], 1)
    assert "checkpoint-8: verified (2 files" in out
    assert "checkpoint-4: broken" in out
    assert "2 of 3 verified" in out


def test_a_flipped_bit_is_found_where_bytes_are_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoint-2" / "model.safetensors").write_bytes(b"w" * 2999 + b"v")
    assert "broken" not in said(capsys, ["ls", run], 0)
    assert "broken" in said(capsys, ["ls", run, "--verify"], 0)
    assert said(capsys, ["verify", run / "checkpoint-4"], 0).startswith("checkpoint-4: verified")
    assert "has changed since it was saved" in said(capsys, ["verify", run / "checkpoint-2"], 1)


def test_json_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoint-2" / "model.safetensors").unlink()
    rows = json.loads(said(capsys, ["verify", run, "--json"], 1))
    assert [(row["name"], row["state"], row["best"], row["latest"]) for row in rows] == [
        ("checkpoint-8", "verified", False, True),
        ("checkpoint-4", "verified", True, False),
        ("checkpoint-2", "broken", False, False),
    ]
    assert rows[0]["layout"] == {"engine": "pipeline", "world_size": 4, "zero_stage": 1, "stages": 2, "pipelines": 2}
    assert rows[2]["problems"] == ["checkpoint-2/model.safetensors is missing."]
    assert json.loads(said(capsys, ["ls", run, "--json"], 0))[0]["global_batch_size"] == 32


def test_one_of_another_version_and_one_that_is_torn_are_told_apart(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoint-4" / "manifest.json").unlink()
    (run / "checkpoint-2" / "manifest.json").write_text('{"format": 1')
    (run / "unfinished-checkpoint-9").mkdir()
    (run / "superseded-checkpoint-8").mkdir()
    out = said(capsys, ["ls", run], 0)
    assert "unverified: checkpoint-4/manifest.json" in out
    assert "broken: checkpoint-2/manifest.json: is not valid JSON" in out
    assert "Left by an interrupted run, or being written now: unfinished-checkpoint-9." in out
    assert "Set aside by a run that resumed at an earlier step; you may delete them: superseded-checkpoint-8." in out
    said(capsys, ["verify", run / "checkpoint-4"], 1)  # nobody can say that it is whole


def test_what_files_say_is_no_markup_for_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = save(tmp_path, 2, best=2)
    (place / "[bold]x[nothing]").write_text("")
    assert "[bold]x[nothing] is not in manifest.json" in said(capsys, ["ls", tmp_path], 0)
    (place / "[bold]x[nothing]").rename(place / "\x1b[2Jx\n")
    for command in ("ls", "verify"):
        out = said(capsys, [command, tmp_path], 1 if command == "verify" else 0)
        assert "'\\x1b[2Jx\\n' is not in manifest.json" in out
        assert "\x1b" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "nowhere"], "there is no such folder"),
        (["verify", "nowhere"], "there is no such folder"),
        (["verify", "."], "holds no checkpoint"),
    ],
)
def test_a_wrong_request_has_status_2(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *argv]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_folder_has_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, ["ls", tmp_path], 0) == f"{tmp_path} holds no checkpoint.\n"
    assert json.loads(said(capsys, ["ls", tmp_path, "--json"], 0)) == []


def test_it_imports_no_torch(run: Path) -> None:
    look = "import sys; from finetune.cli import main; main(['checkpoint', 'verify', sys.argv[1]]); "
    heavy = "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", look + heavy, str(run)], capture_output=True, text=True, env={**os.environ}
    )
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
