"""What becomes of a changed flag on resume: each flag of each recipe is in one class, and the docs say which."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import finetune.run.recipes as shelf
from finetune.run.on_resume import CLASSES, MODEL, NEVER, REFUSED, ROWS, VALUES, table
from finetune.run.recipe import Recipe

REPO = Path(__file__).resolve().parents[2]
RECIPES = [
    recipe
    for module in pkgutil.iter_modules(shelf.__path__)
    for recipe in vars(importlib.import_module(f"{shelf.__name__}.{module.name}")).values()
    if isinstance(recipe, Recipe) and recipe.name == module.name
]


def test_there_are_recipes_to_look_at() -> None:
    assert {recipe.script for recipe in RECIPES} <= {str(p.relative_to(REPO)) for p in REPO.glob("recipes/*.py")}
    assert len(RECIPES) >= 5


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_flag_is_in_exactly_one_class(recipe: Recipe) -> None:
    classes = {name: [kind for kind, flags in CLASSES.items() if name in flags] for name in recipe.flags}
    assert {name: found for name, found in classes.items() if len(found) != 1} == {}


def test_each_flag_that_is_refused_is_refused_in_one_way_and_no_class_names_what_is_no_flag() -> None:
    assert len(REFUSED) == len(VALUES) + len(NEVER) + len(ROWS) + len(MODEL)
    known = {name for recipe in RECIPES for name in recipe.flags}
    assert known == frozenset().union(*CLASSES.values())


def test_the_documentation_has_the_table() -> None:
    assert table() in (REPO / "docs" / "checkpoints.md").read_text()
