"""Speed and memory of a run: real tokens, padding, step times, memory peaks, FLOPs utilization."""

from __future__ import annotations

import random
import resource
import sys
import time
from array import array
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from finetune.data.columns import IGNORED, WIDTHS
from finetune.data.packing import REAL_TOKENS
from finetune.errors import RequestError
from finetune.plan.machine import shipped_machine

# 2 forward and 4 backward for each parameter that multiplies a token; attention's own products are left out
# (Kaplan et al., arXiv 2001.08361, section 2.1).
FLOPS_PER_PARAM_AND_TOKEN = 6
KEPT_STEPS = 4096  # step times, for the median and the 95th percentile


def peak_flops() -> float | None:
    """The half-precision peak of this GPU in FLOP/s, from its file in finetune/plan/machines; None on a CPU, or on a
    GPU without a file."""
    if not torch.cuda.is_available():
        return None
    with suppress(RequestError):
        return shipped_machine(torch.cuda.get_device_name()).peak_flops.get("fp16")
    return None


def wall_clock(start: float) -> float:
    """Convert a `start` from `time.monotonic()` to `time.time()` by the clock as it is now, for code that subtracts it
    from a clock that may have been adjusted since (transformers 5.23, speed_metrics)."""
    return time.time() - (time.monotonic() - start)


def by_steady_clock(logs: dict[str, float], real: float) -> dict[str, float]:
    """The Trainer's closing speeds, corrected for a run of `real` seconds if the system clock, which the Trainer uses,
    was adjusted during the run; otherwise empty."""
    told = logs["train_runtime"]
    if abs(told - real) < 1 + 0.1 * real or not told:
        return {}
    speeds = ("train_samples_per_second", "train_steps_per_second")
    return {"train_runtime": round(real, 4), **{name: round(logs[name] * told / real, 3) for name in speeds}}


def peak_memory_bytes() -> int:
    """On a GPU the allocator's peak; on a CPU the process's largest resident set (`ru_maxrss`), everything included."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The process's largest resident set so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


class SpeedMeter(TrainerCallback):
    """Counts tokens and times steps. The Trainer subclass feeds it batches and adds its results to each log.

    A step's time runs from the end of the previous step, so it includes waiting for data; evaluation and saving are
    left out. On a GPU the host sees a step end when its work is queued, so single steps are approximate, but their sum
    is right.
    """

    def __init__(self, multiplied_parameters: int, world_size: int, sharing: int = 1) -> None:
        self.sharing = sharing  # number of ranks that share a row
        self.flops_per_token = FLOPS_PER_PARAM_AND_TOKEN * multiplied_parameters
        self.world_size = world_size
        self.peak = peak_flops()
        self.steps, self.total_seconds = 0, 0.0
        self.step_seconds = array("d")  # of all steps, or of as many drawn from them
        self._random = random.Random(0)
        self._total: Any = 0
        self._rows = self._padded = 0
        self._real: Any = 0  # a tensor if counted from masks
        self._device: Any = None
        self._window_seconds = 0.0
        self._window_steps = 0
        self._mark: float | None = None

    def count(self, inputs: dict[str, Any]) -> None:
        """Count a micro-batch of this rank: rows, and for text real tokens and tokens with padding. Does not
        synchronize the device."""
        if "input_ids" not in inputs:
            self._rows += find_batch_size(inputs) or 0
            return
        ids = inputs["input_ids"]  # (B, T)
        mask = inputs.get("attention_mask", inputs.get(REAL_TOKENS))
        one_each = inputs.get("labels")  # one per row, even if rows have more than one text
        self._rows += ids.shape[0] if one_each is None or one_each.dim() != 1 else len(one_each)
        self._real = self._real + (ids.numel() if mask is None else mask.sum())
        widths = inputs.get(WIDTHS)  # padded length of each of a row's texts
        self._padded += ids.numel() if widths is None else len(ids) // len(widths) * sum(widths)
        if "decoder_input_ids" in inputs and "labels" in inputs:  # output tokens count too
            self._real = self._real + (inputs["labels"] != IGNORED).sum()
            self._padded += inputs["labels"].numel()
        self._device = ids.device

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available() and (control.should_log or control.should_evaluate or control.should_save):
            torch.cuda.synchronize()  # makes the sum over these steps right
        now = time.perf_counter()
        if self._mark is not None:
            self._window_seconds += now - self._mark
            self._window_steps += 1
            self._keep(now - self._mark)
        self._mark = now

    def _forget_the_mark(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark = None

    on_evaluate = on_save = on_epoch_begin = on_predict = _forget_the_mark

    def window(self, reduce: Any) -> dict[str, float]:
        """Speeds since the last call, over all ranks; `reduce` sums a tensor over them. Every rank must call it."""
        if not self._window_seconds:
            return {}
        window = [float(self._rows), float(self._real), float(self._padded)]
        counted = reduce(torch.tensor(window, dtype=torch.float64, device=self._device))
        figures = self._figures(counted, self._window_seconds)
        figures["step_seconds"] = self._window_seconds / self._window_steps
        self._window_steps = 0
        self._total, self._window_seconds = self._total + counted, 0.0
        self._rows = self._real = self._padded = 0
        return figures

    def summary(self, reduce: Any) -> dict[str, float]:
        """Over the whole run and all ranks: speeds, and median and p95 of step times in seconds."""
        self.window(reduce)
        figures: dict[str, float] = {}
        if self.steps:
            figures |= self._figures(self._total, self.total_seconds)
            figures["step_seconds_median"] = float(np.median(self.step_seconds))
            figures["step_seconds_p95"] = float(np.percentile(self.step_seconds, 95))
        return figures

    def _keep(self, seconds: float) -> None:
        """Each step is among those kept with the same probability (Vitter, Random Sampling with a Reservoir, 1985,
        algorithm R), so memory does not grow with the run, and steps that are slow at regular intervals, such as those
        that log, keep their share."""
        self.steps += 1
        self.total_seconds += seconds
        if len(self.step_seconds) < KEPT_STEPS:
            self.step_seconds.append(seconds)
        elif (place := self._random.randrange(self.steps)) < KEPT_STEPS:
            self.step_seconds[place] = seconds

    def _figures(self, counted: Any, seconds: float) -> dict[str, float]:
        rows, real, padded = counted.tolist()
        figures = {"samples_per_second": rows / self.sharing / seconds}
        if padded:
            figures |= {"real_tokens_per_second": real / seconds, "padding_share": 1 - real / padded}
        if padded and self.peak and self.flops_per_token:  # not for images: a convolution uses a weight many times
            figures["mfu"] = self.flops_per_token * real / seconds / (self.peak * self.world_size)
        return figures
