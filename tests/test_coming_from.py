"""docs/coming_from.md names flags that the recipes have."""

from __future__ import annotations

import importlib
import re

import pytest
from conftest import REPO

from finetune.run.recipe import Recipe

PAGE = (REPO / "docs" / "coming_from.md").read_text()
SECTIONS = re.findall(r"^## From (.+?) to recipes/(\w+)\.py\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"`--(\w+)", text))


def flags_of_ours(section: str) -> set[str]:
    """Those of the second column; where it says `=`, those of the first."""
    found: set[str] = set()
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| theirs"):
            theirs, ours, _ = (cell.strip() for cell in line.strip("|").split(" |", 2))
            found |= flags_in(theirs if ours == "=" else ours)
    return found | set(re.findall(r" --(\w+)", "".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL))))


def described(recipe: str) -> Recipe:
    return getattr(importlib.import_module(f"finetune.run.recipes.{recipe}"), recipe.upper())


def test_the_page_has_a_table_for_each_peer() -> None:
    assert len(SECTIONS) == 6
    assert all(" in " in section and "read at" in section for _, _, section in SECTIONS)  # the upstream files are cited


@pytest.mark.parametrize(("peer", "recipe", "section"), SECTIONS, ids=[peer for peer, _, _ in SECTIONS])
def test_every_flag_of_ours_is_one_of_the_recipe(peer: str, recipe: str, section: str) -> None:
    named = flags_of_ours(section)
    assert len(named) > 5, peer
    assert named - set(described(recipe).flags) == set()


def test_flags_of_another_recipe_beside_its_name_are_its_own() -> None:
    named = re.findall(r"`recipes/(\w+)\.py( --[^`]+)`", PAGE)
    assert len(named) > 1
    for recipe, words in named:
        assert set(re.findall(r"--(\w+)", words)) - set(described(recipe).flags) == set()
