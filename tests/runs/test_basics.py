"""The pages of recipes/basics: each runs as its docstring says, prints what it teaches, and can fail."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, free_port, run_to_its_end, tool

FOLDER = REPO / "recipes" / "basics"
PAGES = sorted(FOLDER.glob("*.py"))

# What each page must have printed, exactly: figures worked out by hand, next to each.
PRINTS = {
    "point_to_point": [
        "rank 1  [1, 1, 1]                     [0, 0, 0]",  # before the message from rank 0, and after
        "rank 0  isend, other work, recv, wait  received [1, 1, 1]",
        "rank 3  gave up: still in send to rank 0",  # the ring closes
        "rank 0  even/odd [3, 3, 3]            isend [3, 3, 3]               batch [3, 3, 3]",
    ],
    "collectives": [
        *("broadcast:", "scatter:", "gather:", "reduce:", "all-gather:", "all-reduce:"),
        *("reduce-scatter:", "all-to-all:", "barrier:"),
        "rank 3 | 1000 2000 3000 4000 |  ->  | 1111 2222 3333 4444 |",
        "rank 2 |  100  200  300  400 |  ->  |    3   30  300 3000 |",
        "Checked: all-reduce = reduce, then broadcast = reduce-scatter, then all-gather.",
    ],
    "ring_all_reduce": [
        "reduce-scatter 1   0001 0001 0001 1001 | 0011 0010 0010 0010 | 0100 0110 0100 0100 | 1000 1000 1100 1000",
        "all-gather 3       1111 1111 1111 1111 | 1111 1111 1111 1111 | 1111 1111 1111 1111 | 1111 1111 1111 1111",
        "bound      6,000,000",  # 2 x 3/4 x 4,000,000 bytes
        "busiest   12,000,000",  # 3 x 4,000,000 bytes, by rank 0
        "ring                     60          64          60          56",  # 20 steps of 3 or 2 elements in all
        "The ring equals dist.all_reduce.",
    ],
    "ddp_by_hand": [
        "8 messages, 4,352 bytes",  # 4 layers of 16 x 16 + 16 parameters, 4 bytes each
        "2 messages, 4,352 bytes",
        "All three equal torch's DDP and one process.",
    ],
    # 12 x 24 + 24 = 312, 24 x 24 + 24 = 600 and 24 x 6 + 6 = 150: 1,062 parameters
    "zero1_by_hand": [
        "0-- 0-- 0--           -1- -1- -1-           --2 --2 --2",
        "4 + 4 + 8/N          4,248       4,248       2,832         10.67",
        "the weights equal one process",
    ],
    "zero2_by_hand": [
        "--- 012 0--           --- 012 -1-           --- 012 --2",  # Lb whole, Lc's slice kept
        "4 + (4+8)/N          4,248       1,416       2,832          8.00",
        "the weights equal one process",
    ],
    "zero3_by_hand": [
        "0-- 012 0--           -1- 012 -1-           --2 012 --2",  # Lb computes
        "16/N                 1,416       1,416       2,832          5.33",
        "every slice equals that of one process. Each step moved 3 x 1,062 elements.",
    ],
    "ulysses_by_hand": [
        "rank 1: tokens 16-31,  8 of them learnt; attended for 1 of 4 heads",  # 24 of 64 are a prompt
        "a rank sent 12,288 bytes",  # 8 tensors of 16 x 32 numbers in 4 bytes, 3/4 of each
    ],
    "experts_by_hand": [
        "rank 0: experts 0-1 got 64 rows; sent 2,048 bytes",  # 32 results of 16 numbers, to rank 1
        "rank 3: experts 2-3 got  0 rows; sent 4,096 bytes",  # 16 tokens x 2 experts, and their gradients
    ],
}

# One line of a page made wrong, as a learner might: the page's own checks must stop it.
FAULTS = {
    "point_to_point": ("P2POp(dist.isend, mine, RIGHT)", "P2POp(dist.isend, mine + 1, RIGHT)"),
    "collectives": ("dist.reduce(by_rank_0, dst=0)", "pass"),
    "ring_all_reduce": ("mine += arrived", "mine.copy_(arrived)"),
    "ddp_by_hand": ("(flat / WORLD)", "flat"),
    "zero1_by_hand": (".div_(WORLD)", ""),
    "zero2_by_hand": ("whole.grad = None", "pass"),
    "zero3_by_hand": ("layer.register_forward_hook(lambda *_: self.free())", "pass"),
    "ulysses_by_hand": ("labels[mine], first=mine.start", "labels[mine], first=0"),
    "experts_by_hand": ("dist.all_reduce(expert_weights.grad, group=alike)", "dist.all_reduce(expert_weights.grad)"),
}


def one_quick_of(names: list[str], quick: str) -> list[Any]:
    """The names as test parameters: one in the quick suite, the others among the slow tests."""
    assert quick in names
    return [name if name == quick else pytest.param(name, marks=pytest.mark.nightly) for name in names]


RANKS_ASKED = r'"WORLD_SIZE"\) (!=|not in) '  # in a page for certain numbers of ranks


def page_of(name: str) -> Path:
    return FOLDER / f"{name}.py"


def docstring(page: Path) -> str:
    return ast.get_docstring(ast.parse(page.read_text())) or ""


def command_of(page: Path) -> list[str]:
    """The words of the torchrun line in the docstring, with a port of their own."""
    line = re.search(r"^\s*torchrun (.+)$", docstring(page), re.MULTILINE)
    assert line, f"{page.name}: no torchrun line in the docstring"
    return [tool("torchrun"), "--master_port", free_port(), *line[1].split()]


def run(page: Path, changed: Path | None = None) -> tuple[int, str]:
    """Run the page by its own command, or the same command with a changed copy of the page."""
    command = command_of(page)
    named = f"recipes/basics/{page.name}"
    assert named in command, f"{page.name}: its torchrun line starts another file"
    return run_to_its_end([str(changed) if changed and word == named else word for word in command])


def test_the_pages_are_there() -> None:
    assert {page.stem for page in PAGES} >= set(PRINTS) == set(FAULTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_stands_alone(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 150
    modules = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name for node in modules if isinstance(node, ast.Import) for name in node.names}
    names |= {node.module or "." for node in modules if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names}
    own = {other.stem for other in PAGES} | {"finetune", "recipes", "", "deepspeed", "transformers", "accelerate"}
    assert not roots & own, "a page imports no other page, and neither the toolkit nor what hides the idea"


@pytest.mark.parametrize("name", one_quick_of([page.stem for page in PAGES], "zero3_by_hand"))
def test_a_page_runs_as_its_docstring_says_and_prints_what_it_teaches(name: str) -> None:
    status, output = run(page_of(name))
    assert status == 0, output[-6000:]
    assert "Warning" not in output
    said = [line for line in output.splitlines() if line and "torch/distributed/run.py" not in line]
    assert len(said) >= 4, "a page shows something"
    for words in PRINTS.get(name, []):
        assert words in output, f"{words!r} is missing in:\n{output}"


@pytest.mark.parametrize(
    "name",
    one_quick_of([page.stem for page in PAGES if re.search(RANKS_ASKED, page.read_text())], "ddp_by_hand"),
)
def test_of_a_wrong_number_of_ranks_rank_0_alone_speaks(name: str) -> None:
    """The others end well and silent: torchrun would end rank 0 with them before it has spoken."""
    command, wrong = [sys.executable, str(page_of(name))], {"WORLD_SIZE": "5", "OMP_NUM_THREADS": "1"}
    status, output = run_to_its_end(command, {**wrong, "RANK": "0"})
    assert (status, output.count("error: "), output.count("torchrun --nproc_per_node")) == (2, 1, 1), output
    assert run_to_its_end(command, {**wrong, "RANK": "3"}) == (0, "")


@pytest.mark.nightly
def test_the_first_message_of_ddp_leaves_in_mid_backward_only_with_overlap() -> None:
    status, output = run(page_of("ddp_by_hand"))
    assert status == 0, output[-6000:]
    order = {line.split()[0]: line.split()[2:-1] for line in output.splitlines() if line.endswith(" step")}
    assert order["0"] == [event for event in order["1"] if not event.startswith(">")]
    assert order["2"][-2:] == [">1", ">2"]
    assert order["3"].index(">1") == 4


@pytest.mark.parametrize("name", one_quick_of(list(FAULTS), "zero2_by_hand"))
def test_a_page_with_a_mistake_in_it_fails(name: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[name]
    text = page_of(name).read_text()
    assert text.count(right) == 1
    copy = tmp_path / f"{name}.py"
    copy.write_text(text.replace(right, wrong))
    status, output = run(page_of(name), changed=copy)
    assert status == 1, output[-6000:]
    assert "AssertionError" in output


@pytest.mark.parametrize("name", one_quick_of([page.stem for page in PAGES], "collectives"))
def test_without_torchrun_a_page_says_in_one_line_how_to_start_it(name: str) -> None:
    status, output = run_to_its_end([sys.executable, str(page_of(name))])
    assert status == 2, output
    assert output.count("\n") == 1
    line = re.search(r"torchrun .+", docstring(page_of(name)))
    assert line
    assert line[0] in output
