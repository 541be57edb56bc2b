"""The nine collectives: messages in which every rank takes part. Who holds what before, and who after?

    torchrun --nproc_per_node 4 recipes/basics/collectives.py

The problem. Training on N processes needs the same few patterns of messages again and again: "all get the weights",
"add up all gradients". Each has a name. All ranks must call it, with the same shapes and in the same order. If one rank
does not, or calls another collective, the others wait forever.

How to read the pictures. Rank r starts with the numbers 1 2 3 4 times 10^r, so each number shows what it is made of:
the position of a digit says which rank it came from, and the digit says which of the four chunks it is.

    rank 0 |    1    2    3    4 |         20     the second chunk of rank 1
    rank 1 |   10   20   30   40 |       1111     the sum of all first chunks
    rank 2 |  100  200  300  400 |       4004     the fourth chunks of ranks 3 and 0; ranks 1 and 2 are missing
    rank 3 | 1000 2000 3000 4000 |

Where they are used (S bytes, N ranks; the least each rank sends, arXiv 1910.02054 section 7, ring_all_reduce.py):

    broadcast        DDP's weights at the start              S at the source, or forwarded
    reduce           metrics for rank 0                      S
    all-reduce       DDP's gradients                         2 S (N-1)/N
    gather           predictions for rank 0                  S (rank 0 receives S (N-1))
    all-gather       the weights of ZeRO-1, -2, -3 and FSDP  S (N-1)/N, for a result of S bytes
    scatter          rank 0 distributes the data             S (N-1)/N at the source
    reduce-scatter   the gradients of ZeRO and FSDP          S (N-1)/N
    all-to-all       tokens to their experts (MoE), Ulysses  S (N-1)/N
    barrier          "nobody continues until all are here"   nothing, only waiting

Two rules, checked at the end:  all-reduce = reduce, then broadcast = reduce-scatter, then all-gather
The second is how libraries do it fast, and ZeRO puts its work between the two halves (zero1_by_hand.py).

All nine run on NCCL, and on gloo (CPU) with torch 2.13; older releases lack reduce-scatter or all-to-all on gloo.
Try: op=dist.ReduceOp.MAX; another src; leave out one rank's call and see who hangs (Ctrl-C ends it).
"""

import os
import sys
import time

import torch
import torch.distributed as dist

START = "torchrun --nproc_per_node 4 recipes/basics/collectives.py"
if os.environ.get("WORLD_SIZE") != "4":
    if speaks := os.environ.get("RANK", "0") == "0":
        print(f"error: the pictures are drawn for 4 ranks. Start it with: {START}", file=sys.stderr)
    sys.exit(2 if speaks else 0)  # if another rank failed first, torchrun would end rank 0 before it prints
GPUS = torch.cuda.device_count() >= 4  # a GPU for each rank: NCCL; otherwise gloo on the CPU
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
if GPUS:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if GPUS else "gloo")
RANK = dist.get_rank()


def numbers() -> torch.Tensor:
    """(4,): what this rank starts with; callers take [:1], (1,), where one number is enough."""
    return torch.tensor([1, 2, 3, 4], device=DEVICE) * 10**RANK


def show(title: str, before: torch.Tensor | None, after: torch.Tensor | None, expected: list[list[int] | None]) -> None:
    """Rank 0 prints what every rank held before and after; each rank checks its own row."""
    held = [None if tensor is None else tensor.tolist() for tensor in (before, after)]
    rows: list | None = [None] * 4 if RANK == 0 else None
    dist.gather_object(held, rows)
    if rows is not None:
        print(f"\n{title}")
        for rank, (then, now) in enumerate(rows):
            cells = (" ".join(f"{number:>4}" for number in numbers or []).center(21) for numbers in (then, now))
            print(f"   rank {rank} |" + "|  ->  |".join(cells) + "|")
    assert held[1] == expected[RANK], f"rank {RANK} holds {held[1]}, expected {expected[RANK]}"


