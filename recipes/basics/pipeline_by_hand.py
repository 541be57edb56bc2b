"""Pipelines by hand: micro-batches fill the idle time of model parallelism, first with GPipe, then with 1F1B.

    torchrun --nproc_per_node 4 recipes/basics/pipeline_by_hand.py

The problem. With a model cut into P stages (see model_parallelism.py) one stage works while P - 1 wait. But the
batch can be split. Cut it into M micro-batches, and stage 0 begins the second while stage 1 does the first:

    one batch:    stage 0  F . . B          two micro-batches:  stage 0  F0 F1 .  .  B1 B0
                  stage 1  . F B .                              stage 1  .  F0 F1 B1 B0 .

The gradients equal those of the whole batch: each micro-batch's loss is divided by M, and `backward` sums in `.grad`.
The weights change only after the last micro-batch.

The bubble. The last stage begins P - 1 slots late, and the first ends P - 1 slots after it. If F and B take one slot
each, a stage works in 2 M of 2 (M + P - 1) slots. The bubble is small for M >= 4 P: GPipe, arXiv 1811.06965.

    bubble = (P - 1) / (M + P - 1)

The memory. A stage keeps the activations of a micro-batch from its F to its B. GPipe does all F first: it holds M of
them. 1F1B does each B as early as possible: stage s runs P - 1 - s forwards ahead, then alternates F and B. It holds at
most P - s, however large M is, and takes the same number of slots. Source: Narayanan et al., arXiv 2104.04473.

To try: M = 2 and M = 32; leave out `/ micro_batches`; let 1F1B run one forward further ahead than it needs.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH, BATCH, MICRO_BATCHES = 8, 32, 32, 8


def all_at_once(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """GPipe: every forward, then every backward, the last first. With one micro-batch: plain model parallelism."""
    forwards = [("F", m) for m in range(micro_batches)]
    return forwards + [("B", m) for m in reversed(range(micro_batches))]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """1F1B: as many forwards ahead as there are later stages, then alternating, then the remaining backwards."""
    ahead = min(stages - 1 - stage, micro_batches)
    order = [("F", m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        order += [("F", ahead + m), ("B", m)]
    return order + [("B", m) for m in range(micro_batches - ahead, micro_batches)]


class Stage:
    """This rank's layers, and its part of a schedule. Every message carries the slot in which it was computed."""

    def __init__(self, layers: nn.Module) -> None:
        self.layers, self.rank, self.last_rank = layers, dist.get_rank(), dist.get_world_size() - 1
        self.slot = -1  # of the last operation on this rank
        self.under_way: list = []  # sends, with the tensors they read from

    def run(self, schedule: list, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, dict, int]:
        """The loss (on the last rank), {slot: "F0"}, and the largest number of micro-batches held at once."""
        micro_batches = len(schedule) // 2
        inputs, targets = (whole.reshape(micro_batches, -1, WIDTH) for whole in (inputs, targets))  # (M, B / M, W)
        held, most_held, loss, done = {}, 0, 0.0, {}
        for kind, m in schedule:
            if kind == "F":
                received = inputs[m] if self.rank == 0 else self.receive(self.rank - 1, inputs[m].shape)
                output = self.layers(received.requires_grad_())  # (B / M, W)
                if self.rank == self.last_rank:
                    output = nn.functional.mse_loss(output, targets[m]) / micro_batches
                    loss += output.item()
                held[m] = received, output  # kept for the backward pass: the memory that a schedule costs
                most_held = max(most_held, len(held))
            else:  # from the gradient of our output, compute that of our input and weights
                gradient = self.receive(self.rank + 1, inputs[m].shape) if self.rank < self.last_rank else None
                received, output = held.pop(m)
                output.backward(gradient)
            self.slot += 1
            done[self.slot] = f"{kind}{m}"
            if kind == "F" and self.rank < self.last_rank:
                self.send(output.detach(), self.rank + 1)
            if kind == "B" and self.rank > 0:
                self.send(received.grad, self.rank - 1)
        for request, _ in self.under_way:
            request.wait()
        return loss, done, most_held

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Non-blocking: two neighbors that both send first would wait for each other forever."""
        for message in (torch.tensor([self.slot]), tensor):
            self.under_way.append((dist.isend(message, to), message))

    def receive(self, source: int, shape: torch.Size) -> torch.Tensor:
        """The tensor. Advances this rank's clock to the slot in which it was computed, since its use comes later."""
        slot, tensor = torch.empty(1, dtype=torch.long), torch.empty(shape)
        dist.recv(slot, source)
        dist.recv(tensor, source)
        self.slot = max(self.slot, int(slot))
        return tensor


def main() -> None:
    if "RANK" not in os.environ:
        print("error: start it with: torchrun --nproc_per_node 4 recipes/basics/pipeline_by_hand.py", file=sys.stderr)
        sys.exit(2)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # every rank builds all layers, keeps one stage, and checks it against the whole
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    mine = layers[rank * LAYERS // ranks : (rank + 1) * LAYERS // ranks]
    inputs = torch.randn(BATCH, WIDTH)
    whole_loss = nn.functional.mse_loss(layers(inputs), inputs.sin())
    whole_loss.backward()
    expected = [parameter.grad.clone() for parameter in mine.parameters()]

    for title, make_schedule, micro_batches in (
        ("Model parallelism, the batch in one piece", all_at_once, 1),
        (f"GPipe, {MICRO_BATCHES} micro-batches", all_at_once, MICRO_BATCHES),
        (f"1F1B, {MICRO_BATCHES} micro-batches (the same bubble, less held)", one_f_one_b, MICRO_BATCHES),
    ):
        mine.zero_grad()
        loss, done, most_held = Stage(mine).run(make_schedule(rank, ranks, micro_batches), inputs, inputs.sin())
        gradients = [parameter.grad for parameter in mine.parameters()]
        difference = max((ours - whole).abs().max().item() for ours, whole in zip(gradients, expected, strict=True))

        everyone: list = [None] * ranks
        dist.all_gather_object(everyone, (loss, done, most_held, difference))
        slots = 1 + max(max(done) for _, done, _, _ in everyone)
        idle = sum(slots - len(done) for _, done, _, _ in everyone)
        if rank == 0:
            print(f"{title}: {slots} slots")
            for stage, (_, done, most_held, _) in enumerate(everyone):
                row = " ".join(f"{done.get(slot, '.'):2}" for slot in range(slots))
                print(f"   stage {stage}  {row}  holds {most_held}")
            formula = (ranks - 1) / (micro_batches + ranks - 1)
            share = idle / slots / ranks
            print(f"   bubble: {idle} of {slots * ranks} slots = {share:.1%}; (P - 1) / (M + P - 1) = {formula:.1%}")
            print(f"   against one process: loss {abs(everyone[-1][0] - whole_loss.item()):.0e},", end=" ")
            print(f"gradients {max(each[3] for each in everyone):.0e}\n", flush=True)
        assert abs(everyone[-1][0] - whole_loss.item()) < 1e-6, "the loss is not that of one process"
        assert difference < 1e-6, f"stage {rank}: the gradients are not those of one process"
        assert idle * (micro_batches + ranks - 1) == (ranks - 1) * slots * ranks, "the bubble is not (P-1) / (M+P-1)"
        holds = [most_held for _, _, most_held, _ in everyone]
        most = [micro_batches if make_schedule is all_at_once else ranks - stage for stage in range(ranks)]
        assert holds == [min(micro_batches, each) for each in most], f"activations held: {holds}, and not {most}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
