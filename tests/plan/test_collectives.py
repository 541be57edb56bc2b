"""Collectives against their closed forms, worked out here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.plan import collectives
from finetune.plan.collectives import Group
from finetune.plan.machine import Link, find_machine

# A node with a bus of 100 B/s and 1 s a step; between nodes 20 B/s a rank and 10 s a step.
MACHINE = replace(find_machine("H100"), intra_node=Link(100.0, 1.0), inter_node=Link(20.0, 10.0))
QUICK = replace(MACHINE, intra_node=Link(100.0, 0.0), inter_node=Link(20.0, 0.0))
KINDS = (
    collectives.all_reduce,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.all_to_all,
)


@pytest.mark.parametrize(
    ("kind", "ranks", "share", "steps"),
    [
        (collectives.all_gather, 4, 3 / 4, 3),
        (collectives.reduce_scatter, 4, 3 / 4, 3),
        (collectives.all_gather, 8, 7 / 8, 7),
    ],
)
def test_within_a_node_a_ring_takes_its_steps_and_its_share_of_the_bytes(kind, ranks, share, steps) -> None:  # type: ignore[no-untyped-def]
    assert kind(MACHINE, 1000, Group(ranks, 8)) == pytest.approx(share * 1000 / 100 + steps * 1.0)


def test_an_all_reduce_of_many_bytes_is_a_ring_of_twice_the_share() -> None:
    """2 x 7 / 8 x 1e6 B / (100 B/s) + 14 steps; the tree would need 2 x 1e6 / 100."""
    assert collectives.all_reduce(MACHINE, 1e6, Group(8, 8)) == pytest.approx(17500 + 14)


def test_an_all_reduce_of_few_bytes_over_many_nodes_is_a_tree() -> None:
    """64 ranks on 8 nodes, 1 B: 2 x (7 steps within + log2(8) between) against a ring of 126 steps."""
    assert collectives.all_reduce(MACHINE, 1, Group(64, 8)) == pytest.approx(2 * (7 * 1 + 3 * 10) + 2 / 100)


def test_a_ring_over_nodes_goes_through_all_their_network_cards() -> None:
    """Two nodes of 2: the bus is min(100, 2 x 20). Of 3 steps 1 is between the nodes."""
    assert collectives.all_gather(MACHINE, 400, Group(4, 2)) == pytest.approx(3 / 4 * 400 / 40 + 2 * 1 + 1 * 10)


def test_one_rank_a_node_has_one_card() -> None:
    assert collectives.all_gather(QUICK, 400, Group(4, 1)) == pytest.approx(3 / 4 * 400 / 20)


def test_an_all_to_all_over_nodes_sends_through_each_ranks_own_card() -> None:
    """Of 8 ranks on 2 nodes, 3 peers are near and 4 far: half of the bytes leave the node at 20 B/s."""
    assert collectives.all_to_all(QUICK, 800, Group(8, 4)) == pytest.approx(400 / 20)
    assert collectives.all_to_all(MACHINE, 800, Group(8, 4)) == pytest.approx(400 / 20 + 4 * 10)
    assert collectives.all_to_all(MACHINE, 800, Group(4, 4)) == pytest.approx(600 / 100 + 3)


def test_neighbours_send_over_the_link_between_them() -> None:
    assert collectives.p2p(MACHINE, 400) == 1 + 4
    assert collectives.p2p(MACHINE, 400, within_node=False) == 10 + 20
    assert collectives.p2p(MACHINE, 0) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "ranks"), [(0, 8), (1000, 1)])
def test_nothing_to_send_or_nobody_to_send_to_takes_no_time(kind, size: int, ranks: int) -> None:  # type: ignore[no-untyped-def]
    assert kind(MACHINE, size, Group(ranks, 8)) == 0


@given(st.sampled_from(KINDS), st.integers(1, 10**9), st.integers(2, 4096), st.sampled_from([1, 2, 4, 8]))
def test_more_bytes_or_slower_links_are_never_quicker(kind, size: int, ranks: int, here: int) -> None:  # type: ignore[no-untyped-def]
    group = Group(ranks, here)
    seconds = kind(MACHINE, size, group)
    assert kind(MACHINE, size + 1000, group) >= seconds
    slower = replace(MACHINE, intra_node=Link(50.0, 2.0), inter_node=Link(10.0, 20.0))
    assert kind(slower, size, group) >= seconds
