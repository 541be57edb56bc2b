"""`--nightly_record PATH`: what a whole run of the nightly tests came to, as JSON. test_nightly.py reads it."""

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


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("nightly_record")
    if path is None:
        return
    found = terminalreporter.stats
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in found.get("skipped", ()))
    record = {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("status", "--porcelain", "--", *PRODUCT).splitlines(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "selected": config.getoption("markexpr"),
        "narrowed": [*config.args] if config.args_source is config.ArgsSource.ARGS else [],
        "passed": len(found.get("passed", ())),
        "failed": len(found.get("failed", ())) + len(found.get("error", ())),
        "skipped": dict(sorted(reasons.items())),
        "minutes": round((time.monotonic() - STARTED) / 60, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
    }
    if words := config.getoption("keyword"):
        record["narrowed"].append(f"-k {words}")
    path.write_text(json.dumps(record, indent=2) + "\n")
    terminalreporter.write_line(f"nightly record: {path}")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True).stdout.strip()
