"""Splits a torch profiler trace into the parts of each step, which do not overlap and add up to the step.

The parts are derived from the trace's own events, and from one range that we add around the model's forward pass:

- *data*: the DataLoader's `__next__`;
- *forward*: the model's forward pass, and what follows until the backward pass begins (a loss outside the model);
- *backward*: from the first to the last autograd function of each micro-batch;
- *optimizer*: what follows the last backward pass: clipping, the step, zeroing;
- *communication*: a collective or transfer is in progress and nothing is computed meanwhile. Communication hidden
  behind the backward pass costs no time and is not counted; waiting for another rank is;
- *other*: everything else, such as moving batches, logging, and the loop's own Python.

On a GPU the parts are device time: a kernel belongs to the part in which the host launched it, and idle device time
is *other*, or *data* while the host waits for data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Interval = tuple[int, int]  # start and end in whole nanoseconds, so that sums are exact

PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")
DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER = PARTS
FORWARD_RANGE = "finetune: forward"  # from the callback's hooks
NEW_START = "finetune: an evaluation or a checkpoint ended"  # the step begins after it
# torch's own event names.
STEP_PREFIX = "ProfilerStep#"
DATA_PREFIX = "enumerate(DataLoader)#"
AUTOGRAD_PREFIX = "autograd::engine::evaluate_function"
GLOO_PREFIX, NCCL_PREFIX = "gloo:", "nccl"
DISPATCH_PREFIX = "c10d::"  # the host side of a collective
DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Span:
    """One event of a trace. `thread` is the host thread or the device stream."""

    name: str
    kind: str
    thread: Any
    start: int
    end: int
    correlation: int | None = None  # the same for a launch on the host and its kernel on the device


@dataclass(frozen=True)
class Step:
    """One profiled step of one rank. `pieces` are each part's intervals relative to the step's start;
    `nanoseconds_of_operation` is how long each kind of transfer ran, hidden or not, and `calls` how often."""

    nanoseconds: int
    pieces: dict[str, list[Interval]]
    calls: dict[str, int]
    nanoseconds_of_operation: dict[str, int]

    @property
    def parts(self) -> dict[str, int]:
        """Nanoseconds by part; their sum is `nanoseconds`."""
        return {part: length(self.pieces[part]) for part in PARTS}


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """The events of a Chrome trace that have a duration. Its times are in microseconds with three decimals."""
    spans = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or "cat" not in event:
            continue
        start, took = round(event["ts"] * 1000), round(event["dur"] * 1000)
        correlation = event.get("args", {}).get("correlation")
        spans.append(Span(event["name"], event["cat"], event["tid"], start, start + took, correlation))
    return sorted(spans, key=lambda span: (span.start, -span.end))


def steps_of(spans: list[Span]) -> list[Step]:
    """Every step of the trace, in order. `spans` come from `spans_of`."""
    steps = [span for span in spans if span.name.startswith(STEP_PREFIX) and span.kind == "user_annotation"]
    on_device = [span for span in spans if span.kind in DEVICE_KINDS]
    launches = {s.correlation: s.start for s in spans if s.kind in LAUNCH_KINDS and s.correlation is not None}
    found = []
    for step in steps:
        inside = [span for span in spans if span.start < step.end and span.end > step.start]
        again = [min(span.end, step.end) for span in inside if span.name == NEW_START]
        window = (max([step.start, *again]), step.end)
        host = _host_parts(inside, window, step.thread)
        if on_device:
            kernels = [span for span in inside if span.kind in DEVICE_KINDS]
            found.append(_step_on_device(kernels, launches, host, window))
        else:
            found.append(_step_on_host(inside, host, window, step.thread))
    return found


def _host_parts(inside: list[Span], window: Interval, thread: Any) -> list[tuple[int, int, str]]:
    """What the training thread was doing, without gaps: (start, end, part)."""
    marks = []
    for span in inside:
        if span.start < window[0]:
            continue
        if span.thread == thread and span.name.startswith(DATA_PREFIX):
            marks.append((span.start, min(span.end, window[1]), DATA))
        elif span.thread == thread and span.name == FORWARD_RANGE:
            marks.append((span.start, min(span.end, window[1]), FORWARD))
        elif span.name.startswith(AUTOGRAD_PREFIX):  # in a separate thread on a GPU
            if marks and marks[-1][2] == BACKWARD:
                marks[-1] = (marks[-1][0], max(marks[-1][1], min(span.end, window[1])), BACKWARD)
            else:
                marks.append((span.start, min(span.end, window[1]), BACKWARD))
    last_backward = max((i for i, mark in enumerate(marks) if mark[2] == BACKWARD), default=None)
    parts: list[tuple[int, int, str]] = []
    at = window[0]
    for i, (start, end, part) in enumerate(marks):
        start, end = max(start, at), max(end, at)
        parts.append((at, start, OTHER))
        if part == FORWARD and i + 1 < len(marks) and marks[i + 1][2] == BACKWARD:
            end = max(end, marks[i + 1][0])  # a loss computed outside the model
        parts.append((start, end, part))
        at = end
        if i == last_backward:
            break
    parts.append((at, window[1], OTHER if last_backward is None else OPTIMIZER))
    return [piece for piece in parts if piece[1] > piece[0]] or [(*window, OTHER)]


def _step_on_host(inside: list[Span], host: list[tuple[int, int, str]], window: Interval, thread: Any) -> Step:
    transfers = [s for s in inside if s.name.startswith(GLOO_PREFIX) or s.name.startswith(DISPATCH_PREFIX)]
    computing = {thread} | {span.thread for span in inside if span.name.startswith(AUTOGRAD_PREFIX)}
    busy = union((s.start, s.end) for s in _innermost(inside, computing) if not _is_transfer(s))
    exposed = intersect(subtract(union((s.start, s.end) for s in transfers), busy), [window])
    pieces = {
        part: subtract([(start, end) for start, end, name in host if name == part], exposed)
        for part in PARTS
        if part != COMMUNICATION
    }
    return _step({**pieces, COMMUNICATION: exposed}, [s for s in transfers if s.name.startswith(GLOO_PREFIX)], window)


def _step_on_device(
    kernels: list[Span], launches: dict[int, int], host: list[tuple[int, int, str]], window: Interval
) -> Step:
    starts = [start for start, _, _ in host]
    by_part: dict[str, list[Interval]] = {part: [] for part in PARTS}
    for kernel in kernels:
        launched = max(launches.get(kernel.correlation or -1, kernel.start), window[0])
        part = host[max(0, bisect_right(starts, launched) - 1)][2]
        is_transfer = kernel.name.startswith(NCCL_PREFIX)
        by_part[COMMUNICATION if is_transfer else part].append((kernel.start, kernel.end))
    left, pieces = [window], {}
    for part in (FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER, COMMUNICATION):  # the last only when nothing is computed
        pieces[part] = intersect(left, union(by_part[part]))
        left = subtract(left, pieces[part])
    waiting = intersect(left, [(start, end) for start, end, name in host if name == DATA])
    pieces[DATA] = union([*pieces[DATA], *waiting])
    pieces[OTHER] = union([*pieces[OTHER], *subtract(left, waiting)])
    return _step(pieces, [kernel for kernel in kernels if kernel.name.startswith(NCCL_PREFIX)], window)


def _step(pieces: dict[str, list[Interval]], transfers: list[Span], window: Interval) -> Step:
    begin = window[0]
    since = {part: [(start - begin, end - begin) for start, end in pieces[part]] for part in PARTS}
    inside = [(s.name.split("(")[0], intersect([(s.start, s.end)], [window])) for s in transfers]
    took: Counter[str] = Counter()
    for name, piece in inside:
        took[name] += length(piece)
    step = Step(window[1] - begin, since, dict(Counter(name for name, piece in inside if piece)), dict(took))
    assert sum(step.parts.values()) == step.nanoseconds, "the parts are the step"
    return step


def _is_transfer(span: Span) -> bool:
    return span.name.startswith((GLOO_PREFIX, DISPATCH_PREFIX, NCCL_PREFIX)) or span.name == "record_param_comms"


def _innermost(spans: list[Span], threads: set[Any]) -> list[Span]:
    """The operators that call no others: there a thread computes. An outer one may be waiting for a transfer."""
    found = []
    for thread in threads:
        own = [span for span in spans if span.thread == thread and span.kind == "cpu_op"]
        found += [span for span, after in pairwise(own) if after.start >= span.end]
        found += own[-1:]
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, as a sorted list of disjoint ones."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(of: list[Interval], what: list[Interval]) -> list[Interval]:
    """The time in `of` but not in `what`; both are sorted and disjoint."""
    left: list[Interval] = []
    first = 0
    for start, end in of:
        while first < len(what) and what[first][1] <= start:
            first += 1
        at = first
        while at < len(what) and what[at][0] < end:
            if what[at][0] > start:
                left.append((start, what[at][0]))
            start = max(start, what[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def intersect(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The time in both."""
    return subtract(one, subtract(one, other))


def length(intervals: list[Interval]) -> int:
    """Total length in nanoseconds."""
    return sum(end - start for start, end in intervals)
