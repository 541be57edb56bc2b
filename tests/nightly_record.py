"""`--nightly_record PATH`: what a whole run of the nightly tests came to, as JSON. test_nightly.py reads it.

A night takes two hours. `--nightly_retry` runs only the tests that failed in the recorded one, after their cause has
been mended, and enters into the record which of them passed, and at which commit. Of a night that was interrupted,
whole files count; `--nightly_go_on` runs the others and adds them to the record.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
RECORD = REPO / "tests" / "nightly.json"
PRODUCT = ("finetune", "recipes", "ds_configs", "install.sh", "pyproject.toml")
STARTED = time.monotonic()
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
COLLECTED = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly_record", type=Path, help="write here what all nightly tests came to, as JSON")
    parser.addoption("--nightly_retry", action="store_true", help="run only what failed in --nightly_record")
    parser.addoption("--nightly_go_on", action="store_true", help="run only the files that --nightly_record lacks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    retries, goes_on = (config.getoption(name) for name in ("nightly_retry", "nightly_go_on"))
    if not retries and not goes_on:
        return
    if config.getoption("nightly_record") is None:
        raise pytest.UsageError("--nightly_retry and --nightly_go_on need --nightly_record PATH")
    record = json.loads(config.getoption("nightly_record").read_text())
    wanted = {*record["failures"]} if retries else {*record.get("left", [])}
    parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        parts[(item.nodeid if retries else _file(item.nodeid)) in wanted].append(item)
    items[:] = parts[True]
    config.hook.pytest_deselected(items=parts[False])


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash.setdefault(COLLECTED, set()).update(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Iterable[str]) -> None:
    node.config.stash.setdefault(COLLECTED, set()).update(ids)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("nightly_record")
    if path is None or hasattr(config, "workerinput"):  # workers of xdist report to the process that started them
        return
    found = {kind: terminalreporter.stats.get(kind, []) for kind in OUTCOMES}
    if config.getoption("nightly_retry"):
        _retried(path, _nodes(found, "passed") - _nodes(found, "failed", "error"))
        return
    left = sorted({_file(one) for one in config.stash.get(COLLECTED, set()) - _nodes(found, *OUTCOMES)})
    found = {kind: [one for one in found[kind] if _file(one.nodeid) not in left] for kind in OUTCOMES}
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in found["skipped"])
    record = {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("status", "--porcelain", "--", *PRODUCT).splitlines(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "selected": config.getoption("markexpr"),
        "narrowed": [*config.args] if config.args_source is config.ArgsSource.ARGS else [],
        "passed": len(_nodes(found, "passed") - _nodes(found, "failed", "error")),
        "failures": sorted(_nodes(found, "failed", "error")),
        "skipped": dict(sorted(reasons.items())),
        "left": left,
        "minutes": round((time.monotonic() - STARTED) / 60, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
    }
    if words := config.getoption("keyword"):
        record["narrowed"].append(f"-k {words}")
    _write(path, _added(json.loads(path.read_text()), record) if config.getoption("nightly_go_on") else record)
    terminalreporter.write_line(f"nightly record: {path}")


def _file(node: str) -> str:
    return node.partition("::")[0]


def _added(night: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The night with what it had left; its commit stays that of its start, the oldest."""
    either = {name: sorted({*night[name], *part[name]}) for name in ("failures", "uncommitted", "narrowed")}
    return {
        **night,
        **either,
        "passed": night["passed"] + part["passed"],
        "skipped": dict(Counter(night["skipped"]) + Counter(part["skipped"])),
        "left": part["left"],
        "minutes": round(night["minutes"] + part["minutes"], 1),
        "went_on": [*night.get("went_on", []), {name: part[name] for name in ("commit", "date", "minutes")}],
    }


def _nodes(found: dict[str, Any], *kinds: str) -> set[str]:
    """The tests of these kinds; one whose teardown fails has passed, too."""
    return {report.nodeid for kind in kinds for report in found[kind]}


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
