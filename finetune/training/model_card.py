"""The model card: what the model is, what it was trained on, how well it performs, how to reproduce it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from finetune.privacy import without_home
from finetune.report.page import markdown
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.identity import lineage_lines, read_run
from finetune.training.run_folder import write_text
from finetune.training.start import Session


@dataclass(frozen=True)
class Card:
    """A recipe's part of the model card. `table` has counts for each split, after a header row; `use` is Python that
    opens the folder; `sample` is text that the model generated."""

    task: str
    table: Sequence[Sequence[Any]]
    facts: Sequence[str]
    pictures: Sequence[tuple[str, str]]
    use: str
    pipeline_tag: str = ""  # the task, unless given; `write_card` fills these five, and `with_deepspeed`
    model: str = ""
    base_model: str | None = None
    recipe: str = ""
    source: str = ""
    sample: str = ""
    library: str = "transformers"  # named on the hub as the library that opens the model
    tables: Sequence[tuple[str, Sequence[Sequence[Any]]]] = ()  # further tables: a sentence, a header, rows
    with_deepspeed: bool = False  # whether the folder has ds_config.json


def model_card(card: Card, metrics: dict[str, Any], environment: dict[str, Any], lineage: Sequence[str] = ()) -> str:
    """Markdown with the hub's front matter. Names and paths from data are escaped. `lineage` says which steps ran under
    which flags."""
    return markdown("model_card.md").render(
        card=card,
        title=card.task[:1].upper() + card.task[1:],
        lineage=lineage,
        metrics=[(name, _number(value)) for name, value in metrics.items() if isinstance(value, int | float)],
        command=_begun_anew(environment["command"]).replace("`", "'"),
        versions=", ".join(f"{name} {version}" for name, version in environment["packages"].items()),
    )


def _begun_anew(command: str) -> str:
    """Without --resume and --resume_changed and their values: a new run has nothing to resume."""
    kept, drops = list[str](), False
    for word in shlex.split(command):
        if word.startswith("--"):
            drops = word.partition("=")[0].replace("-", "_") in ("__resume", "__resume_changed")
        if not drops:
            kept.append(word)
    return shlex.join(kept)


def write_card(session: Session, source: Any, account: Any, card: Card) -> None:
    """Write README.md of a run folder, with the model that was found as `source`, the data in `account`, and the
    results and the environment that the run recorded there."""
    folder, run = session.folder, session.run
    card = replace(
        card,
        pipeline_tag=card.pipeline_tag or run.task.name,
        model=source.description,
        base_model=source.hub_id,
        recipe=run.recipe.script,
        source=account.source,
        use=_known_to_transformers(folder, source) + card.use,
        with_deepspeed=(folder / "ds_config.json").is_file(),
    )
    environment = read_json_object(folder / "environment.json")
    known = read_run(folder)
    lineage = lineage_lines(known[1]) if known else ()
    write_text(folder / "README.md", without_home(model_card(card, results_of(folder), environment, lineage)))


def _known_to_transformers(folder: Path, source: Any) -> str:
    """The import without which transformers would not open the folder, if the model is one of ours."""
    saved = folder / "config.json"  # missing if the run trained an adapter, or not at all
    kind = read_json_object(saved).get("model_type") if saved.is_file() else getattr(source.config, "model_type", None)
    module = CONFIG_MAPPING[kind].__module__ if kind in CONFIG_MAPPING else ""
    return f"import {module}  # makes the model known to transformers\n" if module.startswith("finetune.") else ""


def results_of(folder: Path) -> dict[str, Any]:
    """The contents of all_results.json; empty if there is no such file."""
    path = folder / "all_results.json"
    return read_json_object(path) if path.is_file() else {}


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
