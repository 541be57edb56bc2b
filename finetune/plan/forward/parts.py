"""Building blocks of forward passes: the batch, stacks of like layers, activations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from finetune.plan.families.parts import IMAGES, SEQ2SEQ, Sizes
from finetune.plan.tape import Tape
from finetune.plan.values import Segment, Value

RNG_STATE_BYTES = 5056  # torch.get_rng_state(), which checkpoint saves; a GPU generator's is 16 bytes on the host
LONGEST_PERIOD = 24  # layers in a repeating pattern of windows or recomputation


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank: `rows` samples of `tokens`, or images of `image_size` pixels square. `targets`: tokens
    per sample of a decoder behind an encoder; None: as many. `sharing`: ranks that share each sample, whose tokens here
    are this rank's. `load`: a job's `expert_load`. `documents`: those in a sample do not attend to one another."""

    rows: int
    tokens: int = 1
    image_size: int = 224
    targets: int | None = None
    sharing: int = 1
    load: float = 1.0
    documents: bool = False

    @property
    def positions(self) -> int:
        return self.rows * self.tokens


def terms(head: str, batch: Batch) -> tuple[int, ...]:
    """What sizes are sums of, each with a coefficient."""
    rows, tokens = batch.rows, batch.tokens
    each: tuple[int, ...] = (1,) if head == IMAGES else (1, tokens, tokens**2)
    if head == SEQ2SEQ:
        out = batch.targets or tokens
        each = (*each, out, out**2, tokens * out)
    return (*each, *(rows * one for one in each))


@dataclass(frozen=True)
class Part:
    """A pipeline stage: entries `first` to `last`, exclusive, of the flat list of layers. GPT-lite's are token
    embedding, position embedding, each block, final norm, head (finetune/models/gptlite_pipeline.py)."""

    first: int
    last: int


@dataclass(frozen=True)
class Setting:
    """The inputs of a recorded forward pass. Every `checkpoint_interval`-th layer is recomputed; 0: none."""

    tape: Tape
    sizes: Sizes
    batch: Batch
    family: str = ""
    head: str = ""
    checkpoint_interval: int = 0
    loss_chunk_tokens: int = 0

    def recomputes(self, layer: int) -> bool:
        """transformers, modeling_utils.py, _set_gradient_checkpointing: the first layer, and each k-th from there."""
        return bool(self.checkpoint_interval) and layer % self.checkpoint_interval == 0


def stack(
    setting: Setting,
    x: Value,
    layers: range,
    name: Callable[[int], str],
    block: Callable[[int, Value], Value],
    held: tuple[Value, ...] = (),
) -> Value:
    """`layers` in sequence, each a segment; `name` is its module's. All are alike, so the middle ones are not recorded
    again: they are the same operators under other names. `held`: further inputs of each layer."""
    tape = setting.tape
    keys = [setting.recomputes(layer) for layer in layers]
    first, period, repeats = pattern(keys)
    repeated = layers[first + period : first + repeats * period]
    begin = len(tape.segments)
    for place, layer in enumerate(layers):
        if layer in repeated:
            at = begin + first + (place - first) % period
            tape.segments.append(renamed(tape.segments[at], at, name(layers[at - begin]), name(layer), layer))
            continue
        again = setting.recomputes(layer)
        state = (tape.given(RNG_STATE_BYTES, 1),) if again and tape.numbers.device == "cpu" else ()
        with tape.segment(name(layer), x, *held, *state, layer=layer, recomputed=again):
            x = block(layer, x)
    return x


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


def renamed(segment: Segment, at: int, old: str, new: str, layer: int) -> Segment:
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
    return replace(segment, name=new, ops=ops, layer=layer, like=at)


def gelu_new(tape: Tape, x: Value) -> Value:
    """transformers.activations.NewGELUActivation, operator by operator."""
    halved = tape.scale(x)
    inner = tape.add(x, tape.scale(tape.power(x)))
    bent = tape.unary("tanh", tape.scale(inner))
    out = tape.multiply(halved, tape.shift(bent))
    tape.hold(x)
    return out


def activation(tape: Tape, name: str, x: Value) -> Value:
    if name in ("gelu_new", "gelu_fast"):
        return gelu_new(tape, x)
    if name == "quick_gelu":
        return tape.multiply(x, tape.unary("sigmoid", tape.scale(x)))
    return tape.unary(name, x)
