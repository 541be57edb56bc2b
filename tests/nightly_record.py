"""`--nightly_record PATH`: what a whole run of the nightly tests came to, as JSON. test_nightly.py reads it.

A night takes an hour. `--nightly_retry` runs only the tests that failed in the recorded one, after their cause has been
mended, and enters into the record which of them passed, and at which commit.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
RECORD = REPO / "tests" / "nightly.json"
PRODUCT = ("finetune", "recipes", "ds_configs", "install.sh", "pyproject.toml")
STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly_record", type=Path, help="write here what all nightly tests came to, as JSON")
    parser.addoption("--nightly_retry", action="store_true", help="run only what failed in --nightly_record")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("nightly_retry"):
        if config.getoption("nightly_record") is None:
            raise pytest.UsageError("--nightly_retry needs --nightly_record PATH")
        failures = json.loads(config.getoption("nightly_record").read_text())["failures"]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in failures])
        items[:] = [item for item in items if item.nodeid in failures]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("nightly_record")
    if path is None or hasattr(config, "workerinput"):  # workers of xdist report to the process that started them
        return
    found = terminalreporter.stats
    if config.getoption("nightly_retry"):
        _retried(path, _nodes(found, "passed") - _nodes(found, "failed", "error"))
        return
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in found.get("skipped", ()))
    record = {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("status", "--porcelain", "--", *PRODUCT).splitlines(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "selected": config.getoption("markexpr"),
        "narrowed": [*config.args] if config.args_source is config.ArgsSource.ARGS else [],
        "passed": len(_nodes(found, "passed") - _nodes(found, "failed", "error")),
        "failures": sorted(_nodes(found, "failed", "error")),
        "skipped": dict(sorted(reasons.items())),
        "minutes": round((time.monotonic() - STARTED) / 60, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
    }
    if words := config.getoption("keyword"):
        record["narrowed"].append(f"-k {words}")
    _write(path, record)
    terminalreporter.write_line(f"nightly record: {path}")


def _nodes(found: dict[str, Any], *kinds: str) -> set[str]:
    """The tests of these kinds; one whose teardown fails has passed, too."""
    return {report.nodeid for kind in kinds for report in found.get(kind, ())}


def _retried(path: Path, passed: set[str]) -> None:
    record = json.loads(path.read_text())
    mended = [name for name in record["failures"] if name in passed]
    record["failures"] = [name for name in record["failures"] if name not in passed]
    record["passed"] += len(mended)
    changed = git("status", "--porcelain", "--", *PRODUCT).splitlines()
    record["retried"] = [*record.get("retried", []), {"commit": git("rev-parse", "HEAD"), "tests": mended}]
    record["uncommitted"] = sorted({*record["uncommitted"], *changed})
    _write(path, record)


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True).stdout.strip()
