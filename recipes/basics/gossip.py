"""Gossip: each rank averages only with its two neighbors, and yet all ranks come to agree.

    torchrun --nproc_per_node 4 recipes/basics/gossip.py

The problem. A ring all-reduce takes 2 (N - 1) consecutive rounds of messages (ring_all_reduce.py), and the slowest link
sets the pace. Decentralized training has one round: average your weights with those of your neighbors.

            rank 0 ---- rank 1          new x1 = (x0 + x1 + x2) / 3
              |           |
            rank 3 ---- rank 2          x1 never meets x3: x3's knowledge arrives through x0 and x2

Consensus. One round multiplies by the matrix of these thirds. On a ring its eigenvalues are (1 + 2 cos(2 pi k / N)) / 3
for k = 0 .. N - 1. For k = 0 it is 1: the mean stays. The difference from the mean shrinks in every round, at least by
the largest of the others: rho = 1/3 for 4 ranks, but 0.99 for 32, so a large ring takes many rounds to agree.

Training (D-PSGD, Lian et al., arXiv 1705.09056): gossip, and step along your own gradient.

    x_i  <-  (x_(i-1) + x_i + x_(i+1)) / 3  -  rate * gradient of your data at x_i

Gradients pull the ranks apart, and gossip pulls them together. The lower the rate, the closer they get; here it falls
to 0. Each rank has different digits (with 4 ranks: 0-2, 2-4, 5-7, 7-9), so alone none can learn them all.

To try: a constant rate (the ranks disagree forever); weights 1/4, 1/2, 1/4, whose rho is 1/2; 3 processes (rho is 0).
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

STEPS, BATCH, LEARNING_RATE, ROUNDS = 120, 32, 0.4, 8
sent = {"messages": 0, "bytes": 0}  # by this rank, in gossip
keep = torch.clone  # no averaging


def gossip(mine: torch.Tensor) -> torch.Tensor:
    """The mean over this rank and its two neighbors on the ring, (n,): one round of messages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    from_left, from_right = torch.empty_like(mine), torch.empty_like(mine)
    sends = [dist.isend(mine, left, tag=1), dist.isend(mine, right, tag=2)]
    for request in [*sends, dist.irecv(from_left, left, tag=2), dist.irecv(from_right, right, tag=1)]:
        request.wait()
    sent.update(messages=sent["messages"] + 2, bytes=sent["bytes"] + 2 * mine.nbytes)
    return (from_left + mine + from_right) / 3


def all_reduce(mine: torch.Tensor) -> torch.Tensor:
    mean = mine / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def distance(mine: torch.Tensor) -> float:
    """How far apart the ranks are, sqrt(mean |x_i - mean x|^2): for the page only, not part of the method."""
    return all_reduce((mine - all_reduce(mine)).square().sum()).sqrt().item()


def train(mix_weights: Callable, mix_gradients: Callable) -> dict:
    """One run: mean loss and distance of the ranks in each step; each rank's final accuracy."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]  # (1797, 64) from 0 to 1, (1797,); 397 for the test
    mine = labels[:1400].argsort(stable=True).tensor_split(dist.get_world_size())[dist.get_rank()]  # rows, by digit
    draw = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()  # (n,)
    losses, distances = torch.zeros(STEPS), []
    for step in range(STEPS):
        rows = mine[torch.randint(len(mine), (BATCH,), generator=draw)]
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])  # (n,)
        weights = mix_weights(weights) - LEARNING_RATE * (1 - step / STEPS) * mix_gradients(gradient)
        nn.utils.vector_to_parameters(weights, model.parameters())
        losses[step] = nn.functional.cross_entropy(model(images[:1400]), labels[:1400]).item()  # on all digits
        distances.append(distance(weights))
    right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    dist.all_gather_object(accuracies := [0.0] * dist.get_world_size(), 100 * right)
    return {"losses": all_reduce(losses), "distances": distances, "accuracies": accuracies}


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) < 3:  # with two ranks both neighbors would be the same rank
        if speaks := os.environ.get("RANK", "0") == "0":
            print("error: start it with: torchrun --nproc_per_node 4 recipes/basics/gossip.py", file=sys.stderr)
        sys.exit(2 if speaks else 0)  # if another rank failed first, torchrun would end rank 0 before it prints
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("runs/basics/gossip.png"))
    output = parser.parse_args().output
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_: None
    rho = max(abs(1 + 2 * math.cos(2 * math.pi * k / ranks)) / 3 for k in range(1, ranks))
    say(f"1. Gossip on random vectors: in each round the distance must shrink to {rho:.3f} of it, or less")
    mine = torch.randn(1000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    mean, apart = all_reduce(mine), [distance(mine)]
    for _ in range(ROUNDS):
        mine = gossip(mine)
        apart.append(distance(mine))
        assert apart[-1] <= rho * apart[-2] + 1e-12, f"the distance went from {apart[-2]} to {apart[-1]}"
    say("  ", *(f"{each:.1e}" for each in apart))
    assert (all_reduce(mine) - mean).abs().max() < 1e-12, "the mean of all has moved"

    say(f"\n2. Training for {STEPS} steps, each rank with digits of its own")
    sent.update(messages=0, bytes=0)
    results = {"all-reduce": train(keep, all_reduce), "gossip": train(gossip, keep), "alone": train(keep, keep)}
    for name, row in results.items():
        percent = " ".join(f"{each:.1f}%" for each in row["accuracies"])
        apart = ", ".join(f"{row['distances'][step]:.3f} (step {step})" for step in (0, STEPS // 2, STEPS - 1))
        say(f"   {name:10} loss {row['losses'][-1]:.3f}; accuracy by rank {percent}\n{'':14}distance {apart}")
    whole, gossiped, lonely = results.values()
    assert max(whole["distances"]) < 1e-5, "an all-reduce left the ranks with different weights"
    assert gossiped["distances"][-1] < max(gossiped["distances"]) / 20, "the ranks do not agree in the end"
    assert min(gossiped["accuracies"]) > min(whole["accuracies"]) - 2, "gossip learns less than all-reduce"
    assert max(lonely["accuracies"]) < min(gossiped["accuracies"]) - 20, "alone is as good"
    say("\n3. What a rank sends in a step")
    messages, size, rounds = sent["messages"] // STEPS, sent["bytes"] // STEPS, 2 * (ranks - 1)
    assert (messages, size) == (2, 2 * 4 * (64 * 64 + 64 + 64 * 10 + 10)), "not all weights to both neighbours"
    say(f"   gossip:          {messages} messages in 1 round,  {size:9,} bytes (counted): 1 round at any N")
    size = rounds / ranks * size / 2
    say(f"   ring all-reduce: {rounds} messages in {rounds} rounds, {size:9,.0f} bytes (2 (N - 1) / N of the weights)")
    if rank == 0:
        draw(results, output)
    dist.destroy_process_group()


def draw(results: dict, output: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left = figure.add_subplot(1, 2, 1, xlabel="step", ylabel="training loss, mean over ranks", yscale="log")
    right = figure.add_subplot(1, 2, 2, xlabel="step", ylabel="distance between ranks (all-reduce: 0)", yscale="log")
    for name, row in results.items():
        left.plot(row["losses"], label=name)
        right.plot(row["distances"])  # a logarithmic axis does not show 0
    left.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
