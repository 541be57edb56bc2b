"""PowerSGD: a gradient is nearly the product of two thin matrices, and thin matrices can be all-reduced.

    torchrun --nproc_per_node 2 recipes/basics/powersgd.py

The problem. The messages of gradient_compression.py cannot be summed: every rank must read those of all others. Low
rank does better. A layer's gradient G is a matrix (rows, columns). Keep its r strongest directions:

            columns                 r             columns
          +---------+             +---+         +---------+
     rows |    G    |   about     | P |    x    |   Q^T   | r         bytes: 4 r (rows + columns), not 4 rows columns
          +---------+             +---+         +---------+

An SVD costs too much. One iteration of the power method, started from the previous step's Q, is close, since gradients
change slowly. And a product with G is linear in G, so the ranks' products can be summed:

    P = sum over ranks of G Q       (an all-reduce of P)          then make the columns of P orthonormal
    Q = mean over ranks of G^T P    (an all-reduce of Q)          and P Q^T is the gradient on all ranks

Source: Vogels et al., arXiv 1905.13727, with error feedback (see gradient_compression.py).
Below: one matrix by hand, then torch's hook, which DistributedDataParallel calls instead of its all-reduce.

To try: r = 8; layers of 32 instead of 128 (how much less is there to gain?); a learning rate of 0.3.
"""

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, LEARNING_RATE = 250, 32, 0.2
WHOLE_FIRST = 2  # steps that send whole gradients: DDP rebuilds its buckets after the first, and the hook needs 2
LINK = 100e6 / 8  # bytes a second of a 100 Mbit/s network


def by_hand(g: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From this rank's g (rows, columns) and the previous q (columns, r): p (rows, r) and q, the same on all ranks."""
    p = g @ q
    dist.all_reduce(p)  # a sum is enough: only the directions of p are used
    p, _ = torch.linalg.qr(p)
    q = g.T @ p
    dist.all_reduce(q)
    return p, q / dist.get_world_size()


def train(r: int, feedback: bool, images: torch.Tensor, labels: torch.Tensor) -> dict:
    """One run with DistributedDataParallel; r = 0 means its own all-reduce, without the hook."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    if r:  # in the group of all ranks (None)
        state = PowerSGDState(None, r, start_powerSGD_iter=WHOLE_FIRST, use_error_feedback=feedback)
        model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    draw, seconds = torch.Generator().manual_seed(rank), []  # different images on each rank
    for _ in range(STEPS):
        began = time.perf_counter()
        rows = torch.randint(1400 // ranks, (BATCH,), generator=draw) * ranks + rank
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)

    shapes = [parameter.shape for parameter in model.parameters()]
    numbers = whole = sum(math.prod(shape) for shape in shapes)
    if r:  # torch counts what it sends: P, Q, and the biases, which are not compressed
        thin = sum(min(r, *shape) * sum(shape) if len(shape) == 2 else math.prod(shape) for shape in shapes)
        assert state.compression_stats()[2] == (STEPS - WHOLE_FIRST) * thin, "it sent other than r (rows + columns)"
        numbers = (WHOLE_FIRST * whole + (STEPS - WHOLE_FIRST) * thin) / STEPS
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.module(images[:1400]), labels[:1400]).item()
        accuracy = 100 * (model.module(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    sizes = {"bytes a step": 4 * numbers, "ms, 100 Mbit/s": 1e3 * 4 * numbers / LINK}
    return {**sizes, "ms here": 1e3 * statistics.median(seconds), "loss": loss, "accuracy, %": accuracy}


def main() -> None:
    if "RANK" not in os.environ:
        print("error: start it with: torchrun --nproc_per_node 2 recipes/basics/powersgd.py", file=sys.stderr)
        sys.exit(2)
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("runs/basics/powersgd.png"))
    output = parser.parse_args().output
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None

    say("1. By hand: one 60 x 40 matrix on each rank, r = 4. How far P Q^T is from the mean, relatively:")
    # Few strong directions and many weak ones, like a gradient; the ranks differ a little.
    g = torch.randn(60, 40, generator=torch.Generator().manual_seed(0)) * 0.7 ** torch.arange(40)
    g += 0.01 * torch.randn(60, 40, generator=torch.Generator().manual_seed(1 + rank))
    mean = g / ranks
    dist.all_reduce(mean)
    best = torch.linalg.svdvals(mean)[4:].norm() / mean.norm()  # no matrix of rank 4 is closer
    q = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))  # the same on every rank
    errors = []
    for _ in range(5):
        p, q = by_hand(g, q)
        errors.append(((mean - p @ q.T).norm() / mean.norm()).item())
    say("   after each turn:", *(f"{error:.3f}" for error in errors), f" the best there is, by SVD: {best:.3f}")
    assert best - 1e-5 <= errors[-1] < 1.02 * best < errors[0], "the turns do not come close to the best"

    say(f"\n2. torch's hook, {STEPS} steps on digits:")
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]  # (1797, 64) from 0 to 1, (1797,); 397 for the test
    results = {"uncompressed": train(0, False, images, labels)}
    for r in (1, 2, 4):
        results[f"r = {r} + feedback"] = train(r, True, images, labels)
    results["r = 2 alone"] = train(2, False, images, labels)
    plain = results["uncompressed"]
    say(" " * 18, *(f"{title:>14}" for title in plain))
    for name, row in results.items():
        say(f"   {name:15}", *(f"{row[key]:14,.{3 if key == 'loss' else 1}f}" for key in row))
        behind = row["accuracy, %"] < plain["accuracy, %"] - 2
        assert behind == ("alone" in name), f"{name}: {row['accuracy, %']:.1f}% against {plain['accuracy, %']:.1f}%"
    if rank == 0:
        draw(results, output)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still run, and Python's normal exit may abort because of them (pytorch PR 179291)


def draw(results: dict, output: Path) -> None:
    figure = Figure(figsize=(11, 3), layout="constrained")
    colours = ["tab:red" if "alone" in name else "tab:blue" if "feedback" in name else "tab:gray" for name in results]
    for place, (key, look) in enumerate({"bytes a step": ",.0f", "loss": ".3f", "accuracy, %": ".1f"}.items()):
        axis = figure.add_subplot(1, 3, place + 1, xlabel=key, xscale="log" if place < 2 else "linear", xmargin=0.4)
        bars = axis.barh(list(results), [row[key] for row in results.values()], color=colours)
        axis.bar_label(bars, fmt=f"{{:{look}}}", padding=3)
        axis.invert_yaxis()
        axis.tick_params(labelleft=place == 0)  # names only once
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
