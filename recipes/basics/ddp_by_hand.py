"""Data parallelism by hand: three steps from "average the gradients" to what torch's DDP does.

    torchrun --nproc_per_node 2 recipes/basics/ddp_by_hand.py

The problem. A batch is too large, or too slow, for one process. Give each of N ranks the same weights and an equal
share of the batch. The gradient of the whole batch's mean loss is the mean of the gradients of the shares' mean losses:

    grad(whole batch) = 1/N (grad(share 0) + ... + grad(share N-1))          an all-reduce and a division

All ranks then step with the same gradient from the same weights, so they stay equal, and equal to one process with the
whole batch. Without the all-reduce every rank trains a different model; the page shows that too.

The picture. Backward computes gradients from the last layer (W4, b4) to the first. When is message k sent (>k)?

    1 average     b4 W4 b3 W3 b2 W2 b1 W1 >1 >2 >3 >4 >5 >6 >7 >8 step    one message per tensor: 8 latencies
    2 buckets     b4 W4 b3 W3 b2 W2 b1 W1 >1 >2 step                      few large messages, but all at the end
    3 overlap     b4 W4 b3 W3 >1 b2 W2 b1 W1 >2 step                     sent while the backward pass continues

Step 3 is "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv 2006.15704, section 3.2): a
hook on each parameter runs when its gradient is ready; the last one of a bucket starts an asynchronous all-reduce.
All ranks must send buckets in the same order, or different buckets would be added; having the same model ensures that.
All three send the same bytes: 4 per parameter (fp32), times 2(N-1)/N in the ring (ring_all_reduce.py).
Why SGD and not Adam: a gradient that is N times too large would not change Adam's steps, and would go unnoticed.
Try: forget the division; BUCKET_BYTES = 1, or 10**6; shares of unequal size (why is the mean of means wrong then?).
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, WIDTH = 5, 24, 16  # 24 rows can be divided among 2, 3 or 4 ranks
BUCKET_BYTES = 2200  # holds two of the four layers; torch's buckets are 25 MiB

if os.environ.get("WORLD_SIZE") not in ("2", "3", "4"):
    if speaks := os.environ.get("RANK", "0") == "0":
        print("error: 2, 3 or 4 ranks: torchrun --nproc_per_node 2 recipes/basics/ddp_by_hand.py", file=sys.stderr)
    sys.exit(2 if speaks else 0)  # if another rank failed first, torchrun would end rank 0 before it prints
GPUS = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank: NCCL; otherwise gloo
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
if GPUS:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if GPUS else "gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
sent: list[int] = []  # bytes of each message of the last step
events: list[str] = []  # what happened in it, in order


def new_model() -> nn.Sequential:
    """Four layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(DEVICE)


def all_reduce(tensor: torch.Tensor) -> dist.Work:
    """Start to sum over all ranks, in place, and record it."""
    sent.append(tensor.nbytes)
    events.append(f">{len(sent)}")
    return dist.all_reduce(tensor, async_op=True)


def into_buckets(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters in the order of the backward pass, split where a bucket is full."""
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(list(model.parameters())):
        if buckets[-1] and sum(p.nbytes for p in buckets[-1]) + parameter.nbytes > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def send(bucket: list[nn.Parameter]) -> tuple[list[nn.Parameter], torch.Tensor, dist.Work]:
    flat = torch.cat([parameter.grad.flatten() for parameter in bucket])  # (elements of the bucket,)
    return bucket, flat, all_reduce(flat)


def receive(bucket: list[nn.Parameter], flat: torch.Tensor, work: dist.Work) -> None:
    work.wait()
    for parameter, mean in zip(bucket, (flat / WORLD).split([p.numel() for p in bucket]), strict=True):
        parameter.grad.copy_(mean.view_as(parameter))


def train(way: str) -> torch.Tensor:
    """The weights after STEPS steps, (parameters,)."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names = {p: f"{'Wb'[index % 2]}{index // 2 + 1}" for index, p in enumerate(model.parameters())}
    buckets, on_the_way, ready = into_buckets(model), [], set()
    bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket}

    def on_gradient(parameter: nn.Parameter) -> None:  # called during the backward pass
        events.append(names[parameter])
        ready.add(parameter)
        if way == "3 overlap" and ready.issuperset(bucket_of[parameter]):
            on_the_way.append(send(bucket_of[parameter]))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient)
    if way == "torch's DDP":
        model = DistributedDataParallel(model)

    torch.manual_seed(1)
    whole = torch.randn(2, BATCH, WIDTH).to(DEVICE)  # inputs and targets, the same on every rank
    mine = whole if way == "one process" else whole.chunk(WORLD, dim=1)[RANK]  # (2, BATCH / WORLD, WIDTH)
    for _ in range(STEPS):
        for notes in (sent, events, on_the_way, ready):
            notes.clear()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
        if way == "1 average":
            for parameter in model.parameters():
                all_reduce(parameter.grad).wait()
                parameter.grad /= WORLD
        if way == "2 buckets":
            on_the_way += [send(bucket) for bucket in buckets]
        for message in on_the_way:
            receive(*message)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    whole_batch, ddp = train("one process"), train("torch's DDP")
    for way in ("0 nothing", "1 average", "2 buckets", "3 overlap"):
        weights = train(way)
        of_rank_0 = weights.clone()
        dist.broadcast(of_rank_0, src=0)
        differences = torch.stack([(weights - other).abs().max() for other in (ddp, whole_batch, of_rank_0)])
        dist.all_reduce(differences, op=dist.ReduceOp.MAX)  # of the worst rank
        to_ddp, to_one_process, between_ranks = differences.tolist()
        if RANK == 0:
            print(f"{way:<12}{' '.join(events)} step")
            print(f"{'':<12}a step: {len(sent)} messages, {sum(sent):,} bytes; after {STEPS} steps the weights differ")
            differ = f"from DDP's by {to_ddp:.0e}, from one process's by {to_one_process:.0e}"
            print(f"{'':<12}{differ}, between ranks by {between_ranks:.0e}\n")
        if way == "0 nothing":
            assert between_ranks > 1e-3, "the ranks drifted apart"
        else:
            assert max(to_ddp, to_one_process) < 1e-6, differences
            assert (between_ranks, sum(sent)) == (0, 4 * weights.numel())
            assert len(sent) == (8 if way == "1 average" else 2)
            assert (events.index(">1") < events.index("b2")) == (way == "3 overlap"), "sent too early or late"
    if RANK == 0:
        print("All three equal torch's DDP and one process. With overlap the first message leaves in mid-backward.")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still run, and Python's normal exit may abort because of them (pytorch PR 179291)
