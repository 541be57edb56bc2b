"""ZeRO-1 and -2: full weights on each rank, optimizer states (under 2 also gradients) in equal partitions.
Variants: ZeRO-1 under DeepSpeed's pipeline engine, and bf16 with fp32 gradient accumulation.

Modeled step by step on deepspeed 0.19.8, runtime/zero/stage_1_and_2.py (each place names its function),
runtime/pipe/engine.py and runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from finetune.dsconfig.rules.zero import reduce_buckets
from finetune.plan.engines.resident import BUCKETS, GRADIENTS, MASTERS, PARAMETERS, Resident
from finetune.plan.program import TEMPORARY
from finetune.plan.step import Ledger
from finetune.plan.values import FP32_BYTES


class Zero12(Resident):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.parts = self.weights.parts(self.ranks)
        self.part = sum(part.part for part in self.parts)
        # Ranks that far apart hold the same experts.
        self.owned = frozenset().union(*(part.owned(self.rank * part.ranks // self.ranks) for part in self.parts))
        self.experts = {tensor.name for tensor in self.weights.trained if tensor.holders > 1}
        self.owned_elements = sum(self.elements[name] for name in self.owned)
        self.padded = sum(part.padded for part in self.parts)
        self.contiguous = self.zero.contiguous_gradients or self.offloads
        self.pending: list[str] = []  # parameters whose gradients are in the bucket
        self.filled = 0  # its elements
        self.has_buckets = self.has_part = False

    @property
    def bucket_bytes(self) -> int:
        many = reduce_buckets(self.zero.stage, self.zero.overlap_comm)
        return many * self.zero.reduce_bucket_size * self.size

    @property
    def part_bytes(self) -> int:
        """Gradients that this rank owns: of whole parameters or, accumulated in fp32, of its partition only
        (_build_compact_grad_partition_buffer)."""
        return self.part * FP32_BYTES if self.zero.accumulates_in_fp32 else self.owned_elements * self.size

    def hold(self, ledger: Ledger) -> None:
        """__init__: flat weights, masters of this rank's partition, states. Offload adds their gradients, a copy of the
        new weights, and two buffers of the largest parameter (temp_grad_buffer_for_cpu_offload, ..._gpu_offload)."""
        ledger.take(PARAMETERS, self.padded * self.size + self.weights.frozen_bytes)
        home = self.host if self.offloads else ledger
        home.take(MASTERS, self.part * FP32_BYTES)
        self.hold_states(home, [(part.part,) for part in self.parts])
        if self.offloads:
            largest = max(tensor.elements for tensor in self.weights.trained)
            self.host.take(GRADIENTS, self.part * FP32_BYTES)
            self.host.take(BUCKETS, (self.part + largest) * self.size)
            ledger.take(BUCKETS, largest * self.size)

    def gradient(self, ledger: Ledger, name: str) -> None:
        """process_gradients, reduce_independent_p_g_buckets_and_remove_grads."""
        if self.contiguous and not self.has_buckets:  # setup_buckets
            self.has_buckets = True
            ledger.take(BUCKETS, self.bucket_bytes, "reduce buckets")
        super().gradient(ledger, name)
        if self.zero.stage == 2 or (self.zero.overlap_comm and self.is_boundary):
            self._into_bucket(ledger, name)

    def part_of_gradient(self, ledger: Ledger, name: str) -> None:
        """A bucket without room is reduced before it is asked whether the gradient is complete
        (reduce_independent_p_g_buckets_and_remove_grads)."""
        if self.zero.stage == 2 and self.filled + self.elements[name] > self.zero.reduce_bucket_size:
            self._reduce(ledger)

    def _into_bucket(self, ledger: Ledger, name: str) -> None:
        elements = self.elements[name]
        if self.filled + elements > self.zero.reduce_bucket_size:
            self._reduce(ledger)
        self.filled += elements
        if self.contiguous and elements <= self.zero.reduce_bucket_size:
            self.drop(ledger, name)  # it is in the bucket now
        self.pending.append(name)

    def _reduce(self, ledger: Ledger) -> None:
        """reduce_ipg_grads: with `reduce_scatter` the bucket is flattened once more for its all-reduce
        (allreduce_bucket, flatten), without it is reduced in place (gradient_reduction_w_predivide). Then the gradients
        that this rank owns are copied out into one tensor (copy_grads_in_partition)."""
        if self.filled and self.ranks > 1 and (self.zero.reduce_scatter or not self.contiguous):
            # Experts in expert parallelism, and the other weights, go to different ranks, one after the other.
            experts = sum(self.elements[name] for name in self.pending if name in self.experts)
            ledger.passing(BUCKETS, max(experts, self.filled - experts) * self.size, "all-reduce of a bucket")
        for name in self.pending:
            owns = name in self.owned
            if self.contiguous and owns and not self.has_part and not self.offloads:
                self.has_part = True
                ledger.take(GRADIENTS, self.part_bytes, "gradients of this rank's part")
            # ZeRO-1 leaves gradients larger than the bucket, and those of other ranks, in place until the step.
            if (owns and self.contiguous) or (self.zero.stage == 2 and (self.contiguous or not owns)):
                self.drop(ledger, name)
        self.pending.clear()
        self.filled = 0

    def end(self, ledger: Ledger) -> None:
        """independent_gradient_partition_epilogue."""
        if self.zero.stage == 1 and not self.is_boundary:
            return
        if self.zero.stage == 1 and not self.zero.overlap_comm:  # reduce_gradients
            for name in [tensor.name for tensor in self.weights.trained if tensor.name in self.kept]:
                self._into_bucket(ledger, name)
        self._reduce(ledger)
        if self.has_part and not self.is_first and self.zero.stage == 2:  # added to those of earlier micro-batches
            ledger.give(GRADIENTS, self.part_bytes)
        self.has_part = False
        if self.has_buckets:  # _release_ipg_buffers
            ledger.give(BUCKETS, self.bucket_bytes)
            self.has_buckets = False

    def step(self, ledger: Ledger) -> None:
        """step: flattens the partition's gradients, casts them to fp32, runs the optimizer, gathers the new weights."""
        ledger.phase = "optimizer"
        if not self.offloads:
            held = ledger.live.get(GRADIENTS, 0)
            for part in self.parts:
                ledger.take(GRADIENTS, part.part * self.size, "flattened gradients")
                if self.size < FP32_BYTES:
                    ledger.take(GRADIENTS, part.part * FP32_BYTES, "fp32 gradients")
                    ledger.give(GRADIENTS, part.part * self.size)
                if part is self.parts[-1]:
                    ledger.give(GRADIENTS, held)
                ledger.passing(TEMPORARY, self.optimizer.step_bytes([part.part]), "optimizer")
                ledger.give(GRADIENTS, part.part * FP32_BYTES)
        self.kept.clear()


