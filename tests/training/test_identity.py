"""Of which run a checkpoint is, at which step, and with which files; and the numbers of its state."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from asked import run_of
from conftest import flags
from test_manifest import LAYOUT

from finetune.errors import RequestError
from finetune.run.files import IDENTITY, SETTLED
from finetune.safe_read.values import MOST_YAML_BYTES
from finetune.training.checkpoints.atomic_folder import AtomicFolder
from finetune.training.checkpoints.choice import Chosen, checkpoint_to_resume, settle
from finetune.training.checkpoints.flags_of_before import look_at_flags
from finetune.training.checkpoints.identity import (
    MOST_LAUNCHES,
    MOST_SHOWN,
    Identity,
    Stretch,
    lineage_lines,
    mixed,
    new_id,
    read_identity,
    read_run,
    run_record,
    shown,
)
from finetune.training.checkpoints.manifest import FileRecord, read_manifest, record_of, write_manifest
from finetune.training.checkpoints.state import KEPT, RULES, state_problems
from finetune.training.checkpoints.writing import About

ID, OTHER = "a" * 32, "b" * 32
LINEAGE = (Stretch(OTHER, 0), Stretch(ID, 4, {"seed": (1, 2), "learning_rate": (1e-3, 5e-4)}))
OWN = Identity(ID, {"seed": 2, "optim": "sgd"}, {"data": {"train": "x"}}, {"torch": "2.13"}, LINEAGE)
STATE = {"global_step": 4, "max_steps": 100, "num_train_epochs": 3}


def save(folder: Path, step: int = 4, identity: Identity | None = OWN, state: dict[str, Any] | None = None) -> Path:
    place = folder / f"checkpoint-{step}"
    with AtomicFolder(place, About(step, 1.0, 32, LAYOUT, identity)) as target:
        (target / "model.safetensors").write_text(f"weights of {step}")
        (target / "trainer_state.json").write_text(json.dumps({**STATE, "global_step": step, **(state or {})}))
    return place


def anew(place: Path) -> None:
    """The manifest again, as who altered a file would make it."""
    manifest = read_manifest(place)
    write_manifest(place, replace(manifest, files={name: record_of(place / name) for name in manifest.files}))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    place = save(tmp_path)
    found = read_identity(place)
    assert found is not None
    assert (found.run, found.step, found.lineage) == (ID, 4, LINEAGE)
    assert (found.flags, found.facts, found.versions) == (OWN.flags, OWN.facts, OWN.versions)
    assert found.files == {
        name: record.xxh3_128 for name, record in read_manifest(place).files.items() if name != IDENTITY
    }
    assert mixed(place, read_manifest(place)) == []
    assert read_identity(save(tmp_path, 8, None)) is None
    assert mixed(tmp_path / "checkpoint-8", read_manifest(tmp_path / "checkpoint-8")) == []
    (tmp_path / IDENTITY).write_text(json.dumps(run_record(ID, LINEAGE)))
    assert read_run(tmp_path) == (ID, LINEAGE)
    assert read_run(place.parent / "none") is None


def test_ids_are_drawn_anew() -> None:
    assert len({new_id() for _ in range(9)}) == 9
    assert all(len(new_id()) == 32 for _ in range(9))


def test_parts_of_two_steps_are_told_though_their_hashes_were_made_anew(tmp_path: Path) -> None:
    place, later = save(tmp_path), save(tmp_path, 8)
    (place / "model.safetensors").write_text((later / "model.safetensors").read_text())
    anew(place)
    said = f"checkpoint-4/model.safetensors is not the file that was saved at step 4 ({IDENTITY})."
    assert mixed(place, read_manifest(place)) == [said]
    (later / IDENTITY).write_text((place / IDENTITY).read_text())
    anew(later)
    assert mixed(later, read_manifest(later)) == [f"checkpoint-8: {IDENTITY} is for step 4, but the manifest is for 8."]
    (place / "model.safetensors").unlink()
    manifest = read_manifest(place)
    fewer = {name: record for name, record in manifest.files.items() if name != "model.safetensors"}
    assert mixed(place, replace(manifest, files=fewer)) == [said]
    more = {**fewer, "a.pt": FileRecord(1, "0" * 32)}
    assert len(mixed(place, replace(manifest, files=more))) == 2


Edit = Callable[[dict[str, Any]], dict[str, Any]]


def having(**changes: Any) -> Edit:
    return lambda content: {**content, **changes}


@pytest.mark.parametrize(
    "edit",
    [
        having(format=2),
        having(step=-1),
        having(step=True),
        having(step="4"),
        having(run="A" * 32),
        having(run="a" * 31),
        having(run=7),
        having(flags=3),
        having(facts={"data": 3}),
        having(lineage={}),
        having(lineage=[{"run": ID, "from_step": 0, "changed": {"seed": [1]}}]),
        having(lineage=[{"run": ID, "from_step": 0, "changed": {}}] * (MOST_LAUNCHES + 1)),
        lambda content: {name: value for name, value in content.items() if name != "files"},
    ],
)
def test_a_record_of_another_form_is_refused(edit: Edit, tmp_path: Path) -> None:
    place = save(tmp_path)
    (place / IDENTITY).write_text(json.dumps(edit(json.loads((place / IDENTITY).read_text()))))
    with pytest.raises(RequestError, match=rf"^checkpoint-4/{IDENTITY} is malformed: "):
        read_identity(place)
    anew(place)
    assert mixed(place, read_manifest(place))[0].startswith(f"checkpoint-4/{IDENTITY} is malformed: ")


def test_a_record_of_a_run_that_is_none_says_how_to_mend_it(tmp_path: Path) -> None:
    (tmp_path / IDENTITY).write_text(json.dumps({"format": 1, "run": "x", "lineage": []}))
    with pytest.raises(RequestError, match="Delete it: it is recreated from the checkpoint"):
        read_run(tmp_path)
    (tmp_path / IDENTITY).write_text(json.dumps(run_record(ID, [Stretch(ID, 0)] * MOST_LAUNCHES)))
    assert read_run(tmp_path) is not None


def test_a_lineage_says_which_steps_ran_under_which_flags() -> None:
    assert lineage_lines(LINEAGE[:1]) == []
    assert lineage_lines(LINEAGE) == [
        f"steps 1 to 4: run {OTHER[:8]}",
        "steps 5 to the end: seed 1 -> 2; learning_rate 0.001 -> 0.0005",
    ]
    three = lineage_lines((*LINEAGE, Stretch(ID, 9, {"a": ("x", "y")})))
    assert three[1:] == [
        "steps 5 to 9: seed 1 -> 2; learning_rate 0.001 -> 0.0005",
        "steps 10 to the end: a x -> y",
    ]


def test_of_a_long_lineage_the_last_stretches_are_shown_so_that_the_record_stays_readable() -> None:
    changed = {"learning_rate": (1e-3, 5e-4), "weight_decay": (0.0, 0.1)}
    lineage = [Stretch(ID, step, changed) for step in range(MOST_LAUNCHES)]
    lines = lineage_lines(lineage)
    assert lines[0] == f"{MOST_LAUNCHES - MOST_SHOWN:,} earlier stretches are in {IDENTITY}"
    assert lines[1:] == lineage_lines(lineage[-MOST_SHOWN:])
    assert len("\n".join(lines)) < MOST_YAML_BYTES / 10
    assert len(lineage_lines(lineage[:MOST_SHOWN])) == MOST_SHOWN


@pytest.mark.parametrize(("length", "kept"), [(60, 60), (61, 57)])
def test_a_long_value_is_cut(length: int, kept: int) -> None:
    assert shown("x" * length) == "x" * kept + ("" if kept == length else "...")


def chosen(folder: Path, resume: str, **values: Any) -> Chosen:
    request = run_of(*flags({"output_dir": folder, "resume": resume, **values}))
    return settle(request, checkpoint_to_resume(request))


def test_a_checkpoint_of_another_run_is_passed_over_or_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    own, strange = save(tmp_path, 4), save(tmp_path, 8, replace(OWN, run="c" * 32))
    ancestor = save(tmp_path, 2, replace(OWN, run=OTHER))
    (tmp_path / IDENTITY).write_text(json.dumps(run_record(ID, LINEAGE)))
    found = chosen(tmp_path, "auto")
    assert found.checkpoint == str(own)
    assert found.notes == (
        "warning: a checkpoint is skipped: checkpoint-8 belongs to run cccccccc, and the folder to run aaaaaaaa.",
    )
    with pytest.raises(RequestError, match="resume anyway with --resume_changed allow"):
        chosen(tmp_path, str(strange))
    assert chosen(tmp_path, str(ancestor)).checkpoint == str(ancestor)
    allowed = {"resume_changed": "allow"}
    assert chosen(tmp_path, "auto", **allowed).checkpoint == str(strange)
    assert chosen(tmp_path, str(strange), **allowed).checkpoint == str(strange)


def test_a_changed_flag_is_refused_by_its_source_before_anything_is_imported(tmp_path: Path) -> None:
    strange = replace(OWN, run="c" * 32, flags={"seed": 5})
    own, _ = save(tmp_path, 4), save(tmp_path, 8, strange)
    (tmp_path / IDENTITY).write_text(json.dumps(run_record(ID, LINEAGE)))
    values = {"output_dir": tmp_path, "seed": 5, "optim": "sgd"}
    for resume in ("auto", "allow", str(own)):
        with pytest.raises(RequestError, match=r"--seed was 2 when checkpoint-4 was saved, and is 5 \(command line\)"):
            look_at_flags(run_of(*flags({**values, "resume": resume})))
    with pytest.raises(
        RequestError, match=r"the earlier values, another --output_dir, or accept .* --resume_changed allow"
    ):
        look_at_flags(run_of(*flags({**values, "resume": "auto"})))
    look_at_flags(run_of(*flags({**values, "seed": 2, "resume": "auto"})))
    look_at_flags(run_of(*flags({**values, "resume": "auto", "resume_changed": "allow"})))
    look_at_flags(run_of(*flags(values)))
    (own / "model.safetensors").unlink()  # the choice of a checkpoint says that
    look_at_flags(run_of(*flags({**values, "resume": "auto"})))


# The state


WINDOW = {"tokens": [[3, 0], [1, 2]], "losses": [1.5, 2.0], "steps": 2}  # of a mixture of experts


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, None),
        ({"global_step": -1}, "global_step is '-1', but it must be a whole number from 0 on"),
        ({"global_step": 2**63}, "global_step is '9223372036854775808', but"),
        ({"global_step": True}, "global_step is 'True'"),
        ({"max_steps": 2**63 - 1}, None),
        ({"max_steps": 0}, None),
        ({"max_steps": 1.5}, "max_steps is '1.5'"),
        ({"num_train_epochs": None}, "num_train_epochs is 'None'"),
        ({"global_step": 5}, "global_step is 5, but the checkpoint is for step 4"),
        ({"logging_steps": 0.1}, None),
        ({"logging_steps": 0}, None),
        ({"logging_steps": -0.1}, "logging_steps is '-0.1', but it must be a number from 0 on, or null"),
        ({"save_steps": float(2**63)}, "save_steps is"),
        ({"eval_steps": None}, None),
        ({"train_batch_size": "8"}, "train_batch_size is '8'"),
        ({"train_batch_size": 0}, "train_batch_size is '0', but it must be a whole number from 1 on"),
        ({"train_batch_size": 8.5}, "train_batch_size is '8.5'"),
        ({"epoch": None}, None),
        ({"epoch": 4.0}, None),
        ({"epoch": 1e308}, "epoch is '1e+308', but it must be a number from 0 to 4, its step, or null"),
        ({"epoch": 4.5}, "epoch is '4.5'"),
        ({"epoch": -1.0}, "epoch is '-1.0'"),
        ({"epoch": float("nan")}, "epoch is 'nan'"),
        ({"epoch": [1.0]}, "epoch is '[1.0]'"),
        ({"best_global_step": 5}, "best_global_step is '5'"),
        ({"total_flos": float("inf")}, "total_flos is 'inf', but it must be a number from 0 on, or null"),
        ({"num_input_tokens_seen": -1}, "num_input_tokens_seen is '-1'"),
        ({"is_hyper_param_search": "yes"}, "is_hyper_param_search is 'yes', but it must be true or false"),
        ({"trial_name": {}}, "trial_name is '{}'"),
        ({"trial_params": 3}, "trial_params is '3', but it must be an object, or null"),
        ({"log_history": [{}] * 100_001}, "log_history has 100,001 rows"),
        ({"log_history": [{"loss": 1.0, "step": 4}]}, None),
        ({"log_history": [{"loss": 1.0, "step": 5}]}, "log_history's step is '5'"),
        ({"log_history": [{"step": "4"}]}, "log_history's step is '4'"),
        ({"best_metric": float("nan")}, None),
        ({"best_metric": {}}, "best_metric is '{}'"),
        ({"best_metric": [1]}, "best_metric is '[1]', but it must be a number, or null"),
        ({"total_flos": True}, "total_flos is 'True'"),
        ({"total_flos": 4.2e21}, None),
        ({"best_model_checkpoint": 3}, "best_model_checkpoint is '3', but it must be a text, or null"),
        ({"best_model_checkpoint": None}, None),
        ({"logged_step": [1]}, "has 'logged_step', which the Trainer does not know"),
        ({"log_history": [{}, 3]}, "log_history is not a list of objects"),
        ({"log_history": {}}, "log_history is not a list of objects"),
        ({"stateful_callbacks": []}, "stateful_callbacks is not an object"),
        ({"stateful_callbacks": {"A": 3}}, "its entry for 'A' is not an object"),
        ({"stateful_callbacks": {"A": {"attributes": {"logged_step": 4}}}}, None),
        ({"stateful_callbacks": {"A": {"attributes": {"logged_step": -1}}}}, None),
        ({"stateful_callbacks": {"A": {"attributes": {"logged_step": 5}}}}, "A.logged_step is '5'"),
        ({"stateful_callbacks": {"A": [{"attributes": {"logged_step": -2}}]}}, "A.logged_step is '-2'"),
        ({"stateful_callbacks": {"A": {"attributes": {"logged_step": [1]}}}}, "A.logged_step is '[1]'"),
        ({"stateful_callbacks": {"A": {"attributes": {"sums": [1, float("inf")]}}}}, None),
        ({"stateful_callbacks": {"A": {"attributes": {"sums": [1, "2"]}}}}, "A.sums is"),
        ({"stateful_callbacks": {"A": {"attributes": {"total": "1"}}}}, "A.total is '1', but it must be a number"),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_sources": {"a": [1.0, 2.0, 3.0, 4.0]}}}}}, None),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_sources": {}}}}}, None),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_sources": {"a": [1.0]}}}}}, "lists of 4 numbers"),
        (
            {"stateful_callbacks": {"A": {"attributes": {"kept_of_sources": {"a": [1] * 4}}}}},
            "lists of 4 numbers",
        ),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_sources": [1.0]}}}}, "lists of 4 numbers"),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_experts": {}}}}}, None),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_experts": WINDOW}}}}, None),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_experts": {**WINDOW, "losses": []}}}}}, "a table"),
        ({"stateful_callbacks": {"A": {"attributes": {"kept_of_experts": {**WINDOW, "tokens": [[1], 2]}}}}}, "a table"),
        ({"stateful_callbacks": {"A": {"attributes": {"early_stopping_patience_counter": -1}}}}, "patience_counter is"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_numbers_that_a_run_counts_on_are_what_they_must_be(
    state: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint-4"
    place.mkdir()
    (place / "trainer_state.json").write_text(json.dumps({**STATE, **state}))
    for step in (4, None):
        found = state_problems(place, step)
        assert [said in one for one in found] == [True] if said else found == [], found
        assert all(one.startswith("checkpoint-4/trainer_state.json: ") for one in found)


def test_the_names_in_a_state_are_those_that_the_trainer_takes() -> None:
    from transformers import TrainerState

    assert {*RULES, *KEPT} == {field.name for field in fields(TrainerState)}


def test_the_step_of_the_manifest_counts_and_a_folder_of_another_name_has_none(tmp_path: Path) -> None:
    for name, step, wrong in (("checkpoint-4", 8, True), ("best", None, False), ("best", 8, True)):
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        (place / "trainer_state.json").write_text(json.dumps(STATE))
        assert bool(state_problems(place, step)) is wrong


def test_what_a_classifier_keeps_beside_its_weights_is_no_shape() -> None:
    """A renamed column of the same rows may be resumed."""
    from finetune.training.same_run import NO_SHAPE

    assert set(SETTLED) <= set(NO_SHAPE)
