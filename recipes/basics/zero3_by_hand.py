"""ZeRO-3 by hand: a layer's weights are whole only while that layer computes.

    torchrun --nproc_per_node 3 recipes/basics/zero3_by_hand.py

The problem. ZeRO-1 and -2 (zero1_by_hand.py, zero2_by_hand.py) cut Adam's memory and the gradients, but all
parameters lie on every rank: a model larger than one GPU cannot even be loaded. ZeRO-3 cuts them too; FSDP does the
same.

The picture. Three layers La, Lb, Lc, each cut into slices 0, 1, 2; `012` means that all slices are held, `-1-` only
slice 1. Hooks gather a layer just before it is needed, and free it just after. Watch the 012 walk to the right and
back:

    parameters                rank 0                rank 1                rank 2
                          La    Lb    Lc        La    Lb    Lc        La    Lb    Lc
      at rest             0--   0--   0--       -1-   -1-   -1-       --2   --2   --2
      La forward          012   0--   0--       012   -1-   -1-       012   --2   --2      all-gather, compute, free
      Lb forward          0--   012   0--       -1-   012   -1-       --2   012   --2
      Lc forward          0--   0--   012       -1-   -1-   012       --2   --2   012
      Lc backward         0--   0--   012       -1-   -1-   012       --2   --2   012      all-gather again, then the
      Lb backward         0--   012   0--       -1-   012   -1-       --2   012   --2      gradient: reduce-scatter,
      La backward         012   0--   0--       012   -1-   -1-       012   --2   --2      free both. Then Adam

It is still data parallelism: each rank computes the whole model on its share of the batch. Only the storage is divided.

The formulas (ZeRO, arXiv 1910.02054, figure 1: 16/N bytes in mixed precision; section 7.2.2: 1.5 times DDP's messages):

    bytes a parameter = (4 + 4 + 8)/N      and, for a moment, one whole layer with its gradient
    elements put into collectives in a step = 3 x parameters     (gather, gather again, reduce-scatter; ZeRO-1, -2: 2 x)

DeepSpeed: `"stage": 3`, ds_configs/zero3.json; its prefetch gathers the next layer while this one computes, and never
cuts tensors below stage3_param_persistence_threshold. It also builds the model in slices; here it is whole for a
moment. Try: leave out the free after forward (memory? messages?); one layer far larger than the others.
"""

import os
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTHS = 5, (12, 24, 24, 6)  # La: 12 -> 24, Lb: 24 -> 24, Lc: 24 -> 6, 1,062 parameters; 3 divides each layer's

if os.environ.get("WORLD_SIZE") != "3":
    print("error: start it with: torchrun --nproc_per_node 3 recipes/basics/zero3_by_hand.py", file=sys.stderr)
    sys.exit(2)
GPUS = torch.cuda.device_count() >= 3  # a GPU for each rank: NCCL; otherwise gloo on the CPU
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
if GPUS:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if GPUS else "gloo")
RANK, WORLD = dist.get_rank(), 3
ALL, MY_SHARE = slice(0, 12), slice(4 * RANK, 4 * RANK + 4)  # rows of the batch
MINE = ("0--", "-1-", "--2")[RANK]  # this rank's slice, in the picture


