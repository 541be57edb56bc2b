"""Pages of recipes/basics that draw: the picture shows something, the table is whole; a page with a mistake fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import REPO, free_port, run_to_its_end, tool
from matplotlib.image import imread

FOLDER = REPO / "recipes" / "basics"
FEEDBACK = ("int8 + feedback", "random-k + feedback", "1-bit + feedback", "top-k + feedback")
ALONE = ("int8 alone", "random-k alone", "1-bit alone", "top-k alone")

# What each page that draws says at the beginning of lines: the rows of its table.
ROWS = {
    "gradient_compression": ("uncompressed", *FEEDBACK, *ALONE),
    "powersgd": ("uncompressed", "r = 1 + feedback", "r = 2 + feedback", "r = 4 + feedback", "r = 2 alone"),
    "parameter_server": ("synchronous", "stale, the same rate", "stale, rate / (1 + s)"),
    "gossip": ("all-reduce", "gossip", "alone"),
}

# A line of a page, what a learner might write instead, and the words with which the page's own check stops it.
MISTAKES = {
    "a gradient sent back doubled": (
        *("model_parallelism", "dist.send(received.grad, rank - 1)", "dist.send(received.grad * 2, rank - 1)"),
        "does not compute what one process computes",
    ),
    "micro-batches whose losses are added, not averaged": (
        *("pipeline_by_hand", "targets[m]) / micro_batches", "targets[m])"),
        "the loss is not that of one process",
    ),
    "1F1B with one forward too many": (
        *("pipeline_by_hand", "min(stages - 1 - stage, micro_batches)", "min(stages - stage, micro_batches)"),
        "activations held: [5, 4, 3, 2], and not [4, 3, 2, 1]",
    ),
    "errors that are not fed back": (
        *("gradient_compression", "error = corrected - arrived[rank] if feedback else error", "pass"),
        "random-k + feedback: ",
    ),
    "signs that are not packed": (
        *("gradient_compression", "(signs * BITS).sum(1).to(torch.uint8)", "(signs * BITS).sum(1)"),
        "1-bit sent",
    ),
    "PowerSGD without feedback": (
        *("powersgd", "use_error_feedback=feedback", "use_error_feedback=False"),
        "r = 1 + feedback: ",
    ),
    "stale gradients at the full rate": (
        *("parameter_server", "LEARNING_RATE / (1 + s)", "LEARNING_RATE"),
        "the mend did not help",
    ),
    "gossip that hears one neighbour only": (
        *("gossip", "(from_left + mine + from_right) / 3", "(from_left + mine + from_left) / 3"),
        "the distance went from",
    ),
}


def run(page: str, *words: str, text: str | None = None, folder: Path | None = None) -> tuple[int, str]:
    """A page by the command in its docstring, or in its place a copy with another text."""
    path = FOLDER / f"{page}.py"
    line = re.search(r"^ +torchrun --nproc_per_node (\d) recipes/basics/(\w+)\.py$", path.read_text(), re.MULTILINE)
    assert line, f"{page}: no torchrun line in the docstring"
    assert line[2] == page
    if text is not None:
        assert folder
        path = folder / path.name
        path.write_text(text)
    command = [tool("torchrun"), "--master_port", free_port(), "--nproc_per_node", line[1], str(path), *words]
    return run_to_its_end(command, {"OMP_NUM_THREADS": "1"})


@pytest.mark.nightly
@pytest.mark.parametrize("page", ROWS)
def test_a_page_draws_its_picture_and_prints_its_table(page: str, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "picture.png"
    status, output = run(page, "--output", str(picture))
    assert status == 0, output[-6000:]
    assert "Warning" not in output
    for row in ROWS[page]:
        assert re.search(rf"^ *{re.escape(row)} .*\d", output, re.MULTILINE), f"{row!r} is missing in:\n{output}"
    assert f"plot: {picture}" in output

    pixels = imread(picture)[..., :3]  # (height, width, 3) from 0 to 1
    height, width, _ = pixels.shape
    assert width >= 600
    assert height >= 200
    assert picture.stat().st_size < 100_000
    inked = (pixels < 0.9).any(axis=2)
    assert 0.01 < inked.mean() < 0.6, "neither blank nor all ink"
    for column in range(3):  # ink in the left, the middle and the right
        assert inked[:, column * width // 3 : (column + 1) * width // 3].mean() > 0.005
    colourful = (pixels.max(axis=2) - pixels.min(axis=2)) > 0.3  # bars and curves, not only axes and words
    assert colourful.mean() > 0.002


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_page_stops_at_a_mistake(mistake: str, tmp_path: Path) -> None:
    page, right, wrong, words = MISTAKES[mistake]
    text = (FOLDER / f"{page}.py").read_text()
    assert text.count(right) == 1
    picture = ["--output", str(tmp_path / "picture.png")] if page in ROWS else []
    status, output = run(page, *picture, text=text.replace(right, wrong), folder=tmp_path)
    assert status == 1, output[-6000:]
    assert re.search(rf"AssertionError: .*{re.escape(words)}", output), output[-6000:]


@pytest.mark.nightly
@pytest.mark.parametrize("page", ["parameter_server", "gossip"])
def test_too_few_processes_are_refused_in_one_line(page: str) -> None:
    command = [tool("torchrun"), "--master_port", free_port(), "--nproc_per_node", "2", str(FOLDER / f"{page}.py")]
    status, output = run_to_its_end(command, {"OMP_NUM_THREADS": "1"})
    assert status == 1, "torchrun's own, for a rank that ended with 2"
    assert output.count(f"error: start it with: torchrun --nproc_per_node 4 recipes/basics/{page}.py") == 1
    assert "exitcode  : 2" in output
