"""A run's folder as an object: its results, curves and model."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.api.html import block, table
from finetune.errors import RequestError
from finetune.report.run_curves import training_curves
from finetune.report.run_folder import RunFolder
from finetune.report.run_sections import card_heading, tiles, verdict
from finetune.report.svg import escaped, svg_file
from finetune.report.write import read


@dataclass(frozen=True)
class Plot:
    """A picture. A notebook shows it; `save` writes it."""

    svg: str
    alt: str

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_html_(self) -> str:
        """An image: inline, the SVG's style would apply to the whole page."""
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escaped(self.alt)}" src="data:image/svg+xml;base64,{data}">'


@dataclass(frozen=True)
class LoadedRun:
    """What a run left in `folder`. Nothing in it is trusted: reads are bounded in size, and no code is run."""

    folder: Path
    found: RunFolder = field(repr=False)

    @property
    def finished(self) -> bool:
        return self.found.finished

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of all_results.json: the results of training, evaluation and prediction."""
        return dict(self.found.results)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: the Trainer's logs, each with its step."""
        return [dict(row) for row in self.found.rows]

    @property
    def recipe(self) -> str | None:
        """The recipe that wrote the folder; None if unknown."""
        name = self.found.recipe.get("recipe")
        return name if isinstance(name, str) else None

    @cached_property
    def model(self) -> Any:
        """The trained model, loaded on first access, on the CPU and in evaluation mode."""
        from finetune.api.opening import open_model

        return open_model(self.folder, self.found.recipe)

    @cached_property
    def tokenizer(self) -> Any:
        """The trained model's tokenizer, or the image processor of an image model."""
        from finetune.api.opening import open_processor

        return open_processor(self.folder, self.found.recipe)

    def plot(self) -> Plot:
        """Training and evaluation loss over the steps. Raises RequestError if no loss has been logged."""
        pictures = training_curves(self.found.rows, "")
        if not pictures:
            raise RequestError(f"{self.folder}: no loss has been logged there, so there is nothing to plot.")
        return Plot(svg_file(pictures[0]), pictures[0].alt)

    def _repr_html_(self) -> str:
        rows = tiles(self.found)
        lines = filter(None, (card_heading(self.found), verdict(self.found), *self.found.notes))
        return block(f"run {self.folder}", lines, table(("metric", "value"), rows) if rows else "")


def load_run(folder: str | Path) -> LoadedRun:
    """The run in a folder, which may be untrusted. Raises RequestError if there is none."""
    path = Path(folder).expanduser()
    runs, _ = read([path])
    if not runs:
        raise RequestError(f"{path}: holds a bench, not a run. `finetune bench {path}` shows it.")
    return LoadedRun(runs[0].folder, runs[0])
