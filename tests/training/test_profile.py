"""From a trace to the parts of its steps: nothing twice, nothing left out. Traces made by hand, and real small ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asked import run_of
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import RequestError
from finetune.run.flags.profiling import ProfileArguments, check_length, check_profile
from finetune.run.run import Run
from finetune.training.profiling.callback import StepProfile, with_profilers
from finetune.training.profiling.parts import (
    FORWARD_RANGE,
    NEW_START,
    PARTS,
    Step,
    intersect,
    length,
    spans_of,
    steps_of,
    subtract,
    union,
)
from finetune.training.profiling.summary import RankProfile, by_part, page, record

MAIN, GLOO, DEVICE = 1, 2, 7  # threads of the host, a stream of the device
STEP = ("user_annotation", "ProfilerStep#5", MAIN, 0, 100)
DATA = ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", MAIN, 0, 10)
FORWARD = ("user_annotation", FORWARD_RANGE, MAIN, 20, 40)
AUTOGRAD = "autograd::engine::evaluate_function: AddmmBackward0"


def trace(*events: tuple[Any, ...]) -> dict[str, Any]:
    """A Chrome trace of (category, name, thread, start, end[, correlation]) in microseconds."""
    found = []
    for category, name, thread, start, end, *more in events:
        event = {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start}
        found.append({**event, "args": {"correlation": more[0]}} if more else event)
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *found]}


def only_step(*events: tuple[Any, ...]) -> Step:
    (step,) = steps_of(spans_of(trace(*events)))
    return step


def microseconds(step: Step) -> dict[str, float]:
    return {part: took / 1000 for part, took in step.parts.items() if took}


def test_a_step_is_split_at_what_torch_and_the_hooks_name() -> None:
    step = only_step(STEP, DATA, FORWARD, ("cpu_op", AUTOGRAD, MAIN, 45, 60), ("cpu_op", AUTOGRAD, MAIN, 62, 80))
    # The loss between the model and autograd is the forward pass's, what follows the last gradient the optimizer's.
    assert microseconds(step) == {"data": 10, "other": 10, "forward": 25, "backward": 35, "optimizer": 20}


def test_each_micro_batch_has_its_own_forward_and_backward_pass() -> None:
    step = only_step(
        STEP,
        FORWARD,
        ("cpu_op", AUTOGRAD, MAIN, 40, 50),
        ("user_annotation", FORWARD_RANGE, MAIN, 55, 60),
        ("cpu_op", AUTOGRAD, MAIN, 60, 90),
    )
    assert microseconds(step) == {"other": 25, "forward": 25, "backward": 40, "optimizer": 10}


def test_a_transfer_beside_a_computation_costs_nothing_and_a_bare_one_its_bare_time() -> None:
    step = only_step(
        STEP,
        FORWARD,
        ("cpu_op", AUTOGRAD, MAIN, 40, 60),
        ("cpu_op", "aten::mm", MAIN, 40, 60),
        ("user_annotation", "gloo:all_reduce", GLOO, 50, 75),  # 10 behind the product, 15 bare
    )
    assert microseconds(step) == {"other": 20, "forward": 20, "backward": 20, "communication": 15, "optimizer": 25}
    assert (step.calls, step.nanoseconds_of_operation) == ({"gloo:all_reduce": 1}, {"gloo:all_reduce": 25_000})


def test_a_wait_inside_an_operator_is_communication_though_the_operator_goes_on() -> None:
    """ZeRO reduces within autograd's AccumulateGrad."""
    step = only_step(
        STEP,
        FORWARD,
        ("cpu_op", AUTOGRAD, MAIN, 40, 80),
        ("cpu_op", "aten::add_", MAIN, 40, 45),
        ("cpu_op", "c10d::allreduce_", MAIN, 45, 47),
        ("user_annotation", "gloo:all_reduce", GLOO, 46, 70),
    )
    assert microseconds(step) == {"other": 20, "forward": 20, "backward": 15, "communication": 25, "optimizer": 20}


