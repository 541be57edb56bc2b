"""Who may import what, looked up in fresh interpreters."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPO

HEAVY = {"torch", "transformers", "deepspeed", "datasets", "numpy"}
LIGHT_ROOM = [f"finetune.run.{path.stem}" for path in sorted((REPO / "finetune/run").glob("[a-z]*.py"))]


@pytest.mark.parametrize(
    "module",
    [
        "finetune",
        "finetune.api.checking",
        "finetune.api.planning",
        "finetune.api.run",
        "finetune.api.training",
        "finetune.cli",
        "finetune.report.bench",
        "finetune.bench.compare",
        "finetune.bench.cell",
        "finetune.report.published",
        "finetune.bench.runner",
        "finetune.commands.bench",
        "finetune.commands.chat",
        "finetune.commands.export",
        "finetune.commands.check",
        "finetune.commands.generate",
        "finetune.generation.flags",
        "finetune.generation.request",
        "finetune.commands.launch",
        "finetune.launchers",
        "finetune.dsconfig.load",
        "finetune.entry.main",
        "finetune.commands.plan",
        "finetune.commands.report",
        "finetune.plan.model",
        "finetune.plan.partition",
        "finetune.report.plan_page",
        "finetune.report.plan_tables",
        "finetune.plan.from_run",
        "finetune.plan.run_model",
        "finetune.plan.schedule",
        "finetune.plan.search",
        "finetune.plan.forward.traced",
        "finetune.plan.tracing",
        "finetune.plan.weights",
        "finetune.plan.answers",
        "finetune.report.write",
        "finetune.measure.start",
        "finetune.commands.supervise",
        *LIGHT_ROOM,
    ],
)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.split() == []


# What each room imports, also in a function or for its types alone.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "privacy": {"errors"},
    "metrics": set(),
    "hostfile": {"errors", "safe_read"},
    "versions": set(),
    "shipped": set(),
    "host": {"errors", "hostfile"},
    "launchers": {"errors", "shipped"},
    "safe_read": {"errors"},
    "dsconfig": {"errors", "privacy", "safe_read", "shipped"},
    "run": {"dsconfig", "errors", "safe_read", "shipped"},
    "plan": {"dsconfig", "errors", "run", "safe_read", "shipped"},
    "data": {"errors", "run", "safe_read"},
    "models": {"data", "errors", "host", "run", "safe_read"},
    "training": {"versions"}
    | {"data", "dsconfig", "errors", "host", "metrics", "models", "plan", "privacy", "report", "run", "safe_read"},
    "entry": {"data", "errors", "privacy", "run", "training"},
    "measure": {"entry", "dsconfig", "errors", "host", "models", "plan", "run", "training"},
    "bench": {"safe_read", "shipped", "versions"}
    | {"dsconfig", "errors", "host", "measure", "models", "plan", "report", "run", "training"},
    "report": {"errors", "plan", "privacy", "run", "safe_read"},
    "doctor": {"dsconfig", "errors", "host", "training", "measure", "plan", "run", "versions"},
    "generation": {"data", "dsconfig", "errors", "models", "privacy", "run", "safe_read", "training"},
    "supervise": {"errors", "run", "safe_read", "shipped", "training"},
    "export": {"errors", "models", "run", "safe_read", "training", "versions"},
    "cli": {"errors", "generation", "privacy", "run"},
    "api": {"cli", "commands", "dsconfig", "errors", "measure", "models", "plan", "privacy", "report", "run"}
    | {"entry", "training"},
}
FREE = ("commands",)  # which do what the command line asks, with any room


def modules() -> dict[str, Path]:
    paths = (REPO / "finetune").rglob("*.py")
    return {".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that this one names in an import: at its top, in a function, or for its types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (names & set(known)) or ({node.module} & set(known))


def edges() -> dict[str, set[str]]:
    known = modules()
    found = {name: set(imported(path, known)) - {"finetune"} for name, path in known.items()}
    found["finetune.plan"] -= {
        "finetune.api",
        "finetune.api.planning",
    }  # which makes `from finetune import plan` callable
    return found


def room(module: str) -> str:
    return (module.split(".") + [""])[1]


def test_rooms_import_in_one_direction() -> None:
    found = edges()
    assert {room(name) for name in found} - {""} == {*ROOMS, *FREE}
    wrong = {
        (name, other)
        for name, others in found.items()
        for other in others
        if room(name) not in ("", *FREE) and room(other) not in {room(name), *ROOMS[room(name)]}
    }
    assert not wrong
    used = {(room(name), room(other)) for name, others in found.items() for other in others}
    assert {(one, other) for one, others in ROOMS.items() for other in others} <= used, "the table allows what is not"


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = edges()
    assert len(found) > 200
    assert not circle(found)
    assert not circle(ROOMS)


def test_a_circle_would_be_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def circle(found: dict[str, set[str]]) -> set[str]:
    """What is left once those that import nothing are taken away, and again, and those that nobody imports."""
    left = {name: set(others) for name, others in found.items()}
    while True:
        imported_by_some = set().union(*left.values()) if left else set()
        gone = {name for name, others in left.items() if not others or name not in imported_by_some}
        if not gone:
            return set(left)
        left = {name: others - gone for name, others in left.items() if name not in gone}


def test_what_is_imported_of_ours_is_there_also_in_functions_and_benchmarks() -> None:
    known = modules()
    files = [
        path for folder in ("benchmarks", "finetune", "recipes", "tests") for path in (REPO / folder).rglob("*.py")
    ]
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
    asked = [(path, node) for path, node in nodes if isinstance(node, ast.ImportFrom) and node.module in known]
    assert len(asked) > 2000
    words = {name: set(re.findall(r"\w+", path.read_text())) for name, path in known.items()}
    missing = {
        f"{path.name}: from {node.module} import {alias.name}"
        for path, node in asked
        for alias in node.names
        if alias.name not in words[node.module or ""] and f"{node.module}.{alias.name}" not in known
    }
    gone = {f"{path.name}: {node.module}" for path, node in nodes if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("finetune.") and node.module not in known}  # fmt: skip
    assert not missing | gone


def test_the_source_is_python_3_10() -> None:
    files = [path for folder in ("finetune", "recipes", "benchmarks") for path in (REPO / folder).rglob("*.py")]
    assert len(files) > 25
    for path in files:
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_recipes_import_rooms_and_never_the_command_line() -> None:
    recipes = sorted((REPO / "recipes").rglob("*.py"))
    assert recipes
    known = modules()
    wrong = {
        (path.name, name)
        for path in recipes
        for name in imported(path, known)
        if room(name) in ("cli", "commands") or name.startswith("recipes")
    }
    assert not wrong


def test_no_two_test_files_share_a_name() -> None:
    """Folders of tests are no packages: of two files of one name pytest imports the first, and stops at the other."""
    names = [path.name for path in (REPO / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
