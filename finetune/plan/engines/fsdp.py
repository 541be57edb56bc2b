"""FSDP2 as accelerate sets it up: weights, gradients and optimizer states sharded; layer groups gather weights.

Modeled step by step on accelerate 1.15, utils/fsdp_utils.py (fsdp2_prepare_model: which modules make a group), and
torch 2.13, distributed/fsdp/_fully_shard/ (_fsdp_param_group.py: unshard, wait_for_unshard, post_backward;
_fsdp_state.py: the order of hooks; _fsdp_collectives.py: buffers).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from finetune.plan.engines.resident import BUCKETS, GATHERED, GRADIENTS, PARAMETERS, Resident
from finetune.plan.families.parts import Shape
from finetune.plan.forward.cuts import LAYER
from finetune.plan.program import TEMPORARY, modules_used
from finetune.plan.step import Ledger
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES, Op

# In the name of a weight of an adapter, or of what a trained copy replaces.
ADAPTER = re.compile(r"\.(lora_\w+\.default|original_module)\.")
EMBEDDINGS, TAIL, ROOT = "embeddings", "tail", "root"


@dataclass
class Group:
    """Parameters that are gathered together. `stays`: remains gathered between the forward and backward pass.
    `elements`: of all shards, with padding; `trained` and `cast`: of those that train, and of those that are gathered
    in another precision than they are held in. `waits`: its inputs have no gradient, so its own gradients are reduced,
    and its weights released, at the end."""

    names: list[str]
    stays: bool
    elements: int = 0
    trained: int = 0
    cast: int = 0
    waits: bool = False
    is_here: bool = False
    is_coming: bool = False
    is_reduced: bool = False


def piece(shape: Shape, ranks: int) -> Shape:
    """The first rank's shard, the largest: torch.chunk splits the first dimension, and all are padded to this."""
    first, *rest = shape or (1,)
    return math.ceil(first / ranks), *rest


