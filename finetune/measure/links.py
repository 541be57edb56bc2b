"""Measure what lies outside a rank's own arithmetic: collectives, host memory, disks, optimizers, launches."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from finetune.measure.rates import WIDTH, Budget, seconds_of, synchronize
from finetune.plan.machine import Link, Nvme
from finetune.plan.optimizers import KINDS
from finetune.plan.tape import Tape
from finetune.plan.update import DOUBLE_NORM_BYTES
from finetune.plan.values import Numbers

SIZES = (2**10, 2**16, 2**19, 2**21, 2**23, 2**25)  # bytes sent
DISK_BYTES, DISK_BLOCK = 128 * 2**20, 2**20
LAYERS = 12
TIMES = 9  # runs of a collective, the first of them to warm up


def collective_links(device: str, meet: Callable[[], None], most: int = SIZES[-1]) -> dict[str, Link]:
    """For each collective, the latency per ring step and the bus bandwidth that fit the measurements best. Ranks wait
    for each other first, as at a collective in a step."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    shares = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks - 1, "reduce_scatter": ranks - 1, "p2p": ranks}
    shares |= {f"{kind}_half": shares[kind] for kind in ("all_reduce", "reduce_scatter")}
    found: dict[str, Link] = {}
    for kind, steps in shares.items():
        points = []
        for size in [size for size in SIZES if size <= most]:
            number = torch.bfloat16 if kind.endswith("_half") else torch.float32
            count = size // number.itemsize
            whole = torch.ones(count, device=device, dtype=number)
            piece = torch.ones(count // ranks, device=device, dtype=number)

            def send(_: int, kind: str = kind, whole: Any = whole, piece: Any = piece) -> None:
                if kind.startswith("all_reduce"):
                    distributed.all_reduce(whole)
                elif kind == "all_gather":
                    distributed.all_gather_into_tensor(whole, piece)
                elif kind.startswith("reduce_scatter"):
                    distributed.reduce_scatter_tensor(piece, whole)
                elif rank < 2:
                    (distributed.send if rank == 0 else distributed.recv)(whole, 1 - rank)

            points.append((steps / ranks * size, together(send, meet)))
        latency, bandwidth = fit(points)
        found[kind] = Link(bandwidth, latency / steps)
        if kind == "p2p":  # not a ring: all bytes, one latency
            found[kind] = Link(bandwidth, latency)
    return found


def together(run: Callable[[int], None], meet: Callable[[], None]) -> float:
    """Median seconds of `run`, which all ranks must call equally often."""
    found = []
    for index in range(TIMES):
        meet()
        start = time.perf_counter()
        run(index)
        synchronize()
        found.append(time.perf_counter() - start)
    return sorted(found[1:])[(TIMES - 1) // 2]


def fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0 bytes, bytes per second) for points (bytes, seconds): a line of least squared relative errors."""
    sizes, seconds = zip(*points, strict=True)
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    slope = max(float(slope), 1e-15)
    return max(float(start), min(seconds) / 4), 1 / slope


def launch_seconds(device: str, least: float = 0.2) -> float:
    """The host's seconds per operator of a tape, forward or backward, modules and autograd included: measured on a
    network so small that nothing else takes time."""
    kind = {"device": device}
    layers = [nn.LayerNorm(8, **kind), nn.Linear(8, 8, **kind), nn.GELU(), nn.Linear(8, 8, **kind)] * LAYERS
    network = nn.Sequential(*layers)
    x = torch.ones(2, 8, device=device)

    def step(_: int) -> None:
        for parameter in network.parameters():
            parameter.grad = None
        (x + network(x)).sum().backward()

    shapes = {"norm.weight": (8,), "norm.bias": (8,), "up.weight": (8, 8), "up.bias": (8,)}
    tape = Tape(Numbers(device="cuda" if device != "cpu" else "cpu"), shapes)
    with tape.segment("network"):
        value = tape.given(16, needs_grad=True)
        for _ in range(LAYERS):
            value = tape.linear(tape.layer_norm(value, "norm"), "up")
            value = tape.linear(tape.unary("gelu", value), "up")
    return seconds_of(step, least) / sum(op.kernels + op.kernels_back for op in tape.ops)


def update_rows(device: str, budget: Budget, meet: Callable[[], None]) -> list[list[Any]]:
    """Rows of a kernel table for the end of a step: norms, and optimizers, by the bytes that they move."""
    from transformers.optimization import Adafactor

    rows = []
    is_gpu = device != "cpu"
    makers: dict[str, Callable[[list[Any]], Any]] = {
        "adam": lambda weights: torch.optim.AdamW(weights, fused=True),
        "adam_foreach": lambda weights: torch.optim.AdamW(weights, foreach=is_gpu),
        "sgd": lambda weights: torch.optim.SGD(weights, foreach=is_gpu),
        "adafactor": lambda weights: Adafactor(weights, lr=1e-4, relative_step=False, scale_parameter=False),
    }
    for elements in budget.elements:
        gradient = torch.randn(elements, device=device)
        for kind, moved, run in (
            ("norm", 4, lambda g: g.norm()),
            ("norm_double", DOUBLE_NORM_BYTES, lambda g: g.to(torch.double).norm()),
            ("zero", 4, torch.zeros_like),
            ("cast", 6, lambda g: g.to(torch.bfloat16)),
        ):
            meet()
            seconds = seconds_of(lambda _, run=run, g=gradient: run(g), budget.seconds)  # type: ignore[misc]
            rows.append([kind, "fp32", moved * elements, round(moved * elements / seconds)])
        for kind, make in makers.items():
            weights = [nn.Parameter(torch.randn(elements // WIDTH, WIDTH, device=device)) for _ in range(2)]
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer = make(weights)
            meet()
            seconds = seconds_of(lambda _, step=optimizer.step: step(), budget.seconds) / len(weights)  # type: ignore[misc]
            moved = KINDS[kind].moved * elements
            rows.append([kind, "fp32", moved, round(moved / seconds)])
    return rows


def cpu_adam_rate(elements: int, least: float) -> float | None:
    """Parameters per second of DeepSpeed's CPU optimizer, on one rank. None if it cannot be built."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        weight = nn.Parameter(torch.randn(elements))
        weight.grad = torch.randn(elements)
        optimizer = DeepSpeedCPUAdam([weight])
        return elements / seconds_of(lambda _: optimizer.step(), least)
    except Exception:  # a compiler or a header is missing, which DeepSpeed reports in many ways
        return None


def host_link(device: str, least: float) -> Link:
    """Copies from host memory to the device; on a CPU, within host memory."""
    seconds = []
    for size in (2**12, 2**24):
        here = torch.ones(size // 4, pin_memory=device != "cpu")
        there = torch.empty(size // 4, device=device)

        def send(_: int, here: Any = here, there: Any = there) -> None:
            there.copy_(here, non_blocking=True)

        seconds.append(seconds_of(send, least))
    return Link(2**24 / seconds[1], seconds[0])


def disk(folder: Path) -> Nvme | None:
    """The disk's rates, bypassing the page cache as DeepSpeed's own op does (O_DIRECT). None if that is not possible;
    an existing file or link of the same name is left alone."""
    path = folder / f".finetune_calibration_{os.getpid()}"
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        try:
            return Nvme(bandwidth_write=_disk_rate(path, os.O_WRONLY), bandwidth_read=_disk_rate(path, os.O_RDONLY))
        finally:
            path.unlink(missing_ok=True)
    return None


def _disk_rate(path: Path, way: int) -> float:
    """Bytes per second. Raises OSError, also if the file system has no O_DIRECT."""
    buffer = mmap.mmap(-1, DISK_BLOCK)  # page-aligned, as O_DIRECT requires
    buffer.write(os.urandom(DISK_BLOCK))
    handle = os.open(path, way | getattr(os, "O_DIRECT", 0) | os.O_NOFOLLOW)
    with open(handle, "wb" if way == os.O_WRONLY else "rb", 0) as file:
        start = time.perf_counter()
        for _ in range(DISK_BYTES // DISK_BLOCK):
            if way == os.O_WRONLY:
                file.write(buffer)
            else:
                file.readinto(buffer)
        os.fsync(handle)
        return DISK_BYTES / (time.perf_counter() - start)
