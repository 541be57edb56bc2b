"""What `finetune plan` prints: every figure, and no line wider than the terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from rich.console import Console

from finetune.plan.job import DEEPSPEED, PIPELINE, Job
from finetune.plan.machine import find_machine
from finetune.plan.memory import RankMemory
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.plan import Plan, plan
from finetune.plan.search import Candidate, Found, slower_by
from finetune.plan.seconds import StepSeconds
from finetune.plan.step import Moment
from finetune.plan.zero import Zero
from finetune.report.plan_tables import layout_table, memory_table, show, step_table
from finetune.report.plan_words import rank_kinds
from finetune.report.text import gib, number, seconds_words

GIB = 2**30
MODEL = model_of(find_model_config("gptlite-post"), "gptlite-post")
MACHINE = find_machine("H100-80GB")
SECONDS = StepSeconds(
    forward=0.2, backward=0.4, recomputation=0.1, copies=0.01, optimizer=0.05, communication=0.3,
    exposed_communication=0.02, offload=0.0, loop=0.004, launch=0.003, idle=0.013, samples=64, tokens=64 * 2048,
    model_flops=1e15, peak_flops=8 * 989.4e12,
)  # fmt: skip


def held(rank: int, activations: float, host: float = 0.0) -> RankMemory:
    """At rest 3.25 GiB, of which 2 are parameters; the peak that much more."""
    rest = {"parameters": 2 * GIB, "optimizer states": GIB, "buckets": GIB // 4}
    peak = {**rest, "activations": int(activations * GIB), "temporary": GIB // 8}
    moment = Moment("backward", "log_softmax", sum(peak.values()), peak)
    forward = Moment("forward", "linear", sum(rest.values()) + GIB, {**rest, "activations": GIB})
    timeline = (("forward", "embeddings", 4 * GIB), ("forward", "head", 9 * GIB), ("backward", "head", 8 * GIB),
                ("optimizer", "step", 4 * GIB))  # fmt: skip
    return RankMemory(
        rank, rest, {"forward": forward, "backward": moment}, {"master weights": int(host * GIB)}, timeline
    )


def planned(*ranks: RankMemory, seconds: StepSeconds = SECONDS, **changes: object) -> Plan:
    job = replace(Job(MODEL, world_size=8, precision="bf16", micro_batch=8, tokens=2048), **changes)  # type: ignore[arg-type]
    return Plan(job, MACHINE, ranks or (held(0, 20), held(7, 30)), seconds)


def candidate(layout: str, micro_batch: int, activations: float, forward: float) -> Candidate:
    ranks = (held(0, activations),)
    return Candidate(layout, planned(*ranks, seconds=replace(SECONDS, forward=forward), micro_batch=micro_batch))


BEST, SAME, SLOW = candidate("zero1", 8, 40, 0.2), candidate("zero2", 8, 50, 0.2), candidate("zero3", 4, 10, 0.6)
FAILING = candidate("none", 1, 90, 0.2)
FOUND = Found((BEST, SAME, SLOW), (FAILING,), 126)


def printed(width: int, *arguments: object) -> str:
    text = io.StringIO()
    show(Console(file=text, width=width), *arguments)  # type: ignore[arg-type]
    return text.getvalue()


STAGES = planned(*(held(stage, 40 - 3 * stage) for stage in range(12)), stages=12, world_size=24, engine=PIPELINE)
PLANS = {
    "two kinds of rank": (planned(), FOUND),
    "twelve stages": (STAGES, FOUND),
    "with host memory": (
        planned(held(0, 5, host=120.5), engine=DEEPSPEED, zero=Zero(2, offload_optimizer="cpu")),
        FOUND,
    ),
    "too large": (planned(held(0, 200)), Found((), (FAILING,), 9)),
    "gptlite-post for real": (
        plan(Job(MODEL, world_size=8, precision="bf16", micro_batch=8, tokens=2048), MACHINE),
        None,
    ),
}


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", PLANS)
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut_off(name: str, width: int) -> None:
    one, found = PLANS[name]
    text = printed(width, one, found, [], ["a note that is longer than any terminal is wide, " * 4])
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for figure in (one.limit_bytes, one.peak_bytes, one.fullest.resident_bytes, *one.fullest.peak.by_kind.values()):
        assert re.search(rf"(?<![\d.,]){re.escape(f'{figure / GIB:,.2f}')}(?!\d)", text) or figure < GIB / 100
    assert seconds_words(one.seconds.total) in text
    for candidate in found.fitting if found else ():
        assert re.search(rf"\b{candidate.layout} .*{number(candidate.samples_per_second)}", text)
    for candidate in found.failing if found else ():
        assert f"{candidate.words}, without checkpointing: needs 93.38 of 76.29 GiB" in " ".join(text.split())


def test_memory_has_a_row_for_each_kind_and_a_column_for_each_moment() -> None:
    one = planned()
    table = memory_table(one, rank_kinds(one))
    assert table.columns == ("GiB", "rank 0\nat rest", "rank 0\nat peak", "rank 7\nat rest", "rank 7\nat peak")
    limit = one.limit_bytes / GIB
    assert table.rows == (
        ("parameters", "2.00", "2.00", "2.00", "2.00"),
        ("optimizer states", "1.00", "1.00", "1.00", "1.00"),
        ("buckets", "0.25", "0.25", "0.25", "0.25"),
        ("activations", "-", "20.00", "-", "30.00"),
        ("temporary", "-", "0.12", "-", "0.12"),
        ("total", "3.25", "23.38", "3.25", "33.38"),
        ("limit", *[f"{limit:.2f}"] * 4),
        ("headroom", *(f"{limit - held:.2f}" for held in (3.25, 23.375, 3.25, 33.375))),
    )


def test_ranks_that_hold_the_same_are_one_column() -> None:
    assert [name for name, _ in rank_kinds(planned(held(0, 3), held(7, 3)))] == ["ranks 0-7"]
    assert [name for name, _ in rank_kinds(replace(STAGES, ranks=(held(0, 3), held(1, 2), held(2, 2))))] == [
        "stage 0",
        "stages 1-2",
    ]


def test_the_moment_of_the_peak_is_said_in_words() -> None:
    assert "The peak of rank 7 is in backward, log_softmax." in printed(80, planned())


@pytest.mark.parametrize(("gpu", "tool"), [("A100-80GB", "nvidia-smi"), ("MI300X", "rocm-smi"), ("cpu", None)])
def test_what_the_drivers_tool_will_show_is_said(gpu: str, tool: str | None) -> None:
    """A fifth above the peak, and the context; never more than there is."""
    machine = find_machine(gpu)
    one = replace(planned(), machine=machine)
    size = one.peak_bytes + one.peak_bytes // 5 + machine.context_bytes
    line = f"{tool} will show about {gib(size)} GiB"
    assert (line in printed(100, one)) == (tool is not None)
    assert replace(planned(held(0, 200)), machine=machine).device_bytes == machine.memory_bytes or tool is None


def test_what_does_not_fit_says_how_much_is_too_much_and_what_would_help() -> None:
    one = planned(held(0, 200))
    text = printed(100, one, None, [replace(SLOW, layout="--activation_checkpoint_interval 1")])
    too_much = 203.375 - one.limit_bytes / GIB
    assert f"It does not fit: 203.38 of {gib(one.limit_bytes)} GiB at the peak, {too_much:.2f} GiB too much." in text
    assert "fits with --activation_checkpoint_interval 1: 13.38 GiB" in text


def test_a_peak_in_evaluation_is_told_from_that_of_training() -> None:
    for size, verdict in ((40, "It fits: 40.00 of"), (200, "It does not fit: 200.00 of")):
        training = held(0, 20)
        moment = Moment("evaluation", "log_softmax", size * GIB, {"activations": size * GIB})
        one = planned(replace(training, peaks={**training.peaks, "evaluation": moment}), eval_batch=32)
        text = " ".join(printed(100, one).split())
        assert verdict in text
        assert "The peak is in evaluation, with a batch of 32; training peaks at 23.38 GiB." in text
    assert "The peak is in evaluation" not in printed(100, planned())


def test_what_the_drivers_tool_would_show_is_not_said_of_what_does_not_fit() -> None:
    assert "will show about" in printed(100, planned())
    assert "will show about" not in printed(100, planned(held(0, 200)))


def test_a_layout_that_does_not_fit_is_told_from_the_one_that_does() -> None:
    assert "--deepspeed none, micro-batch 1, without checkpointing: needs 93.38" in printed(100, BEST.plan, FOUND)


def test_parts_of_a_step_sum_up_to_it() -> None:
    rest = {"communication", "samples", "tokens", "model_flops", "peak_flops"}
    assert set(SECONDS.parts) == {field.name for field in fields(SECONDS)} - rest
    assert sum(SECONDS.parts.values()) == SECONDS.total == pytest.approx(0.8)
    assert ("backward", "400 ms", "50.0%") in step_table(planned()).rows
    assert step_table(planned()).rows[-1] == ("step", "800 ms", "100.0%")


def test_the_reason_is_the_part_that_takes_most_more_a_sample() -> None:
    assert slower_by(BEST, SLOW) == ("forward", pytest.approx(0.4 / 64))
    rows = layout_table(BEST.plan, FOUND).rows
    assert [row[-1] for row in rows] == ["", "as fast", "+6.25 ms forward"]
    assert [row[-2] for row in rows] == ["1.00x", "1.00x", "0.67x"]
    assert "slower than 1 by forward: 3" in printed(60, BEST.plan, FOUND)


def test_columns_that_say_the_same_of_all_are_left_out() -> None:
    assert not {"accum", "ckpt", "stages"} & set(layout_table(BEST.plan, FOUND).columns)
    checkpointed = replace(SLOW, plan=replace(SLOW.plan, job=replace(SLOW.plan.job, checkpoint_interval=1)))
    assert "ckpt" in layout_table(BEST.plan, replace(FOUND, fitting=(BEST, checkpointed))).columns


def test_without_a_terminal_all_is_ascii_and_with_one_there_is_colour() -> None:
    one, found = PLANS["two kinds of rank"]
    assert printed(80, one, found).isascii()
    text = io.StringIO()
    show(Console(file=text, width=80, force_terminal=True, color_system="standard"), one, found)
    assert "\x1b[" in text.getvalue()


def test_names_cannot_write_to_the_terminal() -> None:
    hostile = replace(planned(), machine=replace(MACHINE, name="\x1b[2J[red]x[/red] [/]\nH"))
    text = printed(120, hostile, None, [], ["\x1b]0;title\x07 [bold]"])
    assert "?[2J[red]x[/red] [/] H" in text
    assert "\x1b" not in text
    assert "[bold]" in text


def test_it_is_there_without_torch_numpy_or_matplotlib() -> None:
    look = (
        "import sys, finetune.report.plan_tables, finetune.report.plan_page\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'matplotlib', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
