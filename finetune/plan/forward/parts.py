"""Building blocks of forward passes: the batch, and what layers repeat."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from finetune.plan.families.parts import IMAGES, SEQ2SEQ, Sizes
from finetune.plan.tape import Tape
from finetune.plan.values import Segment

RNG_STATE_BYTES = 5056  # torch.get_rng_state(), which checkpoint saves; a GPU generator's is 16 bytes on the host
LONGEST_PERIOD = 24  # layers in a repeating pattern of windows or recomputation


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank: `rows` samples of `tokens`, or images of `image_size` pixels square. `targets`: tokens
    per sample of a decoder behind an encoder; None: as many. `sharing`: ranks that share each sample, whose tokens here
    are this rank's. `load`: a job's `expert_load`. `documents`: those in a sample do not attend to one another.
    `drops`: with dropout, as in training."""

    rows: int
    tokens: int = 1
    image_size: int = 224
    targets: int | None = None
    sharing: int = 1
    load: float = 1.0
    documents: bool = False
    drops: bool = True

    @property
    def positions(self) -> int:
        return self.rows * self.tokens


def filled(batch: Batch, chunk: int) -> Batch:
    """With texts filled up to whole chunks of so many tokens."""
    whole = -(-batch.tokens // chunk) * chunk
    return replace(batch, tokens=whole, targets=batch.targets or batch.tokens)


def terms(head: str, batch: Batch) -> tuple[int, ...]:
    """What sizes are sums of, each with a coefficient."""
    rows, tokens = batch.rows, batch.tokens
    each: tuple[int, ...] = (1,) if head == IMAGES else (1, tokens, tokens**2)
    if head == SEQ2SEQ:
        out = batch.targets or tokens
        each = (*each, out, out**2, tokens * out)
    return (*each, *(rows * one for one in each))


@dataclass(frozen=True)
class Setting:
    """The inputs of a recorded forward pass. Every `checkpoint_interval`-th layer is recomputed; 0: none. `ahead`:
    layers that come before those of the forward pass in the model's list of modules, such as a tower's."""

    tape: Tape
    sizes: Sizes
    batch: Batch
    family: str = ""
    head: str = ""
    checkpoint_interval: int = 0
    loss_chunk_tokens: int = 0
    ahead: int = 0

    def recomputes(self, layer: int) -> bool:
        """transformers, modeling_utils.py, _set_gradient_checkpointing: the first layer, and each k-th from there."""
        return bool(self.checkpoint_interval) and (self.ahead + layer) % self.checkpoint_interval == 0


def pattern(keys: Sequence[Hashable]) -> tuple[int, int, int]:
    """The repeating pattern of layers: where it begins, its period, and how often it repeats. One period before and one
    after it are recorded as well, because the ends may differ; so are the first layers unlike all others."""
    for alone in range(len(keys)):
        rest = keys[alone:]
        for period in range(1, LONGEST_PERIOD):
            repeats = len(rest) // period - 2
            if repeats > 1 and rest[period:] == rest[:-period]:
                return alone + period, period, repeats
    return 0, 0, 1


def renamed(segment: Segment, at: int, old: str, new: str) -> Segment:
    """The segment at index `at` with the names of a like layer."""
    ops = [
        replace(
            op,
            module=op.module.replace(f"{old}.", f"{new}.", 1),
            weights=tuple(weight.replace(f"{old}.", f"{new}.", 1) for weight in op.weights),
        )
        if op.module or op.weights
        else op
        for op in segment.ops
    ]
    return replace(segment, name=new, ops=ops, like=at)
