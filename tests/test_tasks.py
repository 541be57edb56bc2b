"""A task is said by its recipe's description, which shared rooms ask: none of them has a table of tasks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from conftest import REPO

from finetune.run.choose import recipes

OWN_MODULES = ("data", "generation", "models", "training")  # rooms in which a task has modules of its own
WHERE_SAID = ("run/recipes/", "run/task.py")
NO_HEAD = "AutoModel"  # the class of a model without a head, whatever it is for
# Data of tasks that are looked at by shared code: a branch each in data/first_look.py, whose flags say which.
LOOKED_AT = {("data/first_look.py", "seq2seq"), ("data/find_columns.py", "seq2seq")}


def task_words() -> set[str]:
    """What transformers and peft call the tasks, and the classes that open their models."""
    tasks = [task for recipe in recipes().values() for task in (recipe.task, *recipe.tasks.values())]
    return {word for task in tasks for word in (task.name, task.auto, task.adapter)} - {"", NO_HEAD}


def said_in(source: str, words: set[str]) -> Iterator[str]:
    """The words that stand in it as texts, and the recipes whose descriptions it imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in words:
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("finetune.run.recipes."):
            yield str(node.module)


def sources() -> dict[str, str]:
    root = REPO / "finetune"
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}


def test_no_shared_room_has_a_table_of_tasks() -> None:
    words = task_words()
    assert len(words) > 15
    shared = {name: source for name, source in sources().items()
              if not name.startswith((*WHERE_SAID, *(f"{room}/" for room in OWN_MODULES)))}  # fmt: skip
    assert len(shared) > 150
    assert {name: found for name, source in shared.items() if (found := [*said_in(source, words)])} == {}


def test_a_table_of_tasks_would_be_found() -> None:
    said = said_in('from finetune.run.recipes.x import X\nHEADS = {"token-classification": 1}', task_words())
    assert [*said] == ["finetune.run.recipes.x", "token-classification"]


def test_a_recipes_description_is_imported_by_modules_of_its_task_alone() -> None:
    """Of which their first lines say that they are: two tasks in one module would be a table."""
    found = {(name, one.rpartition(".")[2]) for name, source in sources().items() if not name.startswith("run/")
             for one in said_in(source, set())}  # fmt: skip
    assert len(found) > 10
    by_module: dict[str, set[str]] = {}
    for name, recipe in found - LOOKED_AT:
        by_module.setdefault(name, set()).add(recipe)
    assert all(len(own) == 1 for own in by_module.values())
    assert not LOOKED_AT - found, "strike what is mended"


def test_question_answering_has_the_files_that_contributing_promises() -> None:
    own = {
        name for name, source in sources().items() if "recipes.question_answering" in "".join(said_in(source, set()))
    }
    assert own == {"data/question_answering.py", "training/answers.py"}
    assert Path(REPO / "recipes/question_answering.py").read_text().count("\n") <= 150
