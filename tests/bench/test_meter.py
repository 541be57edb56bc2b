"""Whose bytes are measured, where a machine has GPUs: the rank's own, or none of them; torch's are stood in for."""

from __future__ import annotations

import threading

import pytest
import torch

from finetune.bench.meter import Meter, Sampler
from finetune.measure.memory import Allocations

TRAINS = threading.current_thread()


def by_gpu(device: int | None = None) -> int:
    """As torch's: without a device that of the thread, which is GPU 1 where training runs, and GPU 0 elsewhere."""
    if device is None:
        device = int(threading.current_thread() is TRAINS)
    return (10, 77)[device]


def sampled(device: str) -> Sampler:
    sampler = Sampler(Allocations(device))
    sampler.memory.live = 5
    sampler.start()
    while not sampler._seen:
        pass
    sampler.stop()
    return sampler


def test_the_average_is_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", by_gpu)
    assert sampled("cuda").mean == 77
    assert sampled("cpu").mean == 5  # --use_cpu True beside GPUs


def test_a_run_on_the_cpu_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the GPU was asked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "max_memory_allocated", "reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, asked)
    meter = Meter(Allocations("cpu"), warm_steps=0)
    meter.step_peaks.append({"forward": 9})
    meter.begin()
    figures = meter.figures()
    assert (figures["peak_bytes"], figures["measured_by"]) == (9, "bytes of tensors")
