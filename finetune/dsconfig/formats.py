"""A report as text, as JSON, as SARIF 2.1.0 for code scanning, and as GitHub's workflow commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from finetune import __version__
from finetune.dsconfig.check import Placed
from finetune.dsconfig.finding import named

SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
FORMATS = ("text", "json", "sarif", "github")
Findings = Sequence[tuple[str, Placed]]  # the file's name, and one finding


def written(findings: Findings, form: str) -> str:
    """The findings in one of FORMATS."""
    return {"text": _text, "json": _json, "sarif": _sarif, "github": _github}[form](findings)


def line(file: str, placed: Placed) -> str:
    """One finding on one line, in the format of compiler messages."""
    found = placed.finding
    return f"{file}:{placed.line}:{placed.column}: {found.severity} {found.code}: {found.message}"


def _text(findings: Findings) -> str:
    return "\n".join(line(file, placed) for file, placed in findings)


def _json(findings: Findings) -> str:
    rows = [
        {
            "file": file,
            "line": placed.line,
            "column": placed.column,
            "code": placed.finding.code,
            "severity": placed.finding.severity,
            "place": named(placed.finding.path),
            "message": placed.finding.message,
            "fixable": placed.mendable,
        }
        for file, placed in findings
    ]
    return json.dumps(rows, indent=2)


def _sarif(findings: Findings) -> str:
    codes = sorted({placed.finding.code for _, placed in findings})
    results: list[dict[str, Any]] = [
        {
            "ruleId": placed.finding.code,
            "level": placed.finding.severity,
            "message": {"text": placed.finding.message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(Path(file).as_posix())},
                        "region": {"startLine": placed.line, "startColumn": placed.column},
                    }
                }
            ],
        }
        for file, placed in findings
    ]
    driver = {"name": "finetune", "version": __version__, "rules": [{"id": code} for code in codes]}
    return json.dumps(
        {"$schema": SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}, indent=2
    )


def _github(findings: Findings) -> str:
    return "\n".join(
        f"::{placed.finding.severity} file={_escaped(file, in_a_value=True)},line={placed.line},col={placed.column},"
        f"title={placed.finding.code}::{_escaped(placed.finding.message)}"
        for file, placed in findings
    )


def _escaped(text: str, in_a_value: bool = False) -> str:
    """Escapes as in https://docs.github.com/actions/reference/workflow-commands-for-github-actions."""
    for sign in "%\r\n:," if in_a_value else "%\r\n":
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text