class Stage(Zero12):
    """ZeRO-1 across pipelines, with one reduce bucket too many: its hooks allocate one, and reduce_gradients allocates
    another for pipelines (stage_1_and_2.py, setup_buckets, reduce_gradients)."""

    def end(self, ledger: Ledger) -> None:
        size = self.zero.reduce_bucket_size * self.size
        twice = self.is_boundary and self.has_buckets
        if twice:
            ledger.take(BUCKETS, size, "second reduce bucket")
        super().end(ledger)
        if twice:
            ledger.give(BUCKETS, size)


class Bf16Stage(Zero12):
    """DeepSpeed's BF16_Optimizer: ZeRO-1 with a permanent fp32 gradient of every weight. DeepSpeed uses it for bf16
    with fp32 gradient accumulation, with or without a pipeline (runtime/engine.py, _do_optimizer_sanity_check)."""

    def hold(self, ledger: Ledger) -> None:
        super().hold(ledger)
        ledger.take(GRADIENTS, self.padded * FP32_BYTES)

    def gradient(self, ledger: Ledger, name: str) -> None:
        Resident.gradient(self, ledger, name)  # and added to the fp32 one when the backward pass ends (update_hp_grads)

    def end(self, ledger: Ledger) -> None:
        if self.is_boundary:  # flattened for the all-reduce, and cast (engine.py, allreduce_bucket)
            ledger.passing(BUCKETS, self.padded * (FP32_BYTES + self.size), "all-reduce of gradients")

    def step(self, ledger: Ledger) -> None:
        ledger.phase = "optimizer"
        ledger.passing(TEMPORARY, self.optimizer.step_bytes([part.part for part in self.parts]), "optimizer")
        for name in [*self.kept]:
            self.drop(ledger, name)
