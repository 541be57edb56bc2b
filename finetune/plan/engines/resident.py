"""The interface of every engine, and the engines without sharding: one process, DDP, and DeepSpeed at stage 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.plan.forward.expert_parallel import ROUTER
from finetune.plan.model import Tensor
from finetune.plan.optimizers import Optimizer
from finetune.plan.program import TEMPORARY
from finetune.plan.step import Engine, Ledger
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES
from finetune.plan.zero import Partition, Zero, shard, sub_groups

PARAMETERS, GATHERED, MASTERS = "parameters", "gathered parameters", "master weights"
GRADIENTS, STATES, BUCKETS, PIPE = "gradients", "optimizer states", "buckets", "pipeline buffers"


@dataclass(frozen=True)
class Weights:
    """The parameters of one rank's model (or pipeline stage), in `named_parameters` order. `bytes_each`: per element, 2
    in bf16 and fp16, 4 in fp32 and under autocast. `frozen_each`: of frozen parameters, where it differs."""

    tensors: tuple[Tensor, ...]
    bytes_each: int
    frozen_each: int | None = None

    @property
    def trained(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.trains]

    @property
    def with_gradients(self) -> list[Tensor]:
        """torch's optimizers skip all others, and keep no states of them."""
        return [tensor for tensor in self.trained if tensor.is_reached]

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def frozen_bytes(self) -> int:
        each = self.bytes_each if self.frozen_each is None else self.frozen_each
        return sum(tensor.bytes(each) for tensor in self.tensors if not tensor.trains)

    @property
    def bytes(self) -> int:
        return self.trained_elements * self.bytes_each + self.frozen_bytes

    @property
    def trained_elements(self) -> int:
        return sum(tensor.elements for tensor in self.trained)

    def groups(self) -> list[list[Tensor]]:
        """The Trainer's parameter groups, with and without weight decay (transformers 5.23,
        Trainer.get_decay_parameter_names). Here the number of dimensions tells biases and norms from the rest. Experts
        in expert parallelism are a group of their own, and their routers come last (deepspeed 0.19.8,
        runtime/engine.py, _remap_param_groups_after_module_replacement)."""
        decayed = [tensor for tensor in self.trained if len(tensor.shape) > 1 and tensor.holders == 1]
        decayed.sort(key=lambda tensor: tensor.name.endswith(ROUTER))
        rest = [tensor for tensor in self.trained if len(tensor.shape) <= 1]
        experts = [tensor for tensor in self.trained if tensor.holders > 1]
        return [group for group in (decayed, rest, experts) if group]

    def parts(self, ranks: int) -> list[Partition]:
        """For ZeRO-1 and -2: one flat tensor per group, partitioned over the ranks that hold the same."""
        return [Partition(tuple(group), ranks // group[0].holders) for group in self.groups()]

    def sub_groups(self, ranks: int, limit: int) -> list[int]:
        """Elements of each sub-group of one rank under ZeRO-3; the optimizer steps them one by one."""
        pieces = ([shard(tensor.elements, ranks) for tensor in group] for group in self.groups())
        return [sum(group) for one in pieces for group in sub_groups(one, limit)]


class Resident(Engine):
    """The engine of one rank. Device bytes go to the ledger that is passed in, host bytes to `self.host`, which on a
    CPU is the same ledger. Call order: `hold`; `begin` and `end` for each micro-batch; `step`."""

    def __init__(self, weights: Weights, zero: Zero, optimizer: Optimizer, ranks: int, rank: int, host: Ledger) -> None:
        self.weights, self.zero, self.optimizer = weights, zero, optimizer
        self.ranks, self.rank, self.host = ranks, rank, host
        self.elements = {tensor.name: tensor.elements for tensor in weights.tensors}
        self.trains = {tensor.name for tensor in weights.trained}
        self.is_first, self.is_boundary = True, True
        self.size = weights.bytes_each
        self.offloads = zero.offload_optimizer != "none"
        self.kept: set[str] = set()  # parameters whose `grad` is set
        self.pieces = self.elements  # of which the optimizer steps its own
        self.stepped = weights.trained

    def gradient_bytes(self, name: str) -> int:
        return self.elements[name] * self.size if name in self.trains else 0

    def trace(self, tape: Tape) -> None:
        """Learns the order in which a micro-batch uses the parameters, if the engine depends on it."""

    def gradient(self, ledger: Ledger, name: str) -> None:
        """Stays in `grad`, or is added to the one already there."""
        ledger.give(TEMPORARY, self.gradient_bytes(name))
        if name not in self.kept:
            self.kept.add(name)
            ledger.take(GRADIENTS, self.gradient_bytes(name), name)

    def drop(self, ledger: Ledger, name: str) -> None:
        if name in self.kept:
            self.kept.discard(name)
            ledger.give(GRADIENTS, self.gradient_bytes(name))

    def hold(self, ledger: Ledger) -> None:
        """Takes the bytes that live between steps."""
        raise NotImplementedError

    def begin(self, is_first: bool, is_boundary: bool) -> None:
        """A micro-batch: the first of its step, the last of its step, or both."""
        self.is_first, self.is_boundary = is_first, is_boundary

    def end(self, ledger: Ledger) -> None:
        """The micro-batch's backward pass is done."""

    def step(self, ledger: Ledger) -> None:
        """Gradient norm, clipping, optimizer, and the gather of the new weights; then no gradient is left."""
        ledger.phase = "optimizer"
        sizes = [self.pieces[tensor.name] for tensor in self.stepped]
        ledger.passing(TEMPORARY, self.optimizer.step_bytes(sizes), "optimizer")
        ledger.give(GRADIENTS, ledger.live.setdefault(GRADIENTS, 0))
        self.kept.clear()

    def hold_states(self, ledger: Ledger, shapes: Sequence[tuple[int, ...]]) -> None:
        ledger.take(STATES, sum(self.optimizer.state_bytes(shape) for shape in shapes))


class Plain(Resident):
    """One process, or DDP with `buckets`; and DeepSpeed's engine at stage 0 (`is_engine`)."""

    def __init__(self, *args: object, buckets: bool, is_engine: bool) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.buckets, self.is_engine = buckets, is_engine
        self.has_masters = is_engine and self.size < FP32_BYTES
        self.stepped = self.weights.trained if is_engine else self.weights.with_gradients

    def hold(self, ledger: Ledger) -> None:
        ledger.take(PARAMETERS, self.weights.bytes)
        if self.has_masters:
            ledger.take(MASTERS, self.weights.trained_elements * FP32_BYTES)
        self.hold_states(ledger, [tensor.shape for tensor in self.stepped])
        if self.buckets:  # DDP keeps them between steps (torch/csrc/distributed/c10d/reducer.cpp)
            ledger.take(BUCKETS, self.weights.trained_elements * self.size)

    def gradient(self, ledger: Ledger, name: str) -> None:
        if self.buckets and self.is_boundary:
            # Copied into its bucket, of which `grad` then is a view (reducer.cpp, mark_variable_ready_dense).
            ledger.give(TEMPORARY, self.gradient_bytes(name))
            self.drop(ledger, name)
        else:
            super().gradient(ledger, name)

    def end(self, ledger: Ledger) -> None:
        for tensor in self.weights.trained if self.is_engine and self.is_boundary else ():
            if not tensor.is_reached:  # DeepSpeed makes zeros (0.19.8, runtime/engine.py, _get_gradients_for_reduction)
                ledger.take(GRADIENTS, self.gradient_bytes(tensor.name), tensor.name)
        if self.is_engine and self.is_boundary and self.ranks > 1:
            # engine.py, buffered_allreduce_fallback: gradients are flattened, 500 million elements at a time.
            flat = min(self.weights.trained_elements, 500_000_000)
            ledger.passing(BUCKETS, flat * self.size, "all-reduce of gradients")

    def step(self, ledger: Ledger) -> None:
        ledger.phase = "optimizer"
        if self.has_masters:
            ledger.take(GRADIENTS, self.weights.trained_elements * FP32_BYTES, "fp32 gradients")
        super().step(ledger)
