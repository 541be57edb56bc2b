"""The curves of one run, or of several overlaid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.report.curves import SAMPLES, SECONDS, STEP, TOKENS, Curve, Panel, draw
from finetune.report.page import Curves
from finetune.report.run_folder import RunFolder
from finetune.report.shapes import WIDE, Picture, Point, colour_of
from finetune.report.text import as_number, spelled
from finetune.run.mixture import COUNT_OF_FILE, MOST_LOGGED, OF_FILE

LOSS = "loss"
TITLES = {
    LOSS: "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "real_tokens_per_second": "Tokens per second, all ranks",
    "samples_per_second": "Samples per second, all ranks",
    "step_seconds": "Seconds per step",
    "kl": "KL",
    "eval_kl": "KL to the reference",
    "comm_bytes_per_step": "Bytes that rank 0 sends for gradients, per step",
}
# The evaluation's own speed, what is on an axis already, and what is the same in every row.
NOT_DRAWN = set(
    "step epoch time eval_loss eval_runtime eval_samples_per_second eval_steps_per_second eval_samples "
    "eval_model_preparation_time total_flos num_input_tokens_seen padding_share "
    "comm_share_of_fp32".split()
)
MOST_PANELS = 14


def curves_of(runs: Sequence[RunFolder]) -> Curves | None:
    """None if nothing has been logged."""
    drawn = [run for run in runs if run.logged]
    if not drawn:
        return None
    files = _files(drawn[0]) if len(drawn) == 1 else []
    of_files = {f"{OF_FILE}{name}" for name in files}
    keys = [key for key in _keys(drawn) if key not in of_files]
    found = [panel for key in keys if (panel := _panel(drawn, key)) is not None]
    if files:
        found.insert(1, _panel_of_files(drawn[0], files))
    panels = tuple(found[:MOST_PANELS])
    if not panels:
        return None
    axes = [axis for axis in panels[0].axes if all(axis in panel.axes for panel in panels)]
    if TOKENS in axes and SAMPLES in axes:
        axes.remove(SAMPLES)
    several = len(drawn) > 1
    key = tuple((run.name, colour_of(index)) for index, run in enumerate(drawn)) if several else ()
    return Curves(panels, tuple(axes), key)


def training_curves(rows: Sequence[dict[str, Any]], metric: str) -> list[Picture]:
    """Training and evaluation loss over steps, and the evaluation's `metric` (its name in the logs)."""
    run = RunFolder("training", Path(), list(rows))
    return [draw(panel, STEP, WIDE) for key in (LOSS, metric) if (panel := _panel([run], key))]


def _keys(runs: Iterable[RunFolder]) -> list[str]:
    """The keys to draw: the loss, evaluation metrics, learning rate and gradient norm, speed, the rest."""
    seen = {
        key: None for run in runs for row in run.logged
        for key, value in row.items()
        if key not in NOT_DRAWN and not key.startswith(COUNT_OF_FILE) and as_number(value) is not None
    }  # fmt: skip
    if any(as_number(row.get("eval_loss")) is not None for run in runs for row in run.logged):
        seen[LOSS] = None  # a short run may be evaluated before it logs a training loss
    if "real_tokens_per_second" in seen:
        seen.pop("samples_per_second", None)
    known = list(TITLES)
    return sorted(seen, key=lambda key: (key != LOSS, not key.startswith("eval_"),
                                         known.index(key) if key in known else len(known)))  # fmt: skip


def _panel(runs: Sequence[RunFolder], key: str) -> Panel | None:
    curves = list[Curve]()
    for index, run in enumerate(runs):
        one = len(runs) == 1
        if curve := _curve(run, key, "training" if one and key == LOSS else run.name, index, key.startswith("eval_")):
            curves.append(curve)
        evaluated = "evaluation" if one else f"{run.name}, evaluation"
        if key == LOSS and (curve := _curve(run, "eval_loss", evaluated, 1 if one else index, dashed=True)):
            curves.append(curve)
    if key != LOSS and all(len(points) < 2 for curve in curves for points in curve.points.values()):
        return None  # a single value is in the results
    title = TITLES.get(key) or spelled(key.removeprefix("eval_")).capitalize()
    title += " of the evaluation" if key.startswith("eval_") else ""
    return Panel(title, tuple(curves), key == LOSS and len(runs) == 1, key == LOSS) if curves else None


def _files(run: RunFolder) -> list[str]:
    """The files of a mixture whose training losses are logged."""
    keys = dict.fromkeys(key for row in run.logged for key, value in row.items() if as_number(value) is not None)
    names = [key.removeprefix(OF_FILE) for key in keys if key.startswith(OF_FILE)]
    return [name for name in names if f"{COUNT_OF_FILE}{name}" in keys][:MOST_LOGGED]


def _panel_of_files(run: RunFolder, files: Sequence[str]) -> Panel:
    curves = (_curve(run, f"{OF_FILE}{name}", name, index, dashed=False) for index, name in enumerate(files))
    return Panel("Training loss by file", tuple(filter(None, curves)), keyed=True)


def _curve(run: RunFolder, key: str, name: str, index: int, dashed: bool) -> Curve | None:
    points: dict[str, list[Point]] = {}
    for row, at in zip(run.logged, places(run.logged), strict=True):
        if (value := as_number(row.get(key))) is None:
            continue
        for axis, place in at.items():
            some = points.setdefault(axis, [])
            if some and some[-1][0] == place:
                some.pop()  # the final evaluation repeats that of the last step
            some.append((place, value))
    return Curve(name, colour_of(index), points, dashed) if points else None


def places(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Each row's position on each axis that its run can be drawn over.

    A row's `step_seconds` and rates are means over the steps since the previous row (`finetune.training.speed`), so
    evaluation and saving do not count as training. A run without them is timed by its rows' timestamps.
    """
    found, at = list[dict[str, float]](), dict.fromkeys((TOKENS, SAMPLES, SECONDS), 0.0)
    last_step, clock, lost = 0.0, None, set[str]()
    for row in rows:
        step = as_number(row.get("step")) or 0.0
        if ("loss" in row or "step_seconds" in row) and step > last_step:
            seconds = _seconds(row, step - last_step, clock)
            tokens, samples = as_number(row.get("real_tokens_per_second")), as_number(row.get("samples_per_second"))
            for axis, rate in ((SECONDS, 1.0), (TOKENS, tokens), (SAMPLES, samples)):
                if seconds is None or rate is None:
                    lost.add(axis)
                else:
                    at[axis] += seconds * rate
            last_step, clock = step, as_number(row.get("time"))
        found.append({STEP: step, **at})
    lost |= {axis for axis, end in at.items() if not end}
    return [{axis: place for axis, place in one.items() if axis not in lost} for one in found]


def _seconds(row: Mapping[str, Any], steps: float, clock: float | None) -> float | None:
    each, now = as_number(row.get("step_seconds")), as_number(row.get("time"))
    if each is not None and each > 0:
        return each * steps
    return None if now is None else 0.0 if clock is None else max(now - clock, 0.0)