def one_to_all_and_back() -> None:
    x = numbers()
    dist.broadcast(x, src=0)
    show("broadcast: everybody gets what rank 0 has", numbers(), x, [[1, 2, 3, 4]] * 4)

    parts = list(numbers().chunk(4)) if RANK == 0 else None  # only the source has data to distribute
    part = torch.empty_like(numbers()[:1])
    dist.scatter(part, parts, src=0)
    show("scatter: rank 0 deals out its chunks", numbers() if RANK == 0 else None, part, [[1], [2], [3], [4]])

    collected = [torch.empty_like(numbers()[:1]) for _ in range(4)] if RANK == 0 else None
    dist.gather(numbers()[:1], collected, dst=0)
    after = torch.cat(collected) if collected else None
    show("gather: rank 0 gets what everybody has", numbers()[:1], after, [[1, 10, 100, 1000], None, None, None])

    x = numbers()
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    after = x if RANK == 0 else None  # the others' x is undefined; gloo leaves partial sums in it
    show("reduce: rank 0 gets the sum", numbers(), after, [[1111, 2222, 3333, 4444], None, None, None])


def all_to_everybody() -> None:
    collected = [torch.empty_like(numbers()[:1]) for _ in range(4)]
    dist.all_gather(collected, numbers()[:1])
    show("all-gather: everybody gets what everybody has", numbers()[:1], torch.cat(collected), [[1, 10, 100, 1000]] * 4)

    x = numbers()
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    show("all-reduce: everybody gets the sum", numbers(), x, [[1111, 2222, 3333, 4444]] * 4)

    part = torch.empty_like(numbers()[:1])
    dist.reduce_scatter(part, list(numbers().chunk(4)), op=dist.ReduceOp.SUM)
    show("reduce-scatter: rank r gets chunk r of the sum", numbers(), part, [[1111], [2222], [3333], [4444]])

    received = torch.empty_like(numbers())
    dist.all_to_all_single(received, numbers())
    columns = [[1, 10, 100, 1000], [2, 20, 200, 2000], [3, 30, 300, 3000], [4, 40, 400, 4000]]
    show("all-to-all: rank r gets chunk r of everybody; the table is turned over", numbers(), received, columns)


def barrier() -> None:
    """Rank r arrives r x 80 ms late. All ranks of this page share the machine's clock."""
    dist.barrier()
    start = time.monotonic()
    time.sleep(0.08 * RANK)
    came = time.monotonic()
    dist.barrier()
    times: list = [time.monotonic()] * 4
    dist.all_gather_object(times, (start, came, times[0]))
    zero = min(begun for begun, _, _ in times)
    if RANK == 0:
        print("\nbarrier: nobody leaves before the last has come (= working, . waiting, > on it goes; a sign is 10 ms)")
        for rank, (_, arrival, departure) in enumerate(times):
            work, wait = round((arrival - zero) * 100), round((departure - arrival) * 100)
            print(f"   rank {rank} {'=' * work}{'.' * wait}>")
    assert min(departure for _, _, departure in times) >= max(arrival for _, arrival, _ in times)


def the_two_rules() -> None:
    whole = numbers()
    dist.all_reduce(whole)
    by_rank_0 = numbers()
    dist.reduce(by_rank_0, dst=0)
    dist.broadcast(by_rank_0, src=0)
    part, parts = torch.empty_like(numbers()[:1]), [torch.empty_like(numbers()[:1]) for _ in range(4)]
    dist.reduce_scatter(part, list(numbers().chunk(4)))
    dist.all_gather(parts, part)
    assert torch.equal(whole, by_rank_0)
    assert torch.equal(whole, torch.cat(parts))
    if RANK == 0:
        print("\nChecked: all-reduce = reduce, then broadcast = reduce-scatter, then all-gather.")


if __name__ == "__main__":
    for chapter in (one_to_all_and_back, all_to_everybody, barrier, the_two_rules):
        chapter()
    dist.destroy_process_group()
