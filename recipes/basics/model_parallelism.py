"""Model parallelism, the simplest kind: a model too large for one device is cut into stages, one stage on each rank.

    torchrun --nproc_per_node 2 recipes/basics/model_parallelism.py

The problem. Data parallelism keeps the whole model on every rank. A model that does not fit there must be cut. Cut it
between layers, and let the activations travel forward and their gradients travel back:

    rank 0: layers 0-3                              rank 1: layers 4-7
    x --> [ forward ]  ------- hidden (B, W) -----> [ forward ] --> loss
          [ backward ] <---- d loss / d hidden ---- [ backward ]

Why this is exact. Call the halves f and g: loss = g(f(x)). The chain rule can be cut where the model is:

    d loss / d weights of f   =   d loss / d hidden   times   d hidden / d weights of f
                                  (rank 1 sends it)           (rank 0 alone: hidden.backward(what came))

So rank 0 needs one tensor from rank 1, in the shape of `hidden`: not the weights, not the loss. autograd does not see
through a network: the receiver makes the activation a leaf (`requires_grad_()`), and sends that leaf's `.grad` back.

The price. The stages wait for each other: of P ranks one works at a time, so (P - 1) / P of the machine idles. The
memory is shared out, the work is not. Source: Huang et al., GPipe, arXiv 1811.06965, figure 2 (b). Read on in
pipeline_by_hand.py, which mends it.

To try: 4 processes, and see the idle share; send `received.grad * 2` back, and see which rank's gradients are wrong;
leave out `requires_grad_()`, and read the error.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH, BATCH, STEPS, LEARNING_RATE = 8, 32, 16, 20, 0.1


def main() -> None:
    if "RANK" not in os.environ:
        print("start it with: torchrun --nproc_per_node 2 recipes/basics/model_parallelism.py", file=sys.stderr)
        sys.exit(2)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # The same seed everywhere. Every rank builds all layers and keeps its own; a model that truly does not fit would be
    # built stage by stage.
    torch.manual_seed(0)
    layers = whole_model()
    first, last = rank * LAYERS // ranks, (rank + 1) * LAYERS // ranks
    stage = layers[first:last]
    inputs = torch.randn(STEPS, BATCH, WIDTH)
    targets = inputs.sin()  # something that can be learnt

    say(f"1. {LAYERS} layers in {ranks} stages. Who holds what:")
    say_each(f"   rank {rank}: layers {first}-{last - 1}, {bytes_of(stage):,} of {bytes_of(layers):,} bytes")

    optimizer = torch.optim.SGD(stage.parameters(), LEARNING_RATE)
    losses, events = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, events = forward_and_backward(stage, inputs[step], targets[step])
        losses.append(loss)
        optimizer.step()  # each rank its own layers: nothing more to exchange

    say("\n2. Who worked when in the last step (F forward, B backward, . waits):")
    order = sorted(event for of_rank in gather(events) for event in of_rank)  # by the clock, which all ranks here share
    row = "".join(name if who == rank else " ." for _, who, name in order)
    say_each(f"   rank {rank}: {row}")
    idle = row.count(".") / len(order)
    say(f"   each rank waits {idle:.0%} of the slots: (P - 1) / P with P = {ranks}")
    forwards = [(who, " F") for who in range(ranks)]
    assert [(who, name) for _, who, name in order] == forwards + [(who, " B") for who, _ in reversed(forwards)]
    assert abs(idle - (ranks - 1) / ranks) < 1e-9

    say(f"\n3. The same {STEPS} steps in one process, and the largest differences from it:")
    expected_losses, expected = train_in_one_process(inputs, targets)
    pairs = list(zip(stage.parameters(), expected[first:last].parameters(), strict=True))
    gradients = max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs)
    weights = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    say_each(f"   rank {rank}: in the last step's gradients {gradients:.0e}, in the weights after it {weights:.0e}")
    assert max(gradients, weights) < 1e-6, f"rank {rank} does not compute what one process computes"

    losses = gather(losses)[-1]  # the last stage is the one that has them
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, expected_losses, strict=True))
    say(f"   in the losses {difference:.0e}; they fall from {losses[0]:.4f} to {losses[-1]:.4f}")
    assert difference < 1e-6, "the losses are not those of one process"
    assert losses[-1] < losses[0], "it does not learn"
    say("\nThe stages train exactly as one process does, but only one works at a time.")
    dist.destroy_process_group()


def forward_and_backward(stage: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, list]:
    """One step of this rank's stage: the loss (0.0 but on the last rank), and when this rank did what."""
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
        gradient = torch.empty(BATCH, WIDTH)  # of the loss by `hidden`, from the rank that used it
        dist.recv(gradient, rank + 1)
        events.append((time.monotonic(), rank, " B"))
        hidden.backward(gradient)
        loss = 0.0
    else:
        events.append((time.monotonic(), rank, " B"))
        error = nn.functional.mse_loss(hidden, targets)
        error.backward()
        loss = error.item()
    if rank > 0:
        dist.send(received.grad, rank - 1)
    return loss, events


def train_in_one_process(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], nn.Sequential]:
    """What should come out: the losses, and the layers with their last gradients."""
    torch.manual_seed(0)
    layers = whole_model()
    optimizer = torch.optim.SGD(layers.parameters(), LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layers(inputs[step]), targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, layers


def whole_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def gather(mine: list) -> list[list]:
    """What every rank brought, in the order of ranks."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def say_each(text: str) -> None:
    """Every rank's line, in the order of ranks, spoken by rank 0."""
    for line in gather([text]):
        say(line[0])


if __name__ == "__main__":
    main()
