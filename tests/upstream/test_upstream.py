"""tests/upstream/: its rows against the installed releases, and against our code."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from upstream import of_trainer
from upstream.contract import ROOT, faults, hits, resolve, without_a_hit, without_a_row
from upstream.row import Row
from upstream.table import ROWS

from finetune.training.trainer import FinetuneTrainer
from finetune.versions import TESTED

SAVE = next(row for row in ROWS if row.attribute == "_save_checkpoint")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.attribute} in {row.where}")
def test_what_a_row_says_is_so_in_the_installed_release(row: Row) -> None:
    assert list(faults(row)) == []


def test_each_private_name_and_override_has_a_row_and_each_row_a_place() -> None:
    assert without_a_row(ROWS) == set()
    assert without_a_hit(ROWS) == set()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (replace(SAVE, signature="self, model"), "takes (self, model, trial), not (self, model)"),
        (replace(SAVE, signature=""), "its row has no signature"),
        (replace(SAVE, name=SAVE.name + "s"), "Trainer._save_checkpoints is not there"),
        (replace(SAVE, name="transformers.nowhere:Trainer._x"), "is not there"),
        (replace(SAVE, called_from=("transformers.trainer:Trainer.train",)), "does not speak of _save_checkpoint"),
    ],
)
def test_a_row_that_is_not_so_is_found(row: Row, said: str) -> None:
    assert any(said in fault for fault in faults(row))


def test_a_row_that_is_missing_or_stale_is_found() -> None:
    assert without_a_row(tuple(row for row in ROWS if row is not SAVE)) == {(SAVE.where, SAVE.attribute)}
    stale = replace(SAVE, where="cli.py")
    assert without_a_hit((stale,)) == {("cli.py", "_save_checkpoint")}


@pytest.mark.parametrize("row", of_trainer.PUBLIC + of_trainer.PRIVATE, ids=lambda row: row.attribute)
def test_what_the_trainer_calls_us_with_is_what_we_take(row: Row) -> None:
    theirs = list(inspect.signature(resolve(row.name)).parameters)
    own = next(kind for kind in FinetuneTrainer.__mro__ if row.attribute in vars(kind))
    assert own.__module__.startswith("finetune.")
    ours = inspect.signature(vars(own)[row.attribute])
    ours.bind(**dict.fromkeys(theirs))
    ours.bind(*theirs)


def test_the_scan_sees_what_it_is_to_see() -> None:
    for hit in (
        ("training/saving.py", "_save_checkpoint"),  # overridden by a mixin
        ("training/trainer.py", "log"),  # a public one
        ("training/reshard/loading.py", "_lazy_init_hp_params_optimizer_state"),  # an attribute
        ("measure/memory.py", "_pytree"),  # a module
        ("models/gptlite.py", "_supports_sdpa"),  # a class attribute
    ):
        assert hit in hits()


@pytest.mark.parametrize("name", TESTED)
def test_the_tested_releases_are_those_that_this_ran_on(name: str) -> None:
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert installed.partition("+")[0] == TESTED[name]


def test_what_we_lean_on_is_bounded_to_a_series_that_was_tested() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text()
    listed = [Requirement(one) for one in re.findall(r'"([a-z]+[<>=][^"]+)"', text)]
    by_package = {one.name: one.specifier for one in listed if any(bound.operator == "<" for bound in one.specifier)}
    packages = {row.package for row in ROWS} - set(sys.stdlib_module_names)
    assert packages <= set(by_package)
    assert [name for name in packages if TESTED[name] not in by_package[name]] == []