def test_transfers_that_overlap_are_counted_once() -> None:
    step = only_step(
        STEP, ("user_annotation", "gloo:send", GLOO, 10, 30), ("user_annotation", "gloo:recv", GLOO + 1, 20, 40)
    )
    assert microseconds(step) == {"communication": 30, "other": 70}
    assert step.nanoseconds_of_operation == {"gloo:send": 20_000, "gloo:recv": 20_000}


def test_what_an_evaluation_takes_before_a_step_is_not_of_the_step() -> None:
    evaluated = ("user_annotation", FORWARD_RANGE, MAIN, 1, 9)
    mark = ("user_annotation", NEW_START, MAIN, 9, 10)
    step = only_step(STEP, evaluated, mark, FORWARD, ("cpu_op", AUTOGRAD, MAIN, 40, 100))
    assert microseconds(step) == {"other": 10, "forward": 20, "backward": 60}


def test_on_a_gpu_a_kernel_belongs_to_the_part_that_launched_it() -> None:
    step = only_step(
        STEP,
        DATA,
        FORWARD,
        ("cpu_op", AUTOGRAD, 99, 40, 50),  # autograd has a thread of its own there
        ("cuda_runtime", "cudaLaunchKernel", MAIN, 25, 26, 1),
        ("cuda_runtime", "cudaLaunchKernel", 99, 45, 46, 2),
        ("cuda_runtime", "cudaLaunchKernelExC", 99, 46, 47, 3),
        ("cuda_runtime", "cudaLaunchKernel", MAIN, 60, 61, 4),
        ("kernel", "gemm", DEVICE, 30, 50, 1),  # still the forward pass's, when the host is further
        ("kernel", "gemm", DEVICE, 50, 70, 2),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", DEVICE + 1, 60, 85, 3),  # 15 bare
        ("kernel", "multi_tensor_apply", DEVICE, 85, 95, 4),
    )
    # Idle: 0-10 while data are awaited, 10-30 and 95-100 for nothing that is named.
    assert microseconds(step) == {
        "data": 10,
        "forward": 20,
        "backward": 20,
        "communication": 15,
        "optimizer": 10,
        "other": 25,
    }
    assert list(step.nanoseconds_of_operation.values()) == [25_000]


@st.composite
def traces(draw: Any) -> dict[str, Any]:
    """Any events at all, in a step."""
    names = [
        ("user_annotation", DATA[1], MAIN),
        ("user_annotation", FORWARD_RANGE, MAIN),
        ("cpu_op", AUTOGRAD, MAIN),
        ("cpu_op", "aten::mm", MAIN),
        ("cpu_op", "c10d::allreduce_", MAIN),
        ("user_annotation", "gloo:all_reduce", GLOO),
        ("user_annotation", NEW_START, MAIN),
        ("cuda_runtime", "cudaLaunchKernel", MAIN),
        ("kernel", "gemm", DEVICE),
        ("kernel", "ncclDevKernel_AllGather", DEVICE),
    ]
    events = []
    for category, name, thread in draw(st.lists(st.sampled_from(names), max_size=12)):
        start = draw(st.integers(-20, 110))
        events.append((category, name, thread, start, start + draw(st.integers(0, 60)), draw(st.integers(1, 4))))
    return trace(STEP, *events)


@given(traces())
def test_whatever_a_trace_holds_the_parts_are_disjoint_and_add_up_to_the_step(any_trace: dict[str, Any]) -> None:
    (step,) = steps_of(spans_of(any_trace))
    assert all(took >= 0 for took in step.parts.values())
    assert sum(step.parts.values()) == step.nanoseconds
    every = [piece for part in PARTS for piece in step.pieces[part]]
    assert length(union(every)) == length(sorted(every)) == step.nanoseconds


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(intervals, intervals)
def test_sets_of_time_behave_like_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def points(of: list[tuple[int, int]]) -> set[int]:
        return {at for start, end in of for at in range(start, end)}

    a, b = union(one), union(other)
    assert points(a) == points(one)
    assert length(a) == len(points(a))
    assert points(subtract(a, b)) == points(a) - points(b)
    assert points(intersect(a, b)) == points(a) & points(b)


