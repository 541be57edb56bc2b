"""ZeRO-1 and -2 by hand: what a rank holds of a model of four tensors, before, in and after a step."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.plan.engines.resident import BUCKETS, GRADIENTS, MASTERS, PARAMETERS, STATES, Weights
from finetune.plan.engines.zero12 import Bf16Stage, Stage, Zero12
from finetune.plan.model import Tensor
from finetune.plan.optimizers import Optimizer
from finetune.plan.program import TEMPORARY
from finetune.plan.step import Ledger
from finetune.plan.zero import Zero

# Matrices of 40 and 16 elements, and vectors of 6 and 2: groups of 56 and 8, of which each of two ranks has half. The
# first rank owns pieces of a and b, the second pieces of a and b, and c and d.
TENSORS = (Tensor("a", (10, 4)), Tensor("b", (6,)), Tensor("c", (4, 4)), Tensor("d", (2,)))
PART, WHOLE = 28 + 4, 56 + 8
OWNED = {0: 40 + 6, 1: 40 + 6 + 16 + 2}


def layout(kind: Any = Zero12, rank: int = 0, bytes_each: int = 2, **zero: Any) -> tuple[Any, Ledger, Ledger]:
    device, host = Ledger(), Ledger()
    made = kind(Weights(TENSORS, bytes_each), Zero(**{"stage": 2, **zero}), Optimizer("adam"), 2, rank, host)
    return made, device, host


def micro_batch(made: Any, device: Ledger, first: bool = True, last: bool = True) -> None:
    """Backward, from the last tensor to the first."""
    device.phase = "backward"
    made.begin(first, last)
    for tensor in reversed(TENSORS):
        device.take(TEMPORARY, tensor.elements * made.size)
        made.gradient(device, tensor.name)
    made.end(device)
    assert device.live[TEMPORARY] == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bytes_each", [2, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_after_a_micro_batch_a_rank_holds_the_gradients_of_what_it_owns(stage: int, bytes_each: int, rank: int) -> None:
    made, device, _ = layout(rank=rank, bytes_each=bytes_each, stage=stage, reduce_bucket_size=1000)
    micro_batch(made, device)
    assert device.live[GRADIENTS] == OWNED[rank] * bytes_each
    assert device.live[BUCKETS] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_that_are_added_up_in_fp32_are_of_the_part_alone(rank: int) -> None:
    made, device, _ = layout(rank=rank, accumulates_in_fp32=True)
    micro_batch(made, device)
    assert device.live[GRADIENTS] == PART * 4


def test_zero_2_adds_a_later_micro_batch_to_the_one_before_and_zero_1_keeps_all_until_the_last() -> None:
    for stage, between in ((2, OWNED[0] * 2), (1, WHOLE * 2)):
        made, device, _ = layout(stage=stage)
        for first, last in ((True, False), (False, False)):
            micro_batch(made, device, first, last)
            assert device.live[GRADIENTS] == between
        micro_batch(made, device, False, True)
        assert device.live[GRADIENTS] == OWNED[0] * 2


def test_without_contiguous_gradients_a_rank_keeps_what_it_owns_as_it_came() -> None:
    made, device, _ = layout(rank=0, contiguous_gradients=False)
    micro_batch(made, device)
    assert device.live[GRADIENTS] == OWNED[0] * 2
    assert device.live[BUCKETS] == 0


@pytest.mark.parametrize(("overlaps", "many"), [(False, 1), (True, 2)])
def test_reduce_buckets_are_there_during_the_backward_pass(overlaps: bool, many: int) -> None:
    made, device, _ = layout(overlap_comm=overlaps, reduce_bucket_size=1000, reduce_scatter=False)
    micro_batch(made, device)
    assert device.peaks["backward"].by_kind[BUCKETS] == many * 1000 * 2
    joined, device, _ = layout(overlap_comm=overlaps, reduce_bucket_size=1000)
    micro_batch(joined, device)
    # And for a while the filled one once more, in one piece: all 64 elements.
    assert device.peaks["backward"].by_kind[BUCKETS] == (many * 1000 + WHOLE) * 2


def test_a_bucket_is_reduced_before_it_would_run_over() -> None:
    """Of 22 elements: d and c together (18), then b (6 more would be 24), then a, which is larger than any bucket."""
    made, device, _ = layout(rank=0, reduce_bucket_size=22, stage=2)
    device.phase = "backward"
    made.begin(True, True)
    held = []
    for tensor in reversed(TENSORS):
        device.take(TEMPORARY, tensor.elements * 2)
        made.gradient(device, tensor.name)
        held.append((made.filled, device.live.get(GRADIENTS, 0)))
    # d and c lie in the bucket, and are another rank's: nothing is held of them. b comes into the second bucket, and a
    # into none: of the bucket before it b is copied out, into a tensor for all that is owned; a is there as it came.
    assert held == [(2, 0), (18, 0), (6, 0), (40, OWNED[0] * 2 + 40 * 2)]
    made.end(device)
    assert device.live[GRADIENTS] == OWNED[0] * 2


def test_between_steps_a_rank_holds_its_part_of_the_states() -> None:
    made, device, host = layout()
    made.hold(device)
    states = 2 * 4 * PART + 2 * 4  # two moments, and for each of two groups a counter of steps
    assert device.live == {PARAMETERS: WHOLE * 2, MASTERS: PART * 4, STATES: states}
    assert host.live == {}


def test_offloaded_states_are_on_the_host_with_their_gradients_and_copies() -> None:
    made, device, host = layout(offload_optimizer="cpu")
    made.hold(device)
    assert device.live == {PARAMETERS: WHOLE * 2, BUCKETS: 40 * 2}
    assert host.live == {MASTERS: PART * 4, STATES: 8 * PART + 8, GRADIENTS: PART * 4, BUCKETS: (PART + 40) * 2}
    micro_batch(made, device)
    assert device.live.get(GRADIENTS, 0) == 0, "they have gone to the host"


@pytest.mark.parametrize(("bytes_each", "most"), [(2, 46 * 2 + 28 * 2 + 28 * 4), (4, 46 * 4 + 28 * 4)])
def test_the_step_joins_the_gradients_group_by_group_and_leaves_none(bytes_each: int, most: int) -> None:
    made, device, _ = layout(bytes_each=bytes_each)
    micro_batch(made, device)
    made.step(device)
    assert device.peaks["optimizer"].by_kind[GRADIENTS] == most
    assert device.live[GRADIENTS] == 0
    assert made.kept == set()


def test_a_pipeline_has_one_reduce_bucket_too_many_in_its_last_micro_batch() -> None:
    plain, stage = (layout(kind, stage=1, reduce_bucket_size=1000, reduce_scatter=False) for kind in (Zero12, Stage))
    for made, device, _ in (plain, stage):
        micro_batch(made, device)
        assert device.live[BUCKETS] == 0
    assert plain[1].peaks["backward"].by_kind[BUCKETS] == 2000
    assert stage[1].peaks["backward"].by_kind[BUCKETS] == 4000


def test_bf16_with_fp32_accumulation_holds_an_fp32_gradient_of_every_weight() -> None:
    made, device, _ = layout(Bf16Stage, stage=1, accumulates_in_fp32=True)
    made.hold(device)
    assert device.live[GRADIENTS] == WHOLE * 4
    assert device.live[PARAMETERS] == WHOLE * 2
    assert device.live[MASTERS] == PART * 4
    micro_batch(made, device)
    assert device.live[GRADIENTS] == WHOLE * 4 + WHOLE * 2
    assert device.peaks["backward"].by_kind[BUCKETS] == WHOLE * (4 + 2)
    made.step(device)
    assert device.live[GRADIENTS] == WHOLE * 4