class Fsdp(Resident):
    enters_modules = True

    def trace(self, tape: Tape) -> None:
        """Which parameters make a group, and the order in which a micro-batch uses the groups."""
        used = modules_used(tape, goes_back=False)
        self.modules = {op.module: op.weights for op in used}
        self.group_of = {name: self._group_of(name, used) for op in used for name in op.weights}
        # Gathered and not used: what a trained copy replaces, with the copy; and with the root module what lies around
        # the layers of a tower that no text reaches. Those layers are groups that are never gathered.
        keys, unused = {*self.group_of.values()}, [t for t in self.weights.tensors if t.name not in self.group_of]
        for tensor in unused:
            if (key := self._group_of(tensor.name, used)) in keys or tensor.layer is None:
                self.group_of[tensor.name] = key if key in keys else ROOT
        self.pieces = {tensor.name: math.prod(piece(tensor.shape, self.ranks)) for tensor in self.weights.tensors}
        self.stepped, self.groups = self.weights.with_gradients, dict[str, Group]()
        reduced = {tensor.name for tensor in self.stepped}
        for name, key in self.group_of.items():
            group = self.groups.setdefault(key, Group([], key in (TAIL, ROOT)))
            padded = self.pieces[name] * self.ranks
            group.names.append(name)
            group.elements += padded
            group.trained += padded * (name in reduced)
            group.cast += padded * (self._held_bytes(name) != self.size)
        first = {self.group_of[name]: op for op in reversed(used) for name in op.weights}
        for key, group in self.groups.items():
            group.waits = key == ROOT or not any(value.needs_grad for value in first[key].inputs)
        ends = {self.group_of[op.weights[0]]: index for index, op in enumerate(used)}
        ends[ROOT] = len(used)  # the root module ends last
        self.order = sorted(self.groups, key=lambda key: ends[key])
        self.now = ""  # the group whose module runs
        self.late = dict[str, int]()  # bytes of the previous gather and of the last gradient reduction

    def _group_of(self, name: str, used: list[Op]) -> str:
        """A group is a layer (what a model lists in `_no_split_modules`), the embeddings, or the final norm and head,
        with the embeddings if tied. The rest belongs to the root module."""
        if found := LAYER.match(name):
            return found[0]
        name = ADAPTER.sub(".", name)
        first, last = used[0].weights[0], [ADAPTER.sub(".", one) for one in used[-1].weights]
        is_tied = sum(first in op.weights for op in used) > 1
        if name == first:
            return TAIL if is_tied else EMBEDDINGS
        parts = name.split(".")
        if name in last and parts[-2] == "lm_head":
            return TAIL
        is_norm = len(parts) == 3 and ("norm" in parts[1] or parts[1] == "ln_f")
        # accelerate looks for it in the module called `base_model_prefix`. In peft's model, which has a module `model`
        # of its own, it finds the norm only if that is another name (fsdp_utils.py, _find_final_norm).
        is_hidden = parts[0] == "model" and any(".lora_" in other for other in self.elements)
        return TAIL if is_norm and not is_hidden else ROOT

    def _held_bytes(self, name: str) -> int:
        """Trained weights are in fp32 (fsdp2_prepare_model)."""
        return FP32_BYTES if name in self.trains else self.weights.frozen_each or FP32_BYTES

    def hold(self, ledger: Ledger) -> None:
        ledger.take(PARAMETERS, sum(size * self._held_bytes(name) for name, size in self.pieces.items()))
        self.hold_states(ledger, [piece(tensor.shape, self.ranks) for tensor in self.stepped])

    def before_module(self, ledger: Ledger, module: str) -> None:
        """Entering a layer gathers its weights; leaving it frees them. The root module's are gathered first."""
        key = self.group_of[self.modules[module][0]]
        if ledger.phase == "backward":
            self._enter_backward(ledger, key)
            return
        if not self.now and ROOT in self.groups:
            self._gather(ledger, ROOT)
        if key != self.now and self.now and not self.groups[self.now].stays:
            self._release(ledger, self.now)
        self.now = key
        self._gather(ledger, key)

    def _gather(self, ledger: Ledger, key: str) -> None:
        """All-gathers into one flat tensor, and copies the weights out of it. The tensor is freed only after the next
        gather's weights are copied out: until then a variable holds it (wait_for_unshard, prev_all_gather_state)."""
        group = self.groups[key]
        if not group.is_here:
            self._ask(ledger, key)
            ledger.take(GATHERED, group.elements * self.size, "gather")
            group.is_here, group.is_coming = True, False
            self._drop_late(ledger, GATHERED)
            self.late[GATHERED] = group.elements * self.size

    def _ask(self, ledger: Ledger, key: str) -> None:
        group = self.groups[key]
        if group.is_here or group.is_coming:
            return
        group.is_coming = True
        own = group.cast // self.ranks * self.size
        ledger.take(TEMPORARY, own)
        ledger.take(GATHERED, group.elements * self.size, "gather")
        ledger.give(TEMPORARY, own)

    def _release(self, ledger: Ledger, key: str) -> None:
        if self.groups[key].is_here:
            ledger.give(GATHERED, self.groups[key].elements * self.size)
            self.groups[key].is_here = False

    def after_forward(self, ledger: Ledger) -> None:
        """The forward pass, including the loss, is over; the root module's hook runs first in the backward pass."""
        if self.now and not self.groups[self.now].stays:
            self._release(ledger, self.now)
        self._drop_late(ledger, GATHERED)
        self.now = ""
        for group in self.groups.values():
            group.is_reduced = False

    def _enter_backward(self, ledger: Ledger, key: str) -> None:
        if not self.now and ROOT in self.groups:
            self._ask_before(ledger, ROOT)
        if key == self.now:
            return
        if self.now and not self.groups[self.now].waits:
            self._reduce(ledger, self.now)
        self.now = key
        if key == ROOT:
            return
        self._gather(ledger, key)
        self._drop_late(ledger, GATHERED)
        self._ask_before(ledger, key)

    def _ask_before(self, ledger: Ledger, key: str) -> None:
        """Prefetches the group that ran before it in the forward pass (_backward_prefetch)."""
        if index := self.order.index(key):
            self._ask(ledger, self.order[index - 1])

    def _reduce(self, ledger: Ledger, key: str) -> None:
        """post_backward: only the last micro-batch of a step (`no_sync`) concatenates and reduces gradients; each rank
        keeps its shard. The concatenated buffer lives until the next group's."""
        group = self.groups[key]
        group.is_reduced = True
        self._release(ledger, key)
        names = [name for name in group.names if name in self.kept]
        if not self.is_boundary:
            return
        self._drop_late(ledger, BUCKETS)
        if not names:
            return
        self.late[BUCKETS] = group.trained * self.size
        ledger.take(BUCKETS, self.late[BUCKETS], "reduce-scatter")
        for name in names:
            self.drop(ledger, name)
        part = group.trained // self.ranks
        ledger.take(GRADIENTS, part * self.size, "reduce-scatter")
        if self.size < FP32_BYTES:
            ledger.take(GRADIENTS, part * FP32_BYTES, "reduce-scatter")
            ledger.give(GRADIENTS, part * self.size)

    def end(self, ledger: Ledger) -> None:
        """Groups that wait are reduced last, the root's first among them (_root_post_backward_final_callback)."""
        for key in sorted(self.groups, key=lambda key: key != ROOT):
            if not self.groups[key].is_reduced:
                self._reduce(ledger, key)
        for group in self.groups.values():  # prefetched and never used
            if group.is_coming:
                ledger.give(GATHERED, group.elements * self.size)
                group.is_coming = False
        self._drop_late(ledger, BUCKETS)
        self.now = ""

    def _drop_late(self, ledger: Ledger, kind: str) -> None:
        if size := self.late.pop(kind, 0):
            ledger.give(kind, size)
