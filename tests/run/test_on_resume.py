"""What becomes of a changed flag on resume: each flag of each recipe is in one class, and the docs say which."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import finetune.run.recipes as shelf
from finetune.run.on_resume import OF_TRAINER, TABLE, table
from finetune.run.recipe import Recipe
from finetune.run.trainer_flags import trainer_flags

REPO = Path(__file__).resolve().parents[2]
RECIPES = [
    recipe
    for module in pkgutil.iter_modules(shelf.__path__)
    for recipe in vars(importlib.import_module(f"{shelf.__name__}.{module.name}")).values()
    if isinstance(recipe, Recipe) and recipe.name == module.name
]

FLAGS = [flag for recipe in RECIPES for flag in recipe.flags.values()]


def test_there_are_recipes_to_look_at() -> None:
    assert {recipe.script for recipe in RECIPES} <= {str(p.relative_to(REPO)) for p in REPO.glob("recipes/*.py")}
    assert len(RECIPES) >= 5


def test_a_flag_is_in_one_class_whichever_recipe_has_it() -> None:
    found: dict[str, set[str]] = {}
    for flag in FLAGS:
        found.setdefault(flag.name, set()).add(flag.on_resume)
    assert {name: classes for name, classes in found.items() if len(classes) != 1} == {}
    assert set().union(*found.values()) == {of for _, _, of in TABLE}


def test_the_class_of_each_of_the_trainers_flags_is_known_and_of_nothing_else() -> None:
    assert set(OF_TRAINER) == {flag.name for flag in trainer_flags()}


def test_the_documentation_has_the_table() -> None:
    assert table(FLAGS) in (REPO / "docs" / "checkpoints.md").read_text()
