"""Measures a benchmark cell: seconds, losses, and bytes at the peak, on average and by kind."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from finetune.measure.memory import Allocations
from finetune.measure.watch import OBSERVED_STEPS, Watch
from finetune.models.composite import elements
from finetune.training.speed import peak_rss_bytes

SAMPLE_SECONDS = 0.002
OTHER = "activations and other"


class Meter(Watch):
    """Watches memory in the first steps, which makes them too slow to time; then `warm_steps`, then timed steps.

    A step's time runs from the end of the previous step, after its log, to its own end: it includes the wait for data,
    in the Trainer and in the pipeline alike. Bytes on a CPU are those of tensors; on a GPU the peak is the allocator's,
    over the timed steps.
    """

    def __init__(self, memory: Allocations, warm_steps: int) -> None:
        super().__init__(memory, warm_steps)
        self.losses: list[float] = []
        self.kinds: dict[str, int] = {}
        self.parameters = 0
        self._has_begun = False
        self._sampler = Sampler(memory)
        self._model: Any = None

    def follow(self, model: Any) -> None:
        super().follow(model)
        self._model = model
        self.parameters = elements(model.parameters())
        register_optimizer_step_pre_hook(self._count_kinds)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:  # the optimizer states exist
            self._sampler.start()
        self.prepare(state)
        if not self._has_begun:
            self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == OBSERVED_STEPS:
            self._sampler.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self._has_begun = True
            self.begin()

    def _count_kinds(self, optimizer: Any, *_: Any) -> None:
        """Called before the optimizer's step, when all gradients exist; ZeRO-3 makes one step per group."""
        if 0 < len(self.step_peaks) < OBSERVED_STEPS and isinstance(getattr(optimizer, "state", None), dict):
            for kind, size in bytes_by_kind(self._model, optimizer, self.memory.device).items():
                self.kinds[kind] = max(size, self.kinds.get(kind, 0))

    def figures(self) -> dict[str, Any]:
        """This rank's measurements, after training, for `finetune.bench.runner`."""
        peak = int(torch.cuda.max_memory_allocated()) if self.on_gpu else max(self.step_peaks[-1].values())
        rest = max(0, peak - sum(size for kind, size in self.kinds.items() if "host" not in kind))
        return {
            "seconds": self.seconds,
            "losses": self.losses,
            "parameters": self.parameters,
            "peak_bytes": peak,
            "average_bytes": self._sampler.mean,
            "rss_peak_bytes": peak_rss_bytes(),
            "by_kind": {**self.kinds, OTHER: rest},
            "measured_by": "CUDA's allocator" if self.on_gpu else "bytes of tensors",
        }


class Sampler:
    """The mean over time of live bytes, sampled from a thread beside the training."""

    def __init__(self, memory: Allocations) -> None:
        self.memory = memory
        self._gpu: int | None = None
        self._seen: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """Call it from the training thread: only that knows the rank's GPU, and a new thread starts with GPU 0."""
        self._gpu = torch.cuda.current_device() if self.memory.device == "cuda" else None
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def mean(self) -> int:
        return round(statistics.fmean(self._seen)) if self._seen else self.memory.live

    def _look(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            live = self.memory.live if self._gpu is None else torch.cuda.memory_allocated(self._gpu)
            self._seen.append(int(live))


def bytes_by_kind(model: Any, optimizer: Any, device: str) -> dict[str, int]:
    """Bytes of storages, each counted once, under the first kind in which it is found. The optimizer states include its
    own fp32 weights."""
    parameters = list(model.parameters())
    shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]  # ZeRO-3
    own = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    kinds: tuple[tuple[str, Iterable[Any]], ...] = (
        ("parameters", [*parameters, *shards]),
        ("gradients", [p.grad for p in (*parameters, *own)]),
        ("optimizer states", [*states, *own]),
        ("buffers", model.buffers()),
    )
    seen: set[int] = set()
    sums: dict[str, int] = {}
    for kind, tensors in kinds:
        sums[kind] = 0
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP's span all ranks
            storage = local.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                name = kind if tensor.device.type == device else f"{kind} on the host"
                sums[name] = sums.get(name, 0) + storage.nbytes()
    return sums
