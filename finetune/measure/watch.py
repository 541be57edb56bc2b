"""Measures a run's steps: bytes in the first ones, seconds in the rest."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import TrainerCallback

from finetune.measure.memory import Allocations

OBSERVED_STEPS = 3  # under Allocations: optimizers create their states in the first
WARM_STEPS = 1


class Watch(TrainerCallback):  # type: ignore[misc]
    """The caller enters `memory` before anything is built; this exits it. The `warm_steps` after that are not timed."""

    def __init__(self, memory: Allocations, warm_steps: int = WARM_STEPS) -> None:
        self.memory, self.warm_steps = memory, warm_steps
        self.between_steps: list[int] = []
        self.step_peaks: list[dict[str, int]] = []
        self.seconds: list[float] = []
        self.begun = 0.0
        self.resting = 0
        self.bounds: list[int] = []  # of a pipeline's stages

    @property
    def settled_peaks(self) -> dict[str, int]:
        """The bytes at the peak of each phase, the least of the observed steps but the first: the threads of gloo may
        release what they have sent a moment late (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, runLoop)."""
        return {phase: min(step.get(phase, 0) for step in self.step_peaks[1:]) for phase in self.step_peaks[-1]}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.prepare(state)
        self.begin()

    def prepare(self, state: Any) -> None:
        """Call it before a step whose bytes are counted."""
        if state.global_step < OBSERVED_STEPS:
            if state.global_step == 1:
                self.memory.count_existing()  # allocations that C++ made unseen, such as NVMe offload's pinned buffers
            self.memory.phase = "forward"
            self.memory.forget_peaks()

    def begin(self) -> None:
        """Start timing a step, once all ranks are here."""
        if distributed.is_initialized():
            distributed.barrier()
        self._synchronize()
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._synchronize()
        if state.global_step <= OBSERVED_STEPS:
            self.step_peaks.append(dict(self.memory.peaks))
            self.between_steps.append(self.memory.live)
            if state.global_step == OBSERVED_STEPS:
                self.memory.__exit__(None, None, None)
        elif state.global_step > OBSERVED_STEPS + self.warm_steps:
            self.seconds.append(time.perf_counter() - self.begun)
        if self.on_gpu and state.global_step == OBSERVED_STEPS + self.warm_steps:
            self.resting = int(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def follow(self, model: Any) -> None:
        """Set `memory.phase` to the phases of a step of `model`."""

        def to(phase: str) -> Any:
            def enter(*_: Any, **__: Any) -> None:
                if model.training:
                    self.memory.phase = phase

            return enter

        model.register_forward_pre_hook(to("forward"))
        model.register_forward_hook(to("backward"))
        register_optimizer_step_pre_hook(to("optimizer"))
        register_optimizer_step_post_hook(to("gather"))

    @property
    def allocator(self) -> dict[str, int]:
        """Bytes by CUDA's allocator: of tensors between steps and at the peak of the timed ones, and of the blocks that
        it has reserved for them. Empty on a CPU."""
        if not self.on_gpu:
            return {}
        return {
            "resting_bytes": self.resting,
            "allocated_bytes": int(torch.cuda.max_memory_allocated()),
            "reserved_bytes": int(torch.cuda.max_memory_reserved()),
        }

    @property
    def on_gpu(self) -> bool:
        """Whether the run uses a GPU; the machine may have unused ones."""
        return self.memory.device == "cuda"

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
