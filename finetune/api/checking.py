"""`check`: find mistakes in a DeepSpeed config, as `finetune check` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.api.html import block, table
from finetune.api.words import words_of
from finetune.cli import parser
from finetune.commands.check import codes, described, summary, wanted
from finetune.dsconfig.check import Placed
from finetune.dsconfig.check import check as check_text
from finetune.dsconfig.context import Context
from finetune.dsconfig.formats import written

NAMELESS = "config"  # the name of a config given as a dict


@dataclass(frozen=True)
class Checked:
    """The findings, in line order. `str()` is what `finetune check` prints."""

    name: str
    findings: tuple[Placed, ...]
    summary: str

    @property
    def ok(self) -> bool:
        """True without errors: warnings stop no run."""
        return not self.errors

    @property
    def errors(self) -> list[Placed]:
        return [placed for placed in self.findings if placed.is_error]

    @property
    def warnings(self) -> list[Placed]:
        return [placed for placed in self.findings if not placed.is_error]

    def __str__(self) -> str:
        lines = written([(self.name, placed) for placed in self.findings], "text")
        return f"{lines}\n{self.summary}" if lines else self.summary

    def _repr_html_(self) -> str:
        rows = [(str(one.line), one.finding.severity, one.finding.code, one.finding.message) for one in self.findings]
        return block(self.name, [self.summary], table(("line", "severity", "code", "finding"), rows) if rows else "")


def check(
    config: str | Path | Mapping[str, Any],
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    pipeline_parallel_size: int | None = None,
    sequence_parallel_size: int | None = None,
    expert_parallel_size: int | None = None,
    gpu_name: str | None = None,
    gpu: bool = False,
    cpu: bool = False,
    model: str | Path | None = None,
    engine: str | None = None,
    versions: Mapping[str, str] | None = None,
    disable: Sequence[str] = (),
) -> Checked:
    """Every finding about a DeepSpeed config: a path, a shipped name such as "zero2", a recipe's YAML, or a dict. The
    other arguments describe its run, like the options of `finetune check`. Raises RequestError if there is nothing to
    check, or if there can be no such run."""
    options = {
        "world_size": world_size,
        "ranks_per_node": ranks_per_node,
        "pipeline_parallel_size": pipeline_parallel_size,
        "sequence_parallel_size": sequence_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "gpu_name": gpu_name,
        "model": model,
        "engine": engine,
        "versions": ",".join(f"{name}=={one}" for name, one in versions.items()) if versions else None,
        "disable": ",".join(disable) or None,
    }
    switches = [word for word, is_on in (("--gpu", gpu), ("--cpu", cpu)) if is_on]
    is_dict = isinstance(config, Mapping)
    files = [] if is_dict else [str(config)]
    asked = parser().parse_args(["check", *files, *words_of(options), *switches])
    if isinstance(config, Mapping):
        return _checked(NAMELESS, json.dumps(config, indent=2), described(asked, None), codes(asked.disable))
    texts, context, disabled = wanted(asked)
    (text,) = texts.values()
    return _checked(str(config), text, context, disabled)


def _checked(name: str, text: str, context: Context, disabled: Sequence[str]) -> Checked:
    found = check_text(text, context, disabled).found
    errors = sum(placed.is_error for placed in found)
    return Checked(name, found, summary(1, errors, list(found), context))
