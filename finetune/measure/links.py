"""Measure what lies outside a rank's own arithmetic: collectives, host memory, disks, optimizers, launches."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn

from finetune.measure.rates import CALLS, seconds_of, synchronize
from finetune.plan.kernels import SIMPLE
from finetune.plan.machine import Link, Nvme
from finetune.plan.tape import Tape
from finetune.plan.values import Numbers

SIZES = (2**10, 2**16, 2**19, 2**21, 2**23, 2**25)  # bytes sent
DISK_BYTES, DISK_BLOCK = 128 * 2**20, 2**20
LAYERS = 12
TIMES = 9  # runs of a collective, the first of them to warm up


def ring(device: str, most: int = SIZES[-1]) -> Link:
    """The latency per step and the bus bandwidth with which a ring's formula fits measured all-reduces best."""
    ranks = distributed.get_world_size()
    steps = 2 * (ranks - 1)
    points = [(steps / ranks * size, _all_reduce_seconds(size, device)) for size in SIZES if size <= most]
    latency, bandwidth = fit(points)
    return Link(bandwidth, latency / steps)


def _all_reduce_seconds(size: int, device: str) -> float:
    """The median. Ranks wait for each other first, as at a collective in a step."""
    whole, found = torch.ones(size // 4, device=device), list[float]()
    for _ in range(TIMES):
        distributed.barrier()
        start = time.perf_counter()
        distributed.all_reduce(whole)
        synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median_high(found[1:])


def fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0 bytes, bytes per second) for points (bytes, seconds): a line of least squared relative errors."""
    sizes, seconds = zip(*points, strict=True)
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    slope = max(float(slope), 1e-15)
    return max(float(start), min(seconds) / 4), 1 / slope


def launch_seconds(device: str, least: float) -> float:
    """The host's seconds per operator of a tape's forward pass, modules and autograd included (on a GPU one of a
    backward pass counts less): measured on a network so small that nothing else takes time."""
    layers = [nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)] * LAYERS
    network = nn.Sequential(*layers).to(device)
    x = torch.ones(2, 8, device=device)

    def step(_: int) -> None:
        for parameter in network.parameters():
            parameter.grad = None
        (x + network(x)).sum().backward()

    shapes = {"norm.weight": (8,), "norm.bias": (8,), "up.weight": (8, 8), "up.bias": (8,)}
    tape = Tape(Numbers(device=device), shapes)
    with tape.segment("network"):
        value = tape.given(16, needs_grad=True)
        for _ in range(LAYERS):
            value = tape.linear(tape.layer_norm(value, "norm"), "up")
            value = tape.linear(tape.unary("gelu", value), "up")
    share = 1.0 if device == "cpu" else SIMPLE
    return seconds_of(step, least, CALLS[device]) / sum(op.kernels + share * op.kernels_back for op in tape.ops)


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
    latency, seconds = (_copy_seconds(size, device, least) for size in (2**12, 2**24))
    return Link(2**24 / seconds, latency)


def _copy_seconds(size: int, device: str, least: float) -> float:
    here, there = torch.ones(size // 4, pin_memory=device != "cpu"), torch.empty(size // 4, device=device)
    return seconds_of(lambda _: there.copy_(here, non_blocking=True), least)


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
        move = file.write if way == os.O_WRONLY else file.readinto
        start = time.perf_counter()
        for _ in range(DISK_BYTES // DISK_BLOCK):
            move(buffer)
        os.fsync(handle)
        return DISK_BYTES / (time.perf_counter() - start)
