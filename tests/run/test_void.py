"""A flag that another makes void is refused, implied or overruled, and never passed over in silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_recipes import RECIPES

from finetune.errors import RequestError
from finetune.run.flag import Flag
from finetune.run.launch import Launch
from finetune.run.parse import COMMAND_LINE, Setting
from finetune.run.recipe import Recipe
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve
from finetune.run.run import Run
from finetune.run.void import GIVEN, VOID, Void, says, settle_void

YAML_LINE = "a.yaml line 1"


def value_of(flag: Flag) -> Any:
    """One that says something, and is not the flag's default."""
    others = [choice for choice in flag.choices if choice != flag.default and says(choice)]
    if others:
        return others[0]
    kinds = {"bool": True, "int": 7, "float": 0.25, "json": {"a": 1}, "str": "word"}
    return [kinds[flag.kind]] if flag.many else kinds[flag.kind]


def cases() -> Iterator[Any]:
    """Each row on each recipe that has both of its flags."""
    for recipe in RECIPES:
        for row in VOID:
            for name in (name for name in row.flags if {name, row.by} <= set(recipe.flags)):
                yield pytest.param(recipe, row, name, id=f"{recipe.name}-{name}-{row.by}")


def settled(recipe: Recipe, flags: dict[str, tuple[Any, str]]) -> tuple[Run, list[str]]:
    """As `resolve` does, before anything else is looked at."""
    run = resolve(recipe, [], Launch(), is_here=False)
    given = {name: Setting(value, source) for name, (value, source) in flags.items()}
    return settle_void(replace(run, settings={**run.settings, **given}, notes=()))


def voiding(recipe: Recipe, row: Void) -> Any:
    return value_of(recipe.flags[row.by]) if row.values == GIVEN else row.values[0]


@pytest.mark.parametrize(("recipe", "row", "name"), cases())
def test_a_pair_that_is_said_is_refused_with_both_and_their_sources(recipe: Recipe, row: Void, name: str) -> None:
    value, by = value_of(recipe.flags[name]), voiding(recipe, row)
    _, mistakes = settled(recipe, {row.by: (by, YAML_LINE), name: (value, COMMAND_LINE)})
    said = [one for one in mistakes if f"--{name} is {value!r} (command line)" in one]
    assert any(f"--{row.by} is {by!r} (a.yaml line 1)" in one for one in said)


@pytest.mark.parametrize(("recipe", "row", "name"), cases())
def test_what_is_void_by_a_default_is_implied_or_refused(recipe: Recipe, row: Void, name: str) -> None:
    value = value_of(recipe.flags[name])
    run, mistakes = settled(recipe, {name: (value, COMMAND_LINE)})
    was = resolve(recipe, [], Launch(), is_here=False).value(row.by)
    is_void = says(was) if row.values == GIVEN else was in row.values
    if is_void and row.implies is not None:
        assert run.value(row.by) == row.implies
        assert any(f"--{row.by} is {row.implies!r} (follows from --{name})" in note for note in run.notes)
    elif is_void:
        assert any(f"--{name} is {value!r}" in one and f"--{row.by} is " in one for one in mistakes)
    else:
        assert run.value(row.by) == was


@pytest.mark.parametrize(("recipe", "row", "name"), cases())
def test_the_command_line_overrules_a_yaml_and_says_so(recipe: Recipe, row: Void, name: str) -> None:
    by = voiding(recipe, row)
    given = {row.by: (by, COMMAND_LINE), name: (value_of(recipe.flags[name]), YAML_LINE)}
    run, mistakes = settled(recipe, given)
    assert not [one for one in mistakes if f"--{name} " in one and f"--{row.by} " in one]
    assert name not in run.given
    assert any(
        f"--{name} " in note and f"--{row.by} is {by!r} (command line) overrules it" in note for note in run.notes
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_flags_that_go_together_are_taken(recipe: Recipe) -> None:
    together = (
        "--eval_strategy steps --eval_steps 4 --save_strategy steps --save_steps 4 --warmup_steps 2 --do_eval True"
    )
    run = resolve(recipe, together.split(), Launch(), is_here=False)
    assert run.notes == ()
    assert run.value("save_steps") == 4


def test_every_flag_of_the_table_is_some_recipes() -> None:
    known = {name for recipe in RECIPES for name in recipe.flags}
    assert {name for row in VOID for name in (*row.flags, row.by, *row.unless)} <= known


def test_save_steps_alone_saves_by_steps() -> None:
    run = resolve(SEQ_CLS, ["--save_steps", "10"], Launch())
    assert run.value("save_strategy") == "steps"
    assert run.said("save_strategy") == "--save_strategy is 'steps' (follows from --save_steps)"


def test_what_asks_for_nothing_is_no_mistake() -> None:
    words = "--lr_scheduler_type constant --warmup_steps 0 --merge_adapter False --max_steps -1 --num_train_epochs 2"
    assert resolve(CAUSAL_LM, words.split(), Launch()).notes == ()


def test_a_runs_record_is_run_again_although_it_has_both(tmp_path: Path) -> None:
    """It holds the recipe's defaults beside what was said."""
    record = tmp_path / "recipe.yaml"
    record.write_text(yaml.safe_dump({"recipe": "seq_cls", "max_steps": 4, "num_train_epochs": 8.0}))
    run = resolve(SEQ_CLS, ["--config", str(record)], Launch())
    assert run.value("max_steps") == 4
    (tmp_path / "mine.yaml").write_text(record.read_text())
    with pytest.raises(RequestError, match=r"--num_train_epochs is 8\.0 .*mine\.yaml line 2.*--max_steps is 4"):
        resolve(SEQ_CLS, ["--config", str(tmp_path / "mine.yaml")], Launch())
