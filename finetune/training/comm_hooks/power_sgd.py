"""torch's PowerSGD hook (arXiv 1905.13727), with a state that can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from finetune.training.comm_hooks.wire import Wire, done

NO_ZERO_DIVISION = 1e-8  # a column of zeros, of a parameter without gradient, would become NaN


class PowerSGD:
    """Torch keeps its state by the number of the bucket, and DDP makes other buckets in its first step than later: what
    is saved is by parameter, and laid out anew where a bucket has other parameters than it had."""

    def __init__(self, wire: Wire, parameters: dict[str, torch.Tensor], rank: int, start: int) -> None:
        self.wire, self.parameters = wire, parameters
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.torch = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            orthogonalization_epsilon=NO_ZERO_DIVISION,
        )
        self._buckets: dict[int, tuple[str, ...]] = {}
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}  # by parameter, not in a bucket yet
        # Its second and third all-reduce are started by gloo's own threads, in an order that differs between ranks
        # where several buckets are under way, and gloo matches messages by their order.
        self._one_at_a_time = distributed.get_backend() == "gloo"

    def exchange(self, bucket: distributed.GradBucket) -> Any:
        """A future of the bucket's buffer, with the mean over ranks of what low rank can tell."""
        compresses = self.torch.iter >= self.torch.start_powerSGD_iter
        if compresses:
            self._settle(bucket)
        before = self.torch.total_numel_after_compression
        future = powerSGD_hook(self.torch, bucket)
        elements = self.torch.total_numel_after_compression - before if compresses else bucket.buffer().numel()
        self.wire.count_all_reduce(elements * bucket.buffer().element_size())
        return done(future.wait()) if self._one_at_a_time else future

    def _settle(self, bucket: distributed.GradBucket) -> None:
        """See that torch's state of this bucket is that of its parameters."""
        names = tuple(self.names[id(parameter)] for parameter in bucket.parameters())
        index = bucket.index()
        if self._buckets.get(index) == names:
            return
        gone = {at: had for at, had in self._buckets.items() if at == index or not set(had).isdisjoint(names)}
        self._waiting |= self._by_parameter(gone)
        for at in gone:
            del self._buckets[at]
            for memory in (self.torch.error_dict, self.torch.p_memory_dict, self.torch.q_memory_dict):
                memory.pop(at, None)
        if self._waiting and all(name in self._waiting for name in names):
            parts = {name: self._waiting.pop(name) for name in names}
            packed = [name for name, *_ in self._layout(names)]
            self.torch.error_dict[index] = torch.cat([parts[name]["error"] for name in names])
            for key, memory in (("p", self.torch.p_memory_dict), ("q", self.torch.q_memory_dict)):
                flat = [parts[name][key] for name in packed]
                memory[index] = torch.cat(flat) if flat else parts[names[0]]["error"].new_empty(0)
        self._buckets[index] = names

    def _by_parameter(self, buckets: dict[int, tuple[str, ...]]) -> dict[str, dict[str, torch.Tensor]]:
        """Errors, and Ps and Qs of those that are compressed, cut out of the buckets."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for index, names in buckets.items():
            if index not in self.torch.error_dict:
                continue
            sizes = [self.parameters[name].numel() for name in names]
            errors = self.torch.error_dict[index].split(sizes)
            found |= {name: {"error": error.clone()} for name, error in zip(names, errors, strict=True)}
            p_start = q_start = 0
            for name, p_size, q_size in self._layout(names):
                found[name]["p"] = self.torch.p_memory_dict[index][p_start : p_start + p_size].clone()
                found[name]["q"] = self.torch.q_memory_dict[index][q_start : q_start + q_size].clone()
                p_start, q_start = p_start + p_size, q_start + q_size
        return found

    def _layout(self, names: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
        """Which have a P and a Q, of how many elements, in the order of torch's memory: by shape, then as they come
        (powerSGD_hook.py, _should_compress and shape_to_tensors)."""
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name in names:
            shape = self.parameters[name].shape
            by_shape.setdefault((shape[0], shape[1:].numel()), []).append(name)
        for (n, m), alike in by_shape.items():
            rank = min(n, m, self.torch.matrix_approximation_rank)
            if (n + m) * rank * self.torch.min_compression_rate < n * m:
                for name in alike:
                    yield name, n * rank, m * rank

    def state(self) -> dict[str, Any]:
        kind, keys, *rest = self.torch.rng.get_state()
        parts = {**self._waiting, **self._by_parameter(self._buckets)}
        return {"parts": parts, "iter": self.torch.iter, "rng": [kind, keys.tolist(), *rest]}

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        self._waiting = {
            name: {key: tensor.to(device) for key, tensor in part.items()} for name, part in state["parts"].items()
        }
        self.torch.iter = state["iter"]
        kind, keys, *rest = state["rng"]
        self.torch.rng.set_state((kind, keys, *rest))
