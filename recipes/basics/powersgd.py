"""PowerSGD: a gradient is nearly a thin matrix times another one, and thin matrices can be all-reduced.

    torchrun --nproc_per_node 2 recipes/basics/powersgd.py

The problem. The messages of gradient_compression.py do not add up: every rank must read those of all others. Low rank
does better. A layer's gradient G is a matrix (rows, columns). Keep its r strongest directions:

            columns                 r             columns
          +---------+             +---+         +---------+
     rows |    G    |   about     | P |    x    |   Q^T   | r         bytes: 4 r (rows + columns), not 4 rows columns
          +---------+             +---+         +---------+

A full SVD costs too much. One turn of the power method, begun at the Q of the step before, is close enough, since
gradients change slowly. And a matrix product is linear in G, so the mean over ranks is the product of means:

    P = mean over ranks of G Q      (an all-reduce of P)          then make the columns of P orthonormal
    Q = mean over ranks of G^T P    (an all-reduce of Q)          and P Q^T is the gradient for everyone

Source: Vogels et al., arXiv 1905.13727, algorithm 1; error feedback (see gradient_compression.py) in algorithm 2.
Below, first by hand on one matrix, then torch's hook, which DistributedDataParallel calls in place of its all-reduce.

To try: rank 1 and 8; use_error_feedback=False; a smaller HIDDEN, and how the bytes fall more slowly.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, LEARNING_RATE, HIDDEN = 400, 32, 0.1, 256
WHOLE_FIRST = (
    2  # steps that send whole gradients: DDP lays out its buckets anew after the first, and the hook wants >= 2
)
LINK = 100e6 / 8  # bytes a second of a 100 Mbit/s network


def by_hand(g: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From this rank's g (rows, columns) and the last q (columns, r): p (rows, r) and q, the same on all ranks."""
    p = g @ q
    dist.all_reduce(p)  # a sum serves: only the directions of p are used
    p, _ = torch.linalg.qr(p)
    q = g.T @ p
    dist.all_reduce(q)
    return p, q / dist.get_world_size()


def train(rank_of_powersgd: int | None, feedback: bool, digits: list[torch.Tensor]) -> dict:
    """A run through DistributedDataParallel, with the hook or without it."""
    images, labels, test_images, test_labels = digits
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    state = None
    if rank_of_powersgd:
        state = PowerSGDState(
            process_group=None,  # all ranks
            matrix_approximation_rank=rank_of_powersgd,
            start_powerSGD_iter=WHOLE_FIRST,
            use_error_feedback=feedback,
        )
        model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    draw = torch.Generator().manual_seed(rank)  # images of its own for each rank
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        rows = torch.randint(len(images) // ranks, (BATCH,), generator=draw) * ranks + rank
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)

    n = sum(parameter.numel() for parameter in model.parameters())
    numbers = STEPS * n
    if state:
        numbers = WHOLE_FIRST * n + state.compression_stats()[2]  # torch counts what it sends of P, Q and biases
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        thin = sum(
            min(rank_of_powersgd, *shape) * sum(shape) if len(shape) == 2 else shape[0] for shape in shapes
        )  # a bias is sent whole
        assert numbers == WHOLE_FIRST * n + (STEPS - WHOLE_FIRST) * thin, "it sent other than r (rows + columns)"
    sent = 2 * (ranks - 1) / ranks * 4 * numbers / STEPS  # bytes that go round the ring of an all-reduce, a step
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.module(images), labels).item()
        accuracy = (model.module(test_images).argmax(1) == test_labels).float().mean().item() * 100
    ms = statistics.median(seconds) * 1e3
    return {"bytes": sent, "ms": ms, "slow ms": ms + sent / LINK * 1e3, "loss": loss, "accuracy": accuracy}


def main() -> None:
    if "RANK" not in os.environ:
        print("start it with: torchrun --nproc_per_node 2 recipes/basics/powersgd.py", file=sys.stderr)
        sys.exit(2)
    parser = argparse.ArgumentParser(description="PowerSGD by hand and as torch's hook, on handwritten digits.")
    parser.add_argument("--output", type=Path, default=Path("runs/basics/powersgd.png"))
    output = parser.parse_args().output
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None

    say("1. By hand: one 60 x 40 matrix on each rank, r = 4. How far P Q^T is from the mean (the best possible: SVD)")
    own = torch.Generator().manual_seed(rank)
    strengths = 0.7 ** torch.arange(40)  # few strong directions, many weak ones, as gradients have
    g = torch.randn(60, 40, generator=torch.Generator().manual_seed(99)) * strengths  # (rows, columns)
    g = g + 0.01 * torch.randn(60, 40, generator=own)
    mean = g.clone()
    dist.all_reduce(mean)
    mean /= ranks
    best = torch.linalg.svdvals(mean)[4:].norm() / mean.norm()
    q = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))  # the same on every rank
    errors = []
    for _ in range(5):
        p, q = by_hand(g, q)
        errors.append(((mean - p @ q.T).norm() / mean.norm()).item())
    say("   after each turn:", *(f"{error:.3f}" for error in errors), f" best: {best:.3f}")
    assert best - 1e-6 <= errors[-1] < 1.02 * best < errors[0], "the turns do not come close to the best"

    say(f"\n2. torch's hook: {STEPS} steps on digits")
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]  # (1797, 64) from 0 to 1, (1797,)
    digits = [images[:1400], labels[:1400], images[1400:], labels[1400:]]
    results = {"uncompressed": train(None, False, digits)}
    for r in (1, 2, 4):
        results[f"r = {r}, feedback"] = train(r, True, digits)
    results["r = 2 alone"] = train(2, False, digits)
    plain = results["uncompressed"]
    say(f"   {'':15} {'bytes/step':>10} {'smaller':>8} {'ms here':>8} {'ms, slow net':>13} {'loss':>6} {'accuracy':>9}")
    for name, row in results.items():
        say(f"   {name:15} {row['bytes']:10,.0f} {plain['bytes'] / row['bytes']:7.1f}x {row['ms']:8.1f}", end=" ")
        say(f"{row['slow ms']:13.1f} {row['loss']:6.3f} {row['accuracy']:8.1f}%")
        if "feedback" in name:
            assert row["accuracy"] > plain["accuracy"] - 2, f"{name} learns less than uncompressed"
    assert results["r = 2 alone"]["accuracy"] < plain["accuracy"] - 2, "it needs no feedback"
    say("   (slow net: the time here, and that of the bytes at 100 Mbit/s)")
    say("\nTwo directions of each layer's gradient serve, if what they miss is kept and added to the next one.")
    if rank == 0:
        draw(results, output)
    dist.destroy_process_group()


def draw(results: dict, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3), sharey=True, layout="constrained")
    names = list(results)[::-1]  # barh begins at the bottom
    colours = ["tab:red" if "alone" in name else "tab:blue" if "feedback" in name else "tab:gray" for name in names]
    titles = (
        ("bytes", "bytes a rank sends in a step"),
        ("slow ms", "ms a step at 100 Mbit/s"),
        ("accuracy", "accuracy, %"),
    )
    for axis, (key, title) in zip(axes, titles, strict=True):
        bars = axis.barh(names, [results[name][key] for name in names], color=colours)
        axis.bar_label(bars, fmt="{:,.0f}" if key == "bytes" else "{:.1f}", padding=3)
        axis.set_xlabel(title)
        axis.margins(x=0.25)
    figure.suptitle(f"PowerSGD: handwritten digits, {dist.get_world_size()} ranks, {STEPS} steps")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
