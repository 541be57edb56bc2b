"""The parts of a step as a picture: a lane a rank above, what they add up to below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from finetune.training.profiling.parts import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, OTHER, PARTS
from finetune.training.profiling.summary import RankProfile

COLOURS = {
    DATA: "#a7c957",
    FORWARD: "#2a6f97",
    BACKWARD: "#e07a30",
    COMMUNICATION: "#b23a48",
    OPTIMIZER: "#7b5ea7",
    OTHER: "#cfd4d9",
}
LANE_INCHES, SMALLEST_LABELLED = 0.42, 0.05  # the latter as a share of the picture's width
SHOWN_LANES = 16


def plot_parts(ranks: Sequence[RankProfile], path: Path) -> None:
    """The middle one of the traced steps in time, and the mean of all of them."""
    shown = ranks[:SHOWN_LANES]
    number = len(shown[0].steps) // 2
    figure = Figure(figsize=(11, 2 * (LANE_INCHES * len(shown) + 0.8) + 0.6), layout="constrained")
    lanes, bars = figure.subplots(2, 1)
    for lane, rank in enumerate(shown):
        step = rank.steps[number]
        for part in PARTS:
            pieces = [(start / 1e6, (end - start) / 1e6) for start, end in step.pieces[part]]
            lanes.broken_barh(pieces, (lane - 0.4, 0.8), facecolor=COLOURS[part], linewidth=0)
    lanes.set_title(
        f"step {shown[0].numbers[number]} in time; each rank from its own beginning", loc="left", fontsize=10
    )
    lanes.set_xlabel("milliseconds since the step began")
    longest = max(rank.step_seconds for rank in shown) * 1e3
    for lane, rank in enumerate(shown):
        left = 0.0
        for part in PARTS:
            width = rank.mean_seconds(part) * 1e3
            bars.barh(lane, width, left=left, height=0.8, color=COLOURS[part])
            if width > SMALLEST_LABELLED * longest:
                share = width / (rank.step_seconds * 1e3)
                colour = "black" if part in (DATA, OTHER) else "white"
                bars.text(left + width / 2, lane, f"{share:.0%}", ha="center", va="center", color=colour, fontsize=8)
            left += width
    bars.set_title(f"mean of {len(shown[0].steps)} step(s)", loc="left", fontsize=10)
    bars.set_xlabel("milliseconds")
    for axes in (lanes, bars):
        _dress(axes, shown)
    handles = [Patch(facecolor=COLOURS[part], label=part) for part in PARTS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _dress(axes: Any, shown: Sequence[RankProfile]) -> None:
    axes.set_yticks(range(len(shown)), [f"rank {rank.rank}" for rank in shown])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
