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

from finetune.plan.machine import Link, Machine


@dataclass(frozen=True)
class Group:
    """`ranks` that communicate, `ranks_per_node` of them on each node."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)


def all_reduce(machine: Machine, size: float, group: Group, half: bool = False) -> float:
    """The faster of ring and double binary tree, as NCCL chooses. Ring: 2 (N - 1) steps, 2 (N - 1) / N of the bytes.
    Tree: up and down, all bytes cross the bus twice, but few steps between nodes. `half`: sums in bf16 or fp16, which
    gloo does element by element."""
    count = group.ranks
    if count < 2 or not size:
        return 0.0
    kind = "all_reduce_half" if half and "all_reduce_half" in machine.collectives else "all_reduce"
    link = _link(machine, kind, group)
    ring = 2 * (count - 1) / count * size / link.bandwidth_bytes_per_second
    ring += _latency(machine, link, group, 2 * (count - 1), 2 * group.nodes)
    if kind in machine.collectives and group.nodes == 1:
        return ring  # measured, whatever the algorithm
    within = min(group.ranks_per_node, count) - 1
    steps = within * machine.intra_node.latency_seconds
    steps += math.ceil(math.log2(group.nodes)) * machine.inter_node.latency_seconds if group.nodes > 1 else 0.0
    tree = 2 * size / link.bandwidth_bytes_per_second + 2 * steps
    return min(ring, tree)


def reduce_scatter(machine: Machine, size: float, group: Group, half: bool = False) -> float:
    """N - 1 steps, (N - 1) / N of the bytes; `half` as in `all_reduce`."""
    kind = "reduce_scatter_half" if half and "reduce_scatter_half" in machine.collectives else "reduce_scatter"
    return _half_ring(machine, kind, size, group)


def all_gather(machine: Machine, size: float, group: Group) -> float:
    """N - 1 steps, (N - 1) / N of the bytes."""
    return _half_ring(machine, "all_gather", size, group)


def all_to_all(machine: Machine, size: float, group: Group) -> float:
    """Each rank keeps 1 / N of its `size` bytes and sends the rest, pairwise. Pieces for other nodes share one link."""
    count = group.ranks
    if count < 2 or not size:
        return 0.0
    near = min(group.ranks_per_node, count) - 1
    far = count - 1 - near
    piece = size / count
    seconds = near * (piece / machine.intra_node.bandwidth_bytes_per_second + machine.intra_node.latency_seconds)
    return (
        seconds
        + far * piece / machine.inter_node.bandwidth_bytes_per_second
        + bool(far) * (machine.inter_node.latency_seconds * group.nodes)
    )


def p2p(machine: Machine, size: float, within_node: bool = True) -> float:
    """From one rank to another."""
    link = machine.collectives.get("p2p", machine.intra_node) if within_node else machine.inter_node
    return link.latency_seconds + size / link.bandwidth_bytes_per_second if size else 0.0


def _half_ring(machine: Machine, kind: str, size: float, group: Group) -> float:
    count = group.ranks
    if count < 2 or not size:
        return 0.0
    link = _link(machine, kind, group)
    seconds = (count - 1) / count * size / link.bandwidth_bytes_per_second
    return seconds + _latency(machine, link, group, count - 1, group.nodes - 1)


def _link(machine: Machine, kind: str, group: Group) -> Link:
    """The bus of a ring. Across nodes it enters and leaves each node through the network cards of all its ranks: NCCL
    builds one ring per card (so 2 nodes of 8 x 50 GB/s have a bus of 370 GB/s, not 50)."""
    within = machine.collectives.get(kind, machine.intra_node)
    if group.nodes == 1:
        return within
    between = machine.inter_node.bandwidth_bytes_per_second * min(group.ranks_per_node, group.ranks)
    bandwidth = between if group.ranks_per_node == 1 else min(within.bandwidth_bytes_per_second, between)
    return Link(bandwidth, within.latency_seconds)


def _latency(machine: Machine, link: Link, group: Group, steps: int, between_nodes: int) -> float:
    """tuning.cc: of `steps`, those between nodes cost more. A single node has none of them."""
    if group.nodes == 1:
        return steps * link.latency_seconds
    between = min(between_nodes, steps)
    return (steps - between) * link.latency_seconds + between * machine.inter_node.latency_seconds
