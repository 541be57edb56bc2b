"""--resume takes the newest checkpoint that is as it was saved, and says what it passed over."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from asked import run_of
from conftest import flags
from test_manifest import LAYOUT

from finetune.errors import NothingToDoError, RequestError
from finetune.run.run import Run
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.choice import Chosen, checkpoint_to_resume, settle
from finetune.training.checkpoints.manifest import MANIFEST
from finetune.training.checkpoints.writing import About

FILES = {
    "model.safetensors": b"w" * 10_000,
    "optimizer.pt": b"",  # where there is nothing, torch.save writes
    "scheduler.pt": b"",
    "rng_state_0.pth": b"",
    "rng_state_1.pth": b"",
    "latest": b"global_step4",
    "global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": b"",
    "pytorch_model_fsdp_0/__0_0.distcp": b"d" * 50,
    "training_args.bin": b"t" * 500,
    "tokenizer.json": b"{}",
}


def save(folder: Path, step: int, files: dict[str, bytes] | None = None) -> Path:
    place = folder / f"checkpoint-{step}"
    with AtomicFolder(place, About(step, 1.0, 32, LAYOUT)) as target:
        for name, content in (files or FILES).items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content) if content else torch.save({"x": torch.rand(100)}, target / name)
        state = {"global_step": step, "max_steps": 100, "num_train_epochs": 3}
        (target / "trainer_state.json").write_text(json.dumps(state))
    return place


def flip(path: Path) -> None:
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def asked(folder: Path, resume: str, **values: Any) -> Run:
    return run_of(*flags({"output_dir": folder, "resume": resume, **values}))


def chosen(folder: Path, resume: str, **values: Any) -> Chosen:
    request = asked(folder, resume, **values)
    return settle(request, checkpoint_to_resume(request))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (4, 8, 12):
        save(tmp_path, step)
    return tmp_path


def test_the_newest_is_taken_without_a_word(run: Path) -> None:
    assert chosen(run, "auto") == chosen(run, "allow") == Chosen(str(run / "checkpoint-12"))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("autoo", "auto"),
        ("alow", "allow"),
        ("checkpoint-8", "{run}/checkpoint-8"),
        ("old/checkpoint_12", "{run}/checkpoint-12"),
    ],
)
def test_a_word_that_names_no_checkpoint_is_asked_about(word: str, meant: str, run: Path) -> None:
    question = f"(it has no trainer_state.json). Did you mean {meant.format(run=run)}?"
    with pytest.raises(RequestError, match=re.escape(question)):
        asked(run, word)


@pytest.mark.parametrize("name", [*FILES, "trainer_state.json", MANIFEST])
@pytest.mark.parametrize("spoil", ["a bit", "the end", "all of it", "one byte more"])
def test_what_was_spoilt_is_passed_over_and_named(spoil: str, name: str, run: Path) -> None:
    path = run / "checkpoint-12" / name
    content = bytearray(path.read_bytes())
    if spoil == "a bit":
        content[content.find(b"1") if name == MANIFEST else len(content) // 2] ^= 1
    path.write_bytes({"the end": content[:-1], "one byte more": content + b"\0"}.get(spoil, content))
    if spoil == "the end" and name == MANIFEST:
        path.write_bytes(content[:-3])  # without its last line's end it says the same
    if spoil == "all of it":
        path.unlink()
    found = chosen(run, "auto")
    assert found.checkpoint == str(run / "checkpoint-8")
    (note,) = found.notes
    assert re.match(r"warning: a checkpoint is skipped: checkpoint-12[/ ]", note)
    assert name in note


def test_two_that_are_spoilt_in_different_ways_are_both_passed_over(run: Path) -> None:
    (run / "checkpoint-12" / "optimizer.pt").unlink()
    flip(run / "checkpoint-8" / "optimizer.pt")
    found = chosen(run, "allow")
    assert found.checkpoint == str(run / "checkpoint-4")
    assert [note.split()[5] for note in found.notes] == ["checkpoint-12/optimizer.pt", "checkpoint-8/optimizer.pt"]


def test_where_none_verifies_nothing_is_started_anew(run: Path) -> None:
    for step in (4, 8, 12):
        flip(run / f"checkpoint-{step}" / "optimizer.pt")
    for resume in ("auto", "allow"):
        with pytest.raises(
            RequestError, match=r"holds no checkpoint that verifies\. checkpoint-12/opt.*checkpoint-4/opt"
        ):
            chosen(run, resume)


def test_where_there_is_none_allow_starts_and_auto_does_not(tmp_path: Path) -> None:
    (tmp_path / "unfinished-checkpoint-4/checkpoint-4").mkdir(parents=True)
    assert chosen(tmp_path, "allow") == Chosen(None)
    with pytest.raises(RequestError, match=r"holds no checkpoint\. --resume allow starts"):
        chosen(tmp_path, "auto")


def test_one_without_a_manifest_is_taken_by_its_path_alone(run: Path) -> None:
    (run / "checkpoint-12" / MANIFEST).unlink()
    found = chosen(run, "auto")
    assert found.checkpoint == str(run / "checkpoint-8")
    assert "has no manifest.json" in found.notes[0]
    named = chosen(run, str(run / "checkpoint-12"))
    assert named.checkpoint == str(run / "checkpoint-12")
    assert "it cannot be verified" in named.notes[0]
    shutil.rmtree(run / "checkpoint-8")
    shutil.rmtree(run / "checkpoint-4")
    with pytest.raises(RequestError, match=r"--resume .*checkpoint-12 accepts it without verification"):
        chosen(run, "allow")


@pytest.mark.parametrize("shorter", [False, True])
def test_a_path_that_does_not_verify_is_refused(shorter: bool, run: Path) -> None:
    flip(run / "checkpoint-8" / "optimizer.pt")
    if shorter:
        os.truncate(run / "checkpoint-8" / "optimizer.pt", 500)
    with pytest.raises(RequestError, match=r"it does not verify\. checkpoint-8/optimizer\.pt has "):
        chosen(run, str(run / "checkpoint-8"))


def test_the_pointer_is_not_trusted(run: Path) -> None:
    (run / "latest").write_text("checkpoint-4\n")
    assert chosen(run, "auto").checkpoint == str(run / "checkpoint-12")


def test_a_finished_run_is_not_gone_on_with(run: Path) -> None:
    card = run / "README.md"
    card.write_text("done")
    os.utime(card, (4e9, 4e9))
    with pytest.raises(RequestError, match="nothing is left to do"):
        chosen(run, "auto", max_steps=12)
    with pytest.raises(NothingToDoError):
        chosen(run, "allow", max_steps=12)
    assert chosen(run, "auto", max_steps=13).checkpoint == str(run / "checkpoint-12")


def poisoned(folder: Path) -> Path:
    """A shard outside of any checkpoint, which runs code when it is opened as a pickle."""
    folder.mkdir(exist_ok=True)
    path = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(pickle.dumps(print))
    return path


def test_a_shard_that_is_a_link_is_not_opened(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoint-12"
    (checkpoint / MANIFEST).unlink()
    shard = checkpoint / "global_step4" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shard.unlink()
    shard.symlink_to(poisoned(tmp_path / "evil"))
    with pytest.raises(RequestError, match=r"_optim_states\.pt: is a link .*: cp -rL .*checkpoint-12 COPY"):
        chosen(run, str(checkpoint))


def test_a_folder_of_shards_that_is_a_link_is_not_opened(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoint-12"
    (checkpoint / MANIFEST).unlink()
    shutil.rmtree(checkpoint / "global_step4")
    (checkpoint / "global_step4").symlink_to(poisoned(tmp_path / "evil").parent)
    with pytest.raises(RequestError, match="global_step4: is a link"):
        chosen(run, str(checkpoint))


@pytest.mark.parametrize("pointer", ["latest", "latest_universal"])
@pytest.mark.parametrize("named", ["../evil", "/evil", "global_step4/../../../evil", "global_step5", "global_step4\0"])
@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_pointer_that_leads_out_of_the_checkpoint_is_refused(
    has_manifest: bool, named: str, pointer: str, tmp_path: Path
) -> None:
    poisoned(tmp_path / "evil")
    checkpoint = save(tmp_path, 4, {**FILES, pointer: named.encode()})
    if not has_manifest:
        (checkpoint / MANIFEST).unlink()
    with pytest.raises(RequestError, match=rf"checkpoint-4/{pointer}: names .*global_step"):
        chosen(tmp_path, str(checkpoint))


def test_a_pointer_to_a_universal_folder_that_is_there_is_right(tmp_path: Path) -> None:
    inside = {"latest_universal": b"global_step4_universal\n", "global_step4_universal/zero/fp32.pt": b""}
    checkpoint = save(tmp_path, 4, {**FILES, **inside})
    assert chosen(tmp_path, "auto").checkpoint == str(checkpoint)


def test_what_a_save_that_was_cut_off_moved_aside_has_its_name_again_once_the_run_is_locked(tmp_path: Path) -> None:
    place = save(tmp_path, 4)
    place.rename(tmp_path / "replaced-checkpoint-4")
    early = checkpoint_to_resume(asked(tmp_path, "auto"))
    assert early.checkpoint == str(tmp_path / "replaced-checkpoint-4")
    assert not place.exists()
    assert settle(asked(tmp_path, "auto"), early) == Chosen(str(place))
