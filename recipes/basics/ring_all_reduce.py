"""Ring all-reduce by hand: sum a tensor over N ranks so that no rank sends more than the others.

    torchrun --nproc_per_node 4 recipes/basics/ring_all_reduce.py

The problem. Every rank has a gradient of S bytes and needs the sum. The naive way: rank 0 collects all, adds, and sends
the result back. It receives (N-1) S bytes and sends (N-1) S bytes while the others wait. Twice the ranks take twice
the time.

The picture. Cut the tensor into N chunks. Every rank sends only to its right-hand neighbor, and all send at once:

    rank 0 --> rank 1 --> rank 2 --> rank 3 --+      reduce-scatter, N-1 steps: send a chunk right, add the one from
       ^--------------------------------------+      the left to your own. Then each rank has one chunk of the sum.
                                                     all-gather, N-1 steps: pass the finished chunks around.

The page prints these steps. Rank r starts with 10^r in each chunk, so each digit 1 stands for one rank's share: 0110 is
the sum of ranks 1 and 2; 1111 is finished. Follow one chunk from rank to rank: it grows by one digit at each step.

The formula. In each of the 2(N-1) steps a rank sends one chunk, S/N bytes:

    bytes sent by a rank = 2 (N-1)/N S      less than 2 S for any number of ranks

No algorithm with messages between ranks lets its busiest rank send less (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69, 2009). The price is 2(N-1)
consecutive steps, each with its latency. Many small tensors are therefore slow, so DDP puts them into buckets
(ddp_by_hand.py).

A chunk is summed once and then copied, so all ranks end with the same bits: replicas cannot drift apart.
Try: 2 and 3 ranks; your own entry in SIZES; send to the left instead; print time against size.
"""

import os
import sys

import torch
import torch.distributed as dist

SIZES = (1_000_000, 1_000_003, 10, 3)  # elements: divisible by 4, not divisible, few, fewer than ranks

if "RANK" not in os.environ:
    print("error: start it with: torchrun --nproc_per_node 4 recipes/basics/ring_all_reduce.py", file=sys.stderr)
    sys.exit(2)
GPUS = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank: NCCL; otherwise gloo
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
if GPUS:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if GPUS else "gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
RIGHT, LEFT = (RANK + 1) % WORLD, (RANK - 1) % WORLD


def exchange(give: torch.Tensor, take: torch.Tensor) -> int:
    """Send `give` to the right and receive `take` from the left at the same time, or all hang (point_to_point.py)."""
    both = [dist.P2POp(dist.isend, give, RIGHT), dist.P2POp(dist.irecv, take, LEFT)]
    for handle in dist.batch_isend_irecv(both):
        handle.wait()
    return give.nbytes


def ring_all_reduce(x: torch.Tensor, after_each_step: list[list[int]] | None = None) -> int:
    """Sum x, (n,), over all ranks, in place. Returns the bytes that this rank sent."""
    chunks = x.tensor_split(WORLD)  # N views of x; sizes differ by at most one element, some are empty if n < N
    sent = 0
    for step in range(WORLD - 1):  # reduce-scatter
        give, mine = chunks[(RANK - step) % WORLD], chunks[(RANK - step - 1) % WORLD]
        arrived = torch.empty_like(mine)
        sent += exchange(give, arrived)
        mine += arrived
        if after_each_step is not None:
            after_each_step.append(x.tolist())
    for step in range(WORLD - 1):  # all-gather: chunk RANK + 1 is finished here
        give, take = chunks[(RANK + 1 - step) % WORLD], chunks[(RANK - step) % WORLD]
        sent += exchange(give, take)
        if after_each_step is not None:
            after_each_step.append(x.tolist())
    return sent


def naive_all_reduce(x: torch.Tensor) -> int:
    """The same sum through rank 0, for comparison."""
    if RANK != 0:
        dist.send(x, dst=0)
        dist.recv(x, src=0)
        return x.nbytes
    arrived = torch.empty_like(x)
    for other in range(1, WORLD):
        dist.recv(arrived, src=other)
        x += arrived
    for other in range(1, WORLD):
        dist.send(x, dst=other)
    return (WORLD - 1) * x.nbytes


def from_all(value: object) -> list:
    """The value of each rank, in rank order."""
    values = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def draw_the_steps() -> None:
    x = torch.full((WORLD,), 10**RANK, device=DEVICE)  # one element per chunk
    states = [x.tolist()]
    ring_all_reduce(x, states)
    steps = range(1, WORLD)
    names = ["start", *(f"reduce-scatter {step}" for step in steps), *(f"all-gather {step}" for step in steps)]
    everybody = from_all(states)
    if RANK == 0:
        wide = (WORLD + 1) * WORLD - 1
        print(" " * 19 + " | ".join(f"rank {rank}".center(wide) for rank in range(WORLD)))
        for step, name in enumerate(names):
            rows = (" ".join(f"{value:0{WORLD}}" for value in states[step]) for states in everybody)
            print(f"{name:<19}" + " | ".join(rows))
    assert x.tolist() == [sum(10**rank for rank in range(WORLD))] * WORLD


def compare(size: int) -> None:
    torch.manual_seed(RANK)
    gradient = torch.randn(size).to(DEVICE)  # (size,) different on each rank
    by_torch, by_ring, by_rank_0 = gradient.clone(), gradient.clone(), gradient.clone()
    dist.all_reduce(by_torch)
    ring, naive = from_all(ring_all_reduce(by_ring)), from_all(naive_all_reduce(by_rank_0))
    torch.testing.assert_close(by_ring, by_torch, rtol=1e-5, atol=1e-5)  # added in another order, so not the same bits
    torch.testing.assert_close(by_rank_0, by_torch, rtol=1e-5, atol=1e-5)

    of_rank_0 = by_ring.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(of_rank_0, by_ring), "all ranks hold the same bits"

    total = gradient.nbytes  # S
    bound = 2 * (WORLD - 1) / WORLD * total
    if RANK == 0:
        print(f"\n{size:,} elements, S = {total:,} bytes a rank. Bytes sent by each rank, and by the busiest:")
        for name, sent in (("through rank 0", naive), ("ring", ring)):
            print(f"   {name:<15}" + "".join(f"{value:>12,}" for value in sent) + f"   busiest {max(sent):>12,}")
        print(f"   {'2(N-1)/N S':<15}" + " " * 12 * WORLD + f"   bound   {bound:>12,.0f}")
    assert sum(ring) == 2 * (WORLD - 1) * total, "on average exactly the bound"
    uneven = 0 if size % WORLD == 0 else 2 * gradient.element_size()  # one element in each half of the work
    assert max(ring) <= bound + uneven
    assert max(naive) == (WORLD - 1) * total


if __name__ == "__main__":
    draw_the_steps()
    for elements in SIZES:
        compare(elements)
    if RANK == 0:
        print(f"\nThe ring equals dist.all_reduce. Its busiest rank sends {WORLD / 2:g} times less than rank 0 above.")
    dist.destroy_process_group()
