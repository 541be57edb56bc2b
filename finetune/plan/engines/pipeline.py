"""What differs from ZeRO-1 under DeepSpeed's pipeline engine, and in bf16 with gradients added up in fp32.

Followed step by step: deepspeed 0.19.8, runtime/pipe/engine.py, runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from finetune.plan.engines.resident import BUCKETS, GRADIENTS, MASTERS, PARAMETERS
from finetune.plan.engines.zero12 import Zero12
from finetune.plan.step import TEMPORARY, Ledger
from finetune.plan.values import FP32_BYTES

PIPE = "pipeline buffers"


class Stage(Zero12):
    """ZeRO-1 over the pipelines, with a reduce bucket too many: its hooks make one, and reduce_gradients adds another
    for pipelines (stage_1_and_2.py, setup_buckets, reduce_gradients)."""

    def end(self, ledger: Ledger) -> None:
        size = self.zero.reduce_bucket_size * self.size
        twice = self.is_boundary and self.has_buckets
        if twice:
            ledger.take(BUCKETS, size, "second reduce bucket")
        super().end(ledger)
        if twice:
            ledger.give(BUCKETS, size)


class Bf16Stage(Zero12):
    """DeepSpeed's BF16_Optimizer: ZeRO-1 that holds an fp32 gradient of every weight for good. It is taken for bf16
    with gradients added up in fp32, under a pipeline and without (runtime/engine.py, _do_optimizer_sanity_check)."""

    @property
    def padded(self) -> int:
        return sum(part.padded for part in self.parts)

    def hold(self, ledger: Ledger) -> None:
        frozen = self.weights.elements - self.weights.trained_elements
        ledger.take(PARAMETERS, (self.padded + frozen) * self.size)
        ledger.take(MASTERS, self.part * FP32_BYTES)
        self.hold_states(ledger, [(part.part,) for part in self.parts])
        ledger.take(GRADIENTS, self.padded * FP32_BYTES)

    def gradient(self, ledger: Ledger, name: str) -> None:
        ledger.give(TEMPORARY, self.gradient_bytes(name))
        if name not in self.kept:  # added to the fp32 one when the backward pass ends, and kept (update_hp_grads)
            self.kept.add(name)
            ledger.take(GRADIENTS, self.gradient_bytes(name), name)

    def end(self, ledger: Ledger) -> None:
        if self.is_boundary:  # joined for the all-reduce, and cast for the way (engine.py, allreduce_bucket)
            ledger.passing(BUCKETS, self.padded * (FP32_BYTES + self.size), "all-reduce of gradients")

    def step(self, ledger: Ledger) -> None:
        ledger.phase = "optimizer"
        ledger.passing(TEMPORARY, self.optimizer.step_bytes([part.part for part in self.parts]), "optimizer")
        for name in [*self.kept]:
            self._drop(ledger, name)
