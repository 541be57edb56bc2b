"""Point to point: how two processes communicate, how they can wait for each other forever, and three ways out.

    torchrun --nproc_per_node 4 recipes/basics/point_to_point.py

The problem. torchrun starts this file N times. Each of the N processes (a "rank", 0 to N-1) has its own memory: rank 1
cannot see a tensor of rank 0 until it is sent there. All of distributed training is built from such messages.

    blocking       send(x, dst)    returns when x may be overwritten        recv(x, src)    when x has been filled
    non-blocking   isend(x, dst)   returns at once, with a handle           irecv(x, src)   likewise
                   handle.wait()   waits until the message is through: only then overwrite x (isend) or read it (irecv)

The picture. Every rank passes a tensor to its right-hand neighbor, around a ring:

    rank 0 --> rank 1 --> rank 2 --> rank 3 --+
       ^--------------------------------------+

The obvious code, `send(to the right); recv(from the left)`, hangs: every send waits for a recv that comes after
another send. Such a cycle of waiting is a deadlock. It gives no error, only silence until a timeout (30 minutes with
gloo).

    rank 0 in send, waits for rank 1 in send, waits for rank 2 in send, waits for rank 3 in send, waits for rank 0 ...

The ways out: (a) break the cycle: even ranks send first, odd ranks receive first. (b) Do not wait while sending:
isend, recv, then wait. (c) Pass all messages as one batch, batch_isend_irecv, and let the library order them; pipelines
use this, and NCCL needs it. Whether a send waits for its recv depends on the transport (gloo: always, see its
gloo/transport/tcp/pair.cc; MPI: for large messages; the MPI standard, section 3.5, calls code unsafe that relies on a
send not waiting).

This page uses only the CPU: with NCCL the calls are the same, but a send only queues work, and the GPU would hang.
Try: 3 ranks (is way (a) still right?); `timeout` of 20 seconds below; all ranks receiving first.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

if "RANK" not in os.environ:
    print("error: start it with: torchrun --nproc_per_node 4 recipes/basics/point_to_point.py", file=sys.stderr)
    sys.exit(2)
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
RIGHT, LEFT = (RANK + 1) % WORLD, (RANK - 1) % WORLD


def show(title: str, *columns: object) -> None:
    """Rank 0 prints the columns of each rank, in rank order."""
    rows: list | None = [None] * WORLD if RANK == 0 else None
    dist.gather_object(columns, rows)
    if rows is not None:
        print(f"\n{title}")
        for rank, row in enumerate(rows):
            print(f"   rank {rank}  " + "  ".join(f"{cell!s:<28}" for cell in row).rstrip())


def blocking() -> None:
    """One message from rank 0 to rank 1. The receiver must know its size in advance."""
    box = torch.full((3,), RANK)  # (3,)
    before = box.tolist()
    if RANK == 0:
        dist.send(box, dst=1)
    elif RANK == 1:
        dist.recv(box, src=0)
    show("1. Blocking: rank 0 sends, rank 1 receives. Held before, and after:", before, box.tolist())
    assert box.tolist() == [0 if RANK == 1 else RANK] * 3


def non_blocking() -> None:
    """Ranks 0 and 1 swap. Both post a send, and both pass a barrier before either has received."""
    mine, theirs, did = torch.full((3,), RANK), torch.full((3,), -1), []
    if RANK < 2:
        handle = dist.isend(mine, dst=1 - RANK)
        did.append("isend")
    dist.barrier()  # with a blocking send no rank would get here, because every recv comes later
    did.append("other work")
    if RANK < 2:
        dist.recv(theirs, src=1 - RANK)
        handle.wait()  # from here on, `mine` may be overwritten
        did += ["recv", "wait"]
    received = f"received {theirs.tolist()}" if RANK < 2 else "has no part in it"
    show("2. Non-blocking: ranks 0 and 1 swap. What each did, in order:", ", ".join(did), received)
    assert theirs.tolist() == ([1 - RANK] * 3 if RANK < 2 else [-1] * 3)


def overwritten_too_early() -> None:
    """The price of isend: until wait() the memory belongs to the message."""
    box = torch.full((3,), 7 if RANK == 0 else -1)
    if RANK == 0:
        handle = dist.isend(box, dst=1)
        box.fill_(0)  # wrong: wait() comes first
    dist.barrier()
    if RANK == 1:
        dist.recv(box, src=0)
    if RANK == 0:
        handle.wait()
    story = ["sent [7, 7, 7], wrote 0 into it", f"received {box.tolist()}"][RANK] if RANK < 2 else "has no part in it"
    show("3. A mistake: rank 0 overwrites what it sends before wait(), and rank 1 gets something else:", story)
    assert RANK != 1 or box.tolist() != [7, 7, 7]


def deadlock() -> None:
    """All ranks send first. In a separate group, whose operations time out after a second, so the page continues."""
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    received = torch.full((3,), -1)
    try:
        dist.send(torch.full((3,), RANK), dst=RIGHT, group=impatient)
        dist.recv(received, src=LEFT, group=impatient)
        ended = "got through"
    except RuntimeError:
        ended = f"gave up: still in send to rank {RIGHT}"
    show("4. Deadlock: all ranks send to the right first, and would receive from the left then:", ended)
    assert ended.startswith("gave up")
    assert received.tolist() == [-1] * 3


def ways_out() -> None:
    """The same ring, three correct ways."""
    mine = torch.full((3,), RANK)
    even_odd, posted, batched = (torch.empty_like(mine) for _ in range(3))  # (3,) each: what came from the left

    if RANK % 2 == 0:  # (a)
        dist.send(mine, dst=RIGHT)
        dist.recv(even_odd, src=LEFT)
    else:
        dist.recv(even_odd, src=LEFT)
        dist.send(mine, dst=RIGHT)

    handle = dist.isend(mine, dst=RIGHT)  # (b)
    dist.recv(posted, src=LEFT)
    handle.wait()

    both = [dist.P2POp(dist.isend, mine, RIGHT), dist.P2POp(dist.irecv, batched, LEFT)]  # (c)
    for handle in dist.batch_isend_irecv(both):
        handle.wait()

    ways = [f"{way} {box.tolist()}" for way, box in (("even/odd", even_odd), ("isend", posted), ("batch", batched))]
    show("5. Three ways out: what each rank received from its left:", *ways)
    assert even_odd.tolist() == posted.tolist() == batched.tolist() == [LEFT] * 3


if __name__ == "__main__":
    for chapter in (blocking, non_blocking, overwritten_too_early, deadlock, ways_out):
        chapter()
    if RANK == 0:
        print("\nEvery tensor arrived where it should, and the deadlock was a real one.")
    dist.destroy_process_group()
