"""Model parallelism, the simplest kind: a model too large for one device is cut into stages, one stage on each rank.

    torchrun --nproc_per_node 2 recipes/basics/model_parallelism.py

The problem. Data parallelism keeps the whole model on every rank. A model that does not fit there must be cut. Cut it
between layers; activations travel forward, and their gradients travel back:

    rank 0: layers 0-3                              rank 1: layers 4-7
    x --> [ forward ]  ------- hidden (B, W) -----> [ forward ] --> loss
          [ backward ] <---- d loss / d hidden ---- [ backward ]

Why this is exact. Call the halves f and g: loss = g(f(x)). The chain rule splits at the same place:

    d loss / d weights of f   =   d loss / d hidden   times   d hidden / d weights of f
                                  (rank 1 sends it)           (rank 0: hidden.backward(what it received))

So rank 0 needs one tensor from rank 1, with the shape of `hidden`. Autograd stops at process borders: the receiver
makes the activation a leaf (`requires_grad_()`), and sends that leaf's `.grad` back.

The price. The stages wait for each other: only one of P ranks works at a time, so (P - 1) / P of the machine is idle.
The memory is divided, the work is not. pipeline_by_hand.py fixes that. Source: GPipe, arXiv 1811.06965.
To try: 4 processes (how much is idle?); send `received.grad * 2` back, and see which rank's gradients are wrong.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH, BATCH, STEPS, LEARNING_RATE = 8, 32, 16, 20, 0.01


def main() -> None:
    if "RANK" not in os.environ:
        print("error: start it with: torchrun --nproc_per_node 2 recipes/basics/model_parallelism.py", file=sys.stderr)
        sys.exit(2)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # every rank builds the same layers, and keeps its stage
    layers = whole_model()
    first, last = rank * LAYERS // ranks, (rank + 1) * LAYERS // ranks
    stage = layers[first:last]
    inputs = torch.randn(BATCH, WIDTH)  # the same batch in every step
    targets = inputs.sin()

    say(f"1. {LAYERS} layers in {ranks} stages. Who holds what:")
    held, whole = (sum(each.nbytes for each in module.parameters()) for module in (stage, layers))
    say_each(f"   rank {rank}: layers {first}-{last - 1}, {held:,} of {whole:,} bytes")

    optimizer = torch.optim.Adam(stage.parameters(), LEARNING_RATE)
    losses, events = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, events = forward_and_backward(stage, inputs, targets)
        losses.append(loss)
        optimizer.step()  # each rank updates its own layers; no further exchange

    say("\n2. Who worked when in the last step (F forward, B backward, . waits):")
    order = sorted(event for of_rank in gather(events) for event in of_rank)  # by time; all ranks here share one clock
    row = "".join(name if who == rank else " ." for _, who, name in order)
    say_each(f"   rank {rank}: {row}")
    idle = row.count(".") / len(order)
    say(f"   each rank waits {idle:.0%} of the slots: (P - 1) / P with P = {ranks}")
    assert [who for _, who, _ in order] == [*range(ranks), *reversed(range(ranks))], "not down and up again"
    assert abs(idle - (ranks - 1) / ranks) < 1e-9

    say(f"\n3. The same {STEPS} steps in one process, and the largest differences from it:")
    expected_losses, expected = train_in_one_process(inputs, targets)
    pairs = list(zip(stage.parameters(), expected[first:last].parameters(), strict=True))
    gradients = max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs)
    weights = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    say_each(f"   rank {rank}: in the last step's gradients {gradients:.0e}, in the weights after it {weights:.0e}")
    assert max(gradients, weights) < 1e-6, f"rank {rank} does not compute what one process computes"

    losses = gather(losses)[-1]  # only the last stage has them
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, expected_losses, strict=True))
    say(f"   in the losses {difference:.0e}; they fall from {losses[0]:.4f} to {losses[-1]:.4f}")
    assert difference < 1e-6, "the losses are not those of one process"
    assert losses[-1] < losses[0], "it does not learn"
    say("\nThe stages train exactly as one process does, but only one works at a time.")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still run, and Python's normal exit may abort because of them (pytorch PR 179291)


def forward_and_backward(stage: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, list]:
    """One step of this rank's stage: the loss (0.0 except on the last rank), and when this rank did what."""
    rank, last_rank = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        received = inputs  # (B, W)
    else:
        received = torch.empty(BATCH, WIDTH)
        dist.recv(received, rank - 1)
        received.requires_grad_()  # a leaf: backward() will leave d loss / d received in its .grad

    events = [(time.monotonic(), rank, " F")]
    hidden = stage(received)  # (B, W)
    if rank < last_rank:
        dist.send(hidden.detach(), rank + 1)
        gradient = torch.empty(BATCH, WIDTH)  # d loss / d hidden, from the rank that used it
        dist.recv(gradient, rank + 1)
        events.append((time.monotonic(), rank, " B"))
        hidden.backward(gradient)
        loss = torch.zeros(())
    else:
        events.append((time.monotonic(), rank, " B"))
        loss = nn.functional.mse_loss(hidden, targets)
        loss.backward()
    if rank > 0:
        dist.send(received.grad, rank - 1)
    return loss.item(), events


def train_in_one_process(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], nn.Sequential]:
    torch.manual_seed(0)
    layers = whole_model()
    optimizer, losses = torch.optim.Adam(layers.parameters(), LEARNING_RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layers(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, layers


def whole_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def gather(mine: list) -> list[list]:
    everyone: list = [None] * dist.get_world_size()  # the list of each rank
    dist.all_gather_object(everyone, mine)
    return everyone


def say(*lines: str) -> None:
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def say_each(line: str) -> None:
    say(*(of_rank[0] for of_rank in gather([line])))  # in rank order


if __name__ == "__main__":
    main()
