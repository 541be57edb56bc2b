"""ZeRO-3: weights are sharded too; modules gather theirs before they run.

Modeled step by step on deepspeed 0.19.8, runtime/zero/stage3.py, partition_parameters.py and
partitioned_param_coordinator.py; each place names its function.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import accumulate, pairwise

from finetune.plan.engines.resident import BUCKETS, GATHERED, GRADIENTS, MASTERS, PARAMETERS, Resident, Weights
from finetune.plan.optimizers import Optimizer
from finetune.plan.program import TEMPORARY, modules_used
from finetune.plan.step import Ledger, Pass
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES
from finetune.plan.zero import Zero, shard

SECOND = "secondary shards"


@lru_cache(maxsize=128)
def _order(
    tape: Tape, goes_back: bool
) -> tuple[dict[str, tuple[str, ...]], list[int], list[str], dict[str, list[int]]]:
    """What `Zero3.trace` records: the weights of each module; `entered`, how many modules start in each turn: a module
    and its parents; `uses`, the parameters in the order in which a micro-batch uses them; `later`, the places there of
    each."""
    used = modules_used(tape, goes_back)
    # The parents of each module, by dotted name.
    around = [set[str](), *({*accumulate(op.module.split(".")[:-1], "{}.{}".format)} for op in used)]
    uses, later = [name for op in used for name in op.weights], defaultdict[str, list[int]](list)
    for index, name in enumerate(uses):
        later[name].append(index)
    return (
        {op.module: op.weights for op in used},
        [1 + len(now - before) for before, now in pairwise(around)],
        uses,
        later,
    )


class Zero3(Resident):
    enters_modules = True
    own_linear = True  # runtime/zero/linear.py, LinearFunctionForZeroStage3

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        limit = self.zero.persistence_threshold
        self.persistent = {name for name, size in self.elements.items() if size < limit}
        self.pieces = {name: shard(size, self.ranks) for name, size in self.elements.items()}
        self.piece = sum(self.pieces.values())
        self.trained_piece = sum(self.pieces[name] for name in self.trains)
        self.groups = self.weights.sub_groups(self.ranks, self.zero.sub_group_size)
        # A rank alone uses its shards as they are (partition_parameters.py, NoGatherCoalescedHandle).
        self.gathered_size = 0 if self.ranks == 1 and self.zero.offload_param == "none" else self.size
        self.here: set[str] = set()  # gathered
        self.second: set[str] = set()  # those of which hpZ keeps a secondary shard
        self.live = 0  # gathered elements that are not persistent
        self.filled: list[str] = []  # parameters whose gradients are in the reduce bucket
        self.full = 0  # its elements
        self.at = self.asked = 0  # indices into `uses`: the end of the running module, and of the prefetch
        self.turn = 0  # modules entered so far
        self.promised: dict[str, int] = {}  # per parameter: the last use that the prefetch has covered
        self.gathers = defaultdict[str, list[tuple[int, int]]](list)  # by phase: elements and parameters of each
        self.reduced = 0  # buckets of gradients

    def trace(self, tape: Tape, goes_back: bool = True) -> None:
        """The order of modules in a micro-batch, forward and backward, which DeepSpeed records in its first step. A
        model that is never trained has no backward pass."""
        self.modules, self.entered, self.uses, self.later = _order(tape, goes_back)
        self.ahead = [0, *accumulate(self.elements[name] for name in self.uses)]

    def hold(self, ledger: Ledger) -> None:
        """_create_fp16_partitions_with_defragmentation, _create_fp32_partitions (a copy in fp32 runs, too),
        _setup_for_real_optimizer: the reduce bucket, and gradients of all shards."""
        weights_home = self.host if self.zero.offload_param != "none" else ledger
        home = self.host if self.offloads else ledger
        if self.zero.offload_param == "nvme":
            weights_home.take(BUCKETS, self.zero.param_buffers * self.zero.param_buffer_size * self.size)
        else:
            weights_home.take(PARAMETERS, self.piece * self.size)
        largest = max(self.groups, default=0)
        if self.zero.offload_optimizer == "nvme":
            home.take(BUCKETS, self.zero.optimizer_buffers * largest * FP32_BYTES)
            small = [group for group in self.groups if group < largest]
            home.take(MASTERS, sum(small) * FP32_BYTES)
            self.hold_states(home, [(size,) for size in small])
        else:
            home.take(MASTERS, self.trained_piece * FP32_BYTES)
            self.hold_states(home, [(group,) for group in self.groups])
        if self.offloads:
            home.take(GRADIENTS, self.trained_piece * FP32_BYTES)  # fp32, for CPU Adam
        home.take(GRADIENTS, self.trained_piece * self.size)  # grad_partitions_flat_buffer
        if self.zero.contiguous_gradients:
            ledger.take(BUCKETS, self.zero.reduce_bucket_size * self.size)
        ledger.take(GATHERED, sum(self.elements[name] for name in self.persistent) * self.gathered_size)
        self.here = set(self.persistent)

    def begin(self, is_first: bool, is_boundary: bool) -> None:
        super().begin(is_first, is_boundary)
        self.at = self.asked = self.turn = 0
        self.promised.clear()

    def before_module(self, ledger: Ledger, module: str) -> None:
        """fetch_sub_module: gathers this module's parameters, then those of the next modules up to the prefetch bucket.
        Each gather fills one flat tensor, from which the parameters are copied (AllGatherCoalescedHandle.wait). Parent
        modules prefetch too, so gathering runs ahead of the computation."""
        names = self.modules[module]
        self._gather(ledger, [name for name in names if name not in self.here], module)
        self.at += len(names)
        self.asked = max(self.asked, self.at)
        for _ in range(self.entered[self.turn]):
            if self.asked == len(self.uses) or self.live >= self.zero.max_live_parameters:
                break
            self._prefetch(ledger)
        self.turn += 1

    def _prefetch(self, ledger: Ledger) -> None:
        ahead, size = [], 0
        limit = min(self.zero.prefetch_bucket_size, self.zero.max_live_parameters - self.live)
        while size < limit and self.asked < len(self.uses):
            name = self.uses[self.asked]
            self.promised[name] = self.asked
            self.asked += 1
            if name not in self.here and name not in ahead:
                ahead.append(name)
                size += self.elements[name]
        self._gather(ledger, ahead, "prefetch")

    def after_module(self, ledger: Ledger, module: str) -> None:
        """release_sub_module: frees parameters that are not used again within `max_reuse_distance` elements and that
        the prefetch has not skipped as already gathered (__params_to_release)."""
        for name in self.modules[module]:
            is_promised = self.promised.get(name, -1) >= self.at
            if name in self.here and name not in self.persistent and not is_promised and not self._is_near(name):
                self.here.discard(name)
                self.live -= self.elements[name]
                self._keep_second(ledger, name)
                ledger.give(GATHERED, self.elements[name] * self.gathered_size)

    def _keep_second(self, ledger: Ledger, name: str) -> None:
        """hpZ: the first release of a parameter leaves a shard of it, cut within the node, from which it is gathered
        until the weights change (partition_parameters.py, _partition_param_sec)."""
        if self.zero.hpz_ranks > 1 and name not in self.second:
            self.second.add(name)
            ledger.take(SECOND, shard(self.elements[name], self.zero.hpz_ranks) * self.size, name)

    def _is_near(self, name: str) -> bool:
        nexts = [index for index in self.later[name] if index >= self.at]
        return bool(nexts) and self.ahead[nexts[0]] - self.ahead[self.at] < self.zero.max_reuse_distance

    def _gather(self, ledger: Ledger, names: list[str], where: str) -> None:
        if not names:
            return
        elements = sum(self.pieces[name] * self.ranks for name in names)
        self.gathers[ledger.phase].append((elements, len(names)))
        flat = elements * self.size if self.ranks > 1 else 0
        if self.zero.quantized_weights:  # as received, and dequantized (partition_parameters.py, QuantizationInfo)
            flat += flat // self.size
        whole = sum(self.elements[name] for name in names)
        self.live += whole
        ledger.take(GATHERED, flat, where)
        ledger.take(GATHERED, whole * self.gathered_size, where)
        ledger.give(GATHERED, flat)
        self.here.update(names)

    def part_of_gradient(self, ledger: Ledger, name: str) -> None:
        """A bucket without room is reduced before it is asked whether the gradient is complete."""
        if self.full + self.elements[name] > self.zero.reduce_bucket_size:
            self._reduce(ledger)

    def gradient(self, ledger: Ledger, name: str) -> None:
        """__add_grad_to_ipg_bucket; a full bucket is reduced first (reduce_independent_p_g_buckets...)."""
        self.part_of_gradient(ledger, name)
        self.filled.append(name)
        self.full += self.elements[name]
        ledger.give(TEMPORARY, self.gradient_bytes(name))
        if not self._lies_in_bucket(name):
            ledger.take(GRADIENTS, self.gradient_bytes(name), name)

    def _lies_in_bucket(self, name: str) -> bool:
        """Whether the gradient is copied into the bucket and its own storage freed."""
        return self.zero.contiguous_gradients and self.elements[name] <= self.zero.reduce_bucket_size

    def _reduce(self, ledger: Ledger) -> None:
        """__avg_scatter_grads, reduce_scatter_coalesced: one buffer with every rank's shards."""
        if not self.filled:
            return
        padded = sum(self.pieces[name] * self.ranks for name in self.filled)
        self.reduced += 1
        ledger.passing(BUCKETS, padded * self.size if self.ranks > 1 else 0, "reduce-scatter of a bucket")
        for name in self.filled:
            if not self._lies_in_bucket(name):
                ledger.give(GRADIENTS, self.gradient_bytes(name))
        self.filled.clear()
        self.full = 0

    def end(self, ledger: Ledger) -> None:
        self._reduce(ledger)

    def step(self, ledger: Ledger) -> None:
        """step: persistent parameters are sharded too while the optimizer steps the sub-groups one after another."""
        ledger.phase = "optimizer"
        for name in sorted(self.here - self.persistent):
            self._keep_second(ledger, name)
        kept = sum(self.elements[name] for name in self.persistent) * self.gathered_size
        ledger.give(GATHERED, ledger.live.get(GATHERED, 0))
        for group in () if self.offloads else self.groups:
            ledger.take(GRADIENTS, group * FP32_BYTES, "fp32 gradients of a sub-group")
            ledger.passing(TEMPORARY, self.optimizer.step_bytes([group]), "optimizer")
            ledger.give(GRADIENTS, group * FP32_BYTES)
        ledger.take(GATHERED, kept, "persistent parameters")
        self.here, self.live = set(self.persistent), 0
        if self.second:
            ledger.give(SECOND, ledger.live[SECOND])
        self.second.clear()


def played(tape: Tape, weights: Weights, zero: Zero, ranks: int) -> Zero3:
    """The engine after a micro-batch, forward and backward, only to be read: it is cached by the settings that matter,
    so layouts that gather alike are simulated once."""
    hangs_on = Zero(stage=3, reduce_bucket_size=zero.reduce_bucket_size, max_reuse_distance=zero.max_reuse_distance,
                    prefetch_bucket_size=zero.prefetch_bucket_size, max_live_parameters=zero.max_live_parameters,
                    persistence_threshold=zero.persistence_threshold)  # fmt: skip
    return _played(tape, weights, hangs_on, ranks)


@lru_cache(maxsize=128)
def _played(tape: Tape, weights: Weights, zero: Zero, ranks: int) -> Zero3:
    ledger = Ledger()
    layout = Zero3(weights, zero, Optimizer("sgd"), ranks, 0, ledger)
    layout.hold(ledger)
    layout.trace(tape)
    layout.begin(True, True)
    passed = Pass(tape, ledger, layout)
    passed.forward()
    passed.backward()
    layout.end(ledger)
    return layout
