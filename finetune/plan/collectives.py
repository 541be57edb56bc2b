"""Collectives in seconds: each step of a ring or tree costs a latency (alpha) plus bytes / bandwidth (beta).

    group = Group(ranks=16, ranks_per_node=8)
    all_reduce(machine, 1 << 30, group)

Rings: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005,
sections 4.1 to 4.5; in NCCL's terms (nccl-tests, doc/PERFORMANCE.md, "bus bandwidth") an all-reduce of n bytes over N
ranks takes 2 (N - 1) / N x n / busbw. Latencies over several nodes, and the tree: NCCL 2.x, src/graph/tuning.cc.
Sizes are bytes of the whole tensor: the output of an all-gather, the input of a reduce-scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune.plan.machine import Machine


@dataclass(frozen=True)
class Group:
    """`ranks` that communicate, `ranks_per_node` of them on each node."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    def bandwidth(self, machine: Machine) -> float:
        """The bus of a ring. Across nodes it enters and leaves each node through the network cards of all its ranks:
        NCCL builds one ring per card (so 2 nodes of 8 x 50 GB/s have a bus of 370 GB/s, not 50)."""
        within = machine.intra_node.bandwidth_bytes_per_second
        between = machine.inter_node.bandwidth_bytes_per_second * min(self.ranks_per_node, self.ranks)
        if self.nodes == 1:
            return within
        return between if self.ranks_per_node == 1 else min(within, between)

    def latency(self, machine: Machine, within: int, between: int) -> float:
        """Of steps within a node, and between nodes."""
        return within * machine.intra_node.latency_seconds + between * machine.inter_node.latency_seconds


def all_gather(machine: Machine, size: float, group: Group) -> float:
    """A ring: N - 1 steps, (N - 1) / N of the bytes. A reduce-scatter takes as long."""
    steps = group.ranks - 1
    if not steps or not size:
        return 0.0
    latency = group.latency(machine, steps - (group.nodes - 1), group.nodes - 1)
    return steps / group.ranks * size / group.bandwidth(machine) + latency


reduce_scatter = all_gather


def all_to_all(machine: Machine, size: float, group: Group) -> float:
    """Every rank sends a different N-th of its `size` bytes to each other, pair by pair (nccl-tests, PERFORMANCE.md:
    (N - 1) / N of the bytes cross each rank's bus). What leaves the node goes through the rank's own network card,
    while the rest crosses the links of the node."""
    if group.ranks < 2 or not size:
        return 0.0
    near = min(group.ranks_per_node, group.ranks)
    parts = (machine.intra_node, near - 1), (machine.inter_node, group.ranks - near)
    return max(
        (peers / group.ranks * size / link.bandwidth_bytes_per_second + peers * link.latency_seconds)
        for link, peers in parts
        if peers
    )


def all_reduce(machine: Machine, size: float, group: Group) -> float:
    """The faster of ring and double binary tree, as NCCL chooses. Ring: a reduce-scatter and an all-gather. Tree: up
    and down, all bytes cross the bus twice, but few steps between nodes."""
    if group.ranks < 2 or not size:
        return 0.0
    near, far = min(group.ranks_per_node, group.ranks) - 1, math.ceil(math.log2(group.nodes))
    tree = size / group.bandwidth(machine) + group.latency(machine, near, far)
    return 2 * min(all_gather(machine, size, group), tree)


def p2p(machine: Machine, size: float, within_node: bool = True) -> float:
    """From one rank to another."""
    link = machine.intra_node if within_node else machine.inter_node
    return link.latency_seconds + size / link.bandwidth_bytes_per_second if size else 0.0
