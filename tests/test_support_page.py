"""Each test that docs/support.md names stands in a file that the page links to."""

from __future__ import annotations

import ast
import re

from conftest import REPO

PAGE = (REPO / "docs" / "support.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    files = set(re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", PAGE))
    there = {
        node.name
        for file in files
        for node in ast.parse((REPO / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 25
    assert named - there == set()


def test_every_recipe_has_a_row_of_launchers_and_a_column_or_a_table_of_layouts() -> None:
    recipes = {path.stem for path in (REPO / "recipes").glob("*.py")} - {"benchmark", "generate"}
    rows = set(re.findall(r"^\| `(\w+)` \| (?:gate|nightly) \|", PAGE, re.MULTILINE))
    assert rows == recipes
    assert recipes - set(re.findall(r"`(\w+)` \|", PAGE.partition("## Pipelines")[0])) == {"causal_lm_pipeline"}