class Layer(nn.Module):
    """tanh(W x + b). W and b lie in one flat parameter, (outputs x inputs + outputs,), which is easy to cut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.flat = nn.Parameter(torch.randn(outputs * inputs + outputs, device=DEVICE) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, inputs) -> (batch, outputs)
        weight, bias = self.flat.split([self.outputs * self.inputs, self.outputs])
        return torch.tanh(nn.functional.linear(x, weight.view(self.outputs, self.inputs), bias))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same on every rank
    return nn.Sequential(*(Layer(inputs, outputs) for inputs, outputs in pairwise(WIDTHS)))


def loss_on(rows: slice, model: nn.Module) -> torch.Tensor:
    """The loss on some of the 12 rows of a batch that is the same on every rank."""
    torch.manual_seed(1)
    x, y = torch.randn(12, WIDTHS[0]), torch.rand(12, WIDTHS[-1])  # (batch, width)
    return nn.functional.mse_loss(model(x[rows].to(DEVICE)), y[rows].to(DEVICE))


def one_process() -> list[torch.Tensor]:
    """The whole batch and the whole Adam: the layers that the slices must come to."""
    model = new_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        adam.zero_grad()
        loss_on(ALL, model).backward()
        adam.step()
    return [parameter.detach() for parameter in model.parameters()]


moments: list[tuple[str, str, int]] = []  # of the last step: what happened, who held which parameters, in bytes
moved: list[int] = []  # elements put into each of its collectives


class Sharded:
    """A layer of which this rank keeps a third. Hooks make it whole, and cut it again; the layer knows nothing of it."""

    def __init__(self, name: str, layer: Layer) -> None:
        self.name, self.whole, self.whole_bytes = name, layer.flat, layer.flat.nbytes
        self.mine = nn.Parameter(layer.flat.data.chunk(WORLD)[RANK].clone())  # (layer's size / 3,)
        self.free()
        layer.register_forward_pre_hook(lambda *_: self.gather("forward"))
        layer.register_forward_hook(lambda *_: self.free())
        layer.register_full_backward_pre_hook(lambda *_: self.gather("backward"))
        layer.flat.register_post_accumulate_grad_hook(lambda _: self.reduce_and_free())

    def free(self) -> None:
        """Give back the memory, but keep the tensor: autograd looks into it again in backward."""
        self.whole.untyped_storage().resize_(0)

    def gather(self, phase: str) -> None:
        self.whole.untyped_storage().resize_(self.whole_bytes)
        dist.all_gather(list(self.whole.data.chunk(WORLD)), self.mine.data)
        moved.append(self.whole.numel())
        note(f"{self.name} {phase}")

    def reduce_and_free(self) -> None:
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter(self.mine.grad, list(self.whole.grad.chunk(WORLD)))
        moved.append(self.whole.numel())
        self.mine.grad /= WORLD  # the mean of the three shares
        self.whole.grad = None
        self.free()


def note(moment: str) -> None:
    wholes = [shard.whole.untyped_storage().nbytes() for shard in shards]
    drawn = "   ".join("012" if whole else MINE for whole in wholes)
    moments.append((moment, drawn, sum(wholes) + sum(shard.mine.nbytes for shard in shards)))


if __name__ == "__main__":
    model = new_model()
    shards = [Sharded(name, layer) for name, layer in zip(("La", "Lb", "Lc"), model, strict=True)]
    adam = torch.optim.Adam([shard.mine for shard in shards], lr=0.01)
    for _ in range(STEPS):
        moments.clear()
        moved.clear()
        adam.zero_grad()
        note("at rest")
        loss_on(MY_SHARE, model).backward()
        note("at the step")
        adam.step()

    means = [adam.state[shard.mine][mean] for shard in shards for mean in ("exp_avg", "exp_avg_sq")]
    sizes = [moments[-1][2], sum(shard.mine.grad.nbytes for shard in shards), sum(mean.nbytes for mean in means)]
    everybodys: list = [None] * WORLD
    dist.all_gather_object(everybodys, (moments, sizes))
    count, largest = sum(shard.whole.numel() for shard in shards), max(shard.whole.numel() for shard in shards)
    formula = [4 * count // WORLD, 4 * count // WORLD, 8 * count // WORLD]
    if RANK == 0:
        print(f"{'parameters':<14}" + "".join(f"rank {rank}: La Lb Lc".ljust(22) for rank in range(WORLD)) + "bytes")
        for index, (moment, _, size) in enumerate(moments):
            print(f"{moment:<14}" + "".join(seen[index][1].ljust(22) for seen, _ in everybodys) + f"{size:>5,}")
        print(f"\n{'bytes':<14}{'parameters':>12}{'gradients':>12}{'Adam':>12}{'a parameter':>14}")
        for name, row in [*((f"rank {r}", counted) for r, (_, counted) in enumerate(everybodys)), ("16/N", formula)]:
            print(f"{name:<14}" + "".join(f"{size:>12,}" for size in row) + f"{sum(row) / count:>14.2f}")
    assert sizes == formula
    assert max(size for _, _, size in moments) == formula[0] + 4 * largest, "one layer whole at a time, never two"
    assert sum(moved) == 3 * count
    for shard, whole in zip(shards, one_process(), strict=True):
        difference = (shard.mine - whole.chunk(WORLD)[RANK]).abs().max().item()
        assert difference < 1e-6, f"{shard.name} on rank {RANK} differs from one process by {difference}"
    if RANK == 0:
        print(
            f"\nAfter {STEPS} steps every slice equals one process's; a step puts 3 x {count:,} elements on the wire."
        )
    dist.destroy_process_group()
