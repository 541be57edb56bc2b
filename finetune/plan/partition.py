"""Where to cut a pipeline: assigns consecutive layers to stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from finetune.errors import RequestError


def balanced_bounds(
    seconds: Sequence[float],
    stages: int,
    *,
    parameters: Sequence[int] | None = None,
    state_bytes: Sequence[int] | None = None,
    activation_bytes: Sequence[int] | None = None,
    in_flight: Sequence[int] | None = None,
    limit_bytes: int | None = None,
) -> list[int]:
    """Stage s gets the layers from bound s to bound s + 1, at least one; `stages + 1` bounds.

    `seconds`: of each layer, forward and backward of one micro-batch. The slowest stage sets the pace of a pipeline, so
    its time is minimized. Among cuts of the same pace the one whose largest stage takes the least memory wins: weights
    and optimizer states (`state_bytes`) of its layers, and what they keep for each of the `in_flight[s]` micro-batches
    (`activation_bytes`). No stage takes more than `limit_bytes`, or is left without `parameters`, if these are given.

    Raises RequestError if there are fewer layers than stages, or if no cut stays within `limit_bytes`.
    """
    layers = len(seconds)
    if not 1 <= stages <= layers:
        raise RequestError(f"{stages} pipeline stages, but the model has {layers} layers: give 1 to {layers} stages.")
    time = [0.0, *accumulate(seconds)]
    state = [0, *accumulate(state_bytes or [0] * layers)]
    activation = [0, *accumulate(activation_bytes or [0] * layers)]
    flights = in_flight or [1] * stages

    def pace(stage: int, first: int, last: int) -> float:
        if parameters is not None and not sum(parameters[first:last]):
            return inf
        too_much = limit_bytes is not None and memory(stage, first, last) > limit_bytes
        return inf if too_much else time[last] - time[first]

    def memory(stage: int, first: int, last: int) -> float:
        return state[last] - state[first] + flights[stage] * (activation[last] - activation[first])

    slowest, _ = _least_worst(layers, stages, pace)
    if slowest == inf and limit_bytes is None:
        raise RequestError(f"{stages} pipeline stages, but too few layers have weights to train. Give fewer stages.")
    if slowest == inf:
        raise RequestError(
            f"no cut into {stages} stages stays within {(limit_bytes or 0) / 2**30:.2f} GiB per stage. Give more "
            "stages, or a smaller --per_device_train_batch_size, or --activation_checkpoint_interval 1 if it is not on."
        )
    quick_enough = slowest * (1 + 1e-9)  # floats may be summed in another order
    return _least_worst(layers, stages, lambda *cut: memory(*cut) if pace(*cut) <= quick_enough else inf)[1]


def _least_worst(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[float, list[int]]:
    """The cut whose worst stage costs least, and what that stage costs: `cost` is of (stage, first layer, layer after
    the last). Dynamic programming over stages and layers. The last stage grows from its end for as long as it costs no
    more than the best found, because with more layers it costs no less, except that a stage with too few may be
    impossible (inf). Of equally good cuts the first."""
    # worst[n]: the least cost of the worst of the stages so far over the first n layers; cuts[s][n]: the last bound.
    worst = [0.0] + [inf] * layers
    cuts = []
    for stage in range(stages):
        before, worst, cut = worst, [inf] * (layers + 1), [0] * (layers + 1)
        for last in range(stage + 1, layers + 1):
            was_possible = False
            for first in reversed(range(stage, last)):
                own = cost(stage, first, last)
                if own > worst[last] or (own == inf and was_possible):
                    break
                was_possible = own < inf
                if max(before[first], own) <= worst[last]:
                    worst[last], cut[last] = max(before[first], own), first
        cuts.append(cut)
    bounds = [layers]
    for cut in reversed(cuts):
        bounds.insert(0, cut[bounds[0]])
    return worst[layers], bounds
