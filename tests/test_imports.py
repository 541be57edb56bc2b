"""Who may import what, looked up in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPO

HEAVY = {"torch", "transformers", "deepspeed", "datasets", "numpy"}


@pytest.mark.parametrize(
    "module",
    [
        "finetune.cli",
        "finetune.bench.by_ddp",
        "finetune.bench.compare",
        "finetune.bench.cell_plan",
        "finetune.bench.published",
        "finetune.bench.runner",
        "finetune.commands.bench",
        "finetune.commands.check",
        "finetune.commands.launch",
        "finetune.launchers",
        "finetune.dsconfig.load",
        "finetune.dsconfig.make_schema",
        "finetune.commands.plan",
        "finetune.commands.report",
        "finetune.plan.model",
        "finetune.plan.partition",
        "finetune.plan.pages.page",
        "finetune.plan.pages.show",
        "finetune.plan.request",
        "finetune.plan.schedule",
        "finetune.plan.search",
        "finetune.plan.weights",
        "finetune.plan.write",
        "finetune.report.write",
        "finetune.measure.start",
        "finetune.run.launch",
    ],
)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.split() == []


def test_the_source_is_python_3_10() -> None:
    import ast

    files = [path for folder in ("finetune", "recipes", "benchmarks") for path in (REPO / folder).rglob("*.py")]
    assert len(files) > 25
    for path in files:
        ast.parse(path.read_text(), feature_version=(3, 10))
