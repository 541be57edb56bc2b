"""`plan`: the memory and time that a run would take, as `finetune plan` computes them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.api.html import block, table_of
from finetune.api.words import from_python, words_of
from finetune.cli import parser
from finetune.commands.plan import Outcome, plan_of, with_layouts
from finetune.plan.plan import Plan
from finetune.plan.search import Found
from finetune.report.plan_tables import layout_table, memory_table, show, step_table
from finetune.report.plan_words import fits_with, headline, more_words, rank_kinds, show_answer, verdict
from finetune.run.choose import recipes

TEXT_WIDTH = 120
MOST_LAYOUTS = 5  # in a notebook
SWITCHES = ("longest", "largest_batch", "largest_model", "one_more_gpu")


@dataclass(frozen=True)
class Planned:
    """A plan, and the layouts that were searched, fastest first. `str()` is what `finetune plan` prints."""

    plan: Plan = field(repr=False)
    layouts: Found | None = field(repr=False)
    notes: tuple[str, ...]
    fits: bool
    peak_bytes: int
    limit_bytes: int
    step_seconds: float
    samples_per_second: float
    outcome: Outcome = field(repr=False)  # includes `answer`, `cost`, `one_more` and `ways_out`

    def to_dict(self) -> dict[str, Any]:
        """What `finetune plan --json` prints."""
        return self.outcome.as_json()

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=TEXT_WIDTH)
        show_answer(console, self.outcome.answer, self.outcome.lines)
        show(console, self.plan, self.layouts, self.outcome.ways_out, self.notes)
        return text.getvalue()

    def _repr_html_(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        tables = [table_of(memory_table(self.plan, rank_kinds(self.plan)[:2])), table_of(step_table(self.plan))]
        if self.layouts is not None and self.layouts.fitting:
            tables.append(table_of(layout_table(self.plan, self.layouts), MOST_LAYOUTS))
        ways_out = map(fits_with, self.outcome.ways_out)
        lines = [*self.outcome.lines, verdict(self.plan), *ways_out, *more_words(self.plan), *notes]
        return block(headline(self.plan), lines, *tables)


@from_python()
def plan(
    target: str | Path | None = None,
    *,
    model: str | Path | None = None,
    gpu: str | Path = "cpu",
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    host_memory: float | None = None,
    global_batch_size: int | None = None,
    layouts: Sequence[str] | None = None,
    search: bool = True,
    params_per_layer: int | None = None,
    **flags: Any,
) -> Planned:
    """Memory per rank and time per step of a run, which need not be possible on this machine; without torch. `target`
    is a recipe, such as "causal_lm", a recipe's YAML, or a model: its folder, its config.json, or a known name such as
    "gpt2". `model` names a model if `target` is a recipe. `host_memory` is in GiB per node; None: that of the GPU's
    profile. `flags` are the recipe's, and those of questions: `longest=True`, `deadline=8`, `price_per_gpu_hour=2`.
    With `search` False, no other layouts are searched.

    Raises RequestError."""
    target, model = (None if one is None else str(one) for one in (target, model))
    if target in recipes():
        flags["recipe"], target = target, model
    elif target is not None and model is not None:
        flags["model_name_or_path"] = model  # of a YAML; beside another model it is refused
    options = {
        "gpu": gpu,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "host_memory": host_memory,
        "global_batch_size": global_batch_size,
        "layouts": layouts,
        "params_per_layer": params_per_layer,
    }
    named = target or model
    switched = [f"--{name}" for name in SWITCHES if flags.pop(name, False)] + ([] if search else ["--no_search"])
    # The target comes first: after a flag that takes several values it would be one of them.
    asked = parser().parse_args(["plan", *([named] if named else []), *switched, *words_of({**options, **flags})])
    outcome = with_layouts(plan_of(asked), asked.no_search)
    found, seconds = outcome.plan, outcome.plan.seconds
    figures = (found.fits, found.peak_bytes, found.limit_bytes, seconds.total, seconds.samples_per_second)
    return Planned(found, outcome.layouts, tuple(outcome.notes), *figures, outcome)