def profiled(folder: Path, steps: int, arguments: ProfileArguments, done: int = 0) -> StepProfile:
    """A real model trained for some steps under the real profiler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(8 * steps, 64), batch_size=8)
    callback = StepProfile(arguments)
    args = SimpleNamespace(output_dir=str(folder))
    state = SimpleNamespace(global_step=done, max_steps=done + 100, is_world_process_zero=True)
    callback.on_train_begin(args, state, None, model=model)
    for batch in loader:
        callback.on_step_begin(args, state, None)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)
    return callback


def test_a_real_trace_has_every_part_of_a_step_on_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tmp_path, 8, ProfileArguments(profile=2, profile_first_step=5), done=10)
    found = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert found["steps"] == [15, 16]  # counted from where the run was resumed
    (rank,) = found["ranks"]
    assert len(rank["untraced_step_seconds"]) == 2  # steps 2 and 3; the 4th is the profiler's warm-up
    for step in rank["steps"]:
        parts = step["parts_nanoseconds"]
        assert sum(parts.values()) == step["nanoseconds"]
        assert parts.pop("communication") == 0
        assert all(took > 0 for took in parts.values()), parts
        assert step["transfers"] == {}
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {"README.md", "parts.png", "rank-0.json.gz", "summary.json"}
    assert "steps 15 to 16" in capsys.readouterr().out


def test_a_run_that_stops_early_leaves_the_steps_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiled(tmp_path / "some", 5, ProfileArguments(profile=10, profile_first_step=4))
    assert json.loads((tmp_path / "some/profile/summary.json").read_text())["steps"] == [4, 5]
    capsys.readouterr()
    profiled(tmp_path / "none", 3, ProfileArguments(profile=10, profile_first_step=6))
    assert "before step 6 was complete. There is no trace." in capsys.readouterr().out
    assert not (tmp_path / "none/profile/summary.json").exists()


def test_a_run_that_is_too_short_is_refused_with_the_numbers() -> None:
    check_length(first=6, steps=3, last=8, done=0)
    with pytest.raises(RequestError, match=r"3 step.s. from --profile_first_step 6 end with step 8, but .* step 7"):
        check_length(first=6, steps=3, last=7, done=0)
    with pytest.raises(RequestError, match=r"end with step 18, but .* 10 of them were done before it was resumed"):
        check_length(first=6, steps=3, last=12, done=10)


@pytest.mark.parametrize(
    ("first", "steps", "last", "mends"),
    [
        (6, 20, 6, "num_train_epochs, or a --profile of at most 1, or --profile 5 with --profile_first_step 2."),
        (6, 3, 7, "num_train_epochs, or a --profile of at most 2, or a --profile_first_step from 2 to 5."),
        (6, 3, 5, "num_train_epochs, or a --profile_first_step from 2 to 3."),
        (6, 1, 1, "num_train_epochs."),
    ],
)
def test_a_run_that_is_too_short_is_offered_only_what_helps(first: int, steps: int, last: int, mends: str) -> None:
    with pytest.raises(RequestError) as error:
        check_length(first, steps, last, done=0)
    assert str(error.value).endswith(mends)
    for wanted in re.findall(r"at most (\d+)", mends):
        check_length(first, int(wanted), last, done=0)
    for place in re.findall(r"from 2 to (\d+)", mends):
        check_length(int(place), steps, last, done=0)
    for wanted in re.findall(r"--profile (\d+) with", mends):
        check_length(2, int(wanted), last, done=0)


def request(*words: str, pipeline: bool = False) -> Run:
    return run_of(*words, groups=(ProfileArguments,), pipeline=pipeline, do_train=True, report_to=["none"])


@pytest.mark.parametrize(
    ("words", "config", "pipeline", "said"),
    [
        pytest.param("--profile 51", None, False, "must be 0 or more and at most 50", id="too many steps"),
        pytest.param("--profile -1", None, False, "must be 0 or more and at most 50", id="fewer than none"),
        pytest.param("--profile 2 --profile_first_step 1", None, False, "must be 2 or more", id="no warm-up"),
        pytest.param("--profile 2 --do_train False", None, False, "Drop it", id="no training"),
        pytest.param("--profile 2 --comms_logger True", "zero2", False, "Run once with each", id="both"),
        pytest.param("--comms_logger True", None, False, "has no DeepSpeed config. Add --deepspeed", id="whose"),
        pytest.param("--flops_profiler True", "pipeline", True, "never prints its counts", id="flops of stages"),
        pytest.param("--ds_monitor csv", "pipeline", True, "fail in a pipeline's evaluation", id="monitor of stages"),
        pytest.param("--ds_monitor comet", "zero2", False, "one of csv, tensorboard, wandb", id="another monitor"),
        pytest.param(
            "--ds_monitor wandb",
            "zero2",
            False,
            "wandb (command line), but nobody is logged in",
            id="login",
        ),
        pytest.param(
            "--ds_monitor tensorboard --report_to tensorboard", "zero2", False, "the same run twice", id="twice"
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    words: str, config: str | None, pipeline: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's netrc
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RequestError) as error:
        check_profile(request(*words.split(), pipeline=pipeline), config, checkpoint=None)
    assert said in str(error.value)


def test_deepspeeds_profilers_are_sections_that_keep_what_the_config_says() -> None:
    before = {"flops_profiler": {"enabled": False, "top_modules": 3}, "zero_optimization": {"stage": 2}}
    asked = request("--flops_profiler", "True", "--profile_first_step", "4", "--ds_monitor", "csv")
    after = with_profilers(before, asked, checkpoint=None)
    assert after["flops_profiler"] == {
        "enabled": True,
        "top_modules": 3,
        "profile_step": 3,  # DeepSpeed counts the steps that are done
        "output_file": "out/flops.txt",
    }
    assert after["csv_monitor"] == {"enabled": True, "output_path": "out/monitor", "job_name": "csv"}
    assert after["zero_optimization"] == {"stage": 2}
    assert before["flops_profiler"]["enabled"] is False
    assert with_profilers(before, request(), checkpoint=None) == before


def test_the_table_has_mean_and_largest_over_ranks() -> None:
    def rank(number: int, wait: int) -> RankProfile:
        step = only_step(STEP, ("user_annotation", "gloo:all_reduce", GLOO, 10, 10 + wait))
        return RankProfile(number, (6,), (step,), (5e-5,), on_gpu=False, writing_seconds=0.1)

    ranks = [rank(0, wait=20), rank(1, wait=40)]
    found = record(ranks)
    assert found["mean_seconds"]["communication"] == pytest.approx(30e-6)
    assert found["max_seconds"]["communication"] == pytest.approx(40e-6)
    assert found["step_seconds"] == pytest.approx(sum(found["mean_seconds"].values()))
    table = by_part(ranks)
    assert table.columns == ("part", "mean ms", "share", "most ms", "rank 0", "rank 1")
    rows = {row[0]: row[1:] for row in table.rows}
    # Steps of 100 us, in which two ranks wait 20 and 40 us: mean, share, most, and each rank's, in milliseconds.
    assert rows["communication"] == ("0.03", "30.0%", "0.04", "0.02", "0.04")
    assert rows["step"] == ("0.1", "100.0%", "0.1", "0.1", "0.1")
    assert len({len(line) for line in table.plain.splitlines()}) == 1
    assert "2.00x the median of the 1 untraced steps before" in page(ranks)


def test_transfers_are_told_by_their_mean_and_most_over_ranks() -> None:
    def rank(number: int, wait: int, calls: int) -> RankProfile:
        step = ("user_annotation", "ProfilerStep#5", MAIN, 0, 100_000)
        sent = [("user_annotation", "gloo:send", GLOO, 10_000 * i, 10_000 * i + wait) for i in range(calls)]
        return RankProfile(number, (6,), (only_step(step, *sent),), (), on_gpu=False, writing_seconds=0.1)

    (row,) = re.findall(r"\| gloo:send .*", page([rank(0, 2_000, 1), rank(1, 3_000, 2)]))
    assert [cell.strip() for cell in row.strip("| ").split("|")] == ["gloo:send", "1.5", "4.0", "6.0"]
