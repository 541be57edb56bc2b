"""ZeRO-3 by hand: a layer's weights are whole only while that layer computes.

    torchrun --nproc_per_node 3 recipes/basics/zero3_by_hand.py

The problem. ZeRO-1 and ZeRO-2 (zero1_by_hand.py, zero2_by_hand.py) cut Adam's states and the gradients, but each rank
still holds all parameters: a model larger than one GPU cannot even be loaded. ZeRO-3 cuts them too, and so does FSDP.

The picture. Layers La, Lb, Lc, each cut into slices 0, 1, 2; `012`: the rank holds all slices, `-1-`: only slice 1.
Each rank still computes the whole model, on its share of the batch: hooks gather a layer only while it computes:

    parameters          rank 0                rank 1                rank 2
                    La    Lb    Lc        La    Lb    Lc        La    Lb    Lc
    at rest         0--   0--   0--       -1-   -1-   -1-       --2   --2   --2
    La forward      012   0--   0--       012   -1-   -1-       012   --2   --2      all-gather, compute, free
    Lb forward      0--   012   0--       -1-   012   -1-       --2   012   --2
    Lc forward      0--   0--   012       -1-   -1-   012       --2   --2   012
    Lc backward     0--   0--   012       -1-   -1-   012       --2   --2   012      all-gather again, compute,
    Lb backward     0--   012   0--       -1-   012   -1-       --2   012   --2      reduce-scatter the gradient,
    La backward     012   0--   0--       012   -1-   -1-       012   --2   --2      free both; finally Adam on slices

The formulas (ZeRO, arXiv 1910.02054, figure 1: 16/N bytes in mixed precision too; section 7.2.2: 1.5 x DDP's traffic):
    bytes per parameter = (4 + 4 + 8)/N      and, for a moment, one whole layer with its gradient
    elements passed to collectives per step = 3 x parameters     (2 all-gathers, 1 reduce-scatter; ZeRO-1 and 2: 2 x)

DeepSpeed: `"stage": 3`, ds_configs/zero3.json; it gathers the next layer while this one computes, and builds the model
in slices; this page builds it whole first. Try: no free after forward (memory? messages?); one layer much larger.
"""

import os
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTHS = 5, (12, 24, 24, 6)  # La: 12 -> 24, Lb: 24 -> 24, Lc: 24 -> 6, 1,062 parameters; 3 divides all sizes

if os.environ.get("WORLD_SIZE") != "3":
    if speaks := os.environ.get("RANK", "0") == "0":
        print("error: start it with: torchrun --nproc_per_node 3 recipes/basics/zero3_by_hand.py", file=sys.stderr)
    sys.exit(2 if speaks else 0)  # if another rank failed first, torchrun would end rank 0 before it prints
GPUS = torch.cuda.device_count() >= 3  # a GPU for each rank: NCCL; otherwise gloo on the CPU
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPUS else torch.device("cpu")
if GPUS:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if GPUS else "gloo")
RANK, WORLD = dist.get_rank(), 3
MINE = ("0--", "-1-", "--2")[RANK]  # this rank's slice, in the picture
torch.manual_seed(1)  # the same batch on every rank; each rank takes its share
X, Y = torch.randn(12, WIDTHS[0], device=DEVICE), torch.rand(12, WIDTHS[-1], device=DEVICE)  # (batch, width)
MY_X, MY_Y = X.chunk(WORLD)[RANK].requires_grad_(), Y.chunk(WORLD)[RANK]  # (batch / 3, width); for La's hook


class Layer(nn.Module):
    """tanh(W x + b). W, with b as its last column, is stored as one flat parameter, which is easy to cut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = (outputs, inputs + 1)
        self.flat = nn.Parameter(torch.randn(outputs * (inputs + 1), device=DEVICE) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, inputs) -> (batch, outputs)
        matrix = self.flat.view(self.shape)
        return torch.tanh(nn.functional.linear(x, matrix[:, :-1], matrix[:, -1]))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same on every rank
    return nn.Sequential(*(Layer(inputs, outputs) for inputs, outputs in pairwise(WIDTHS)))


moments, moved = [], []  # (event, parameters held, bytes) of the last step; elements moved in total


class Sharded:
    """A layer of which this rank keeps a third. Hooks gather and free it; the layer itself does not know."""

    def __init__(self, name: str, layer: Layer) -> None:
        self.name, self.whole, self.whole_bytes = name, layer.flat, layer.flat.nbytes
        self.mine = nn.Parameter(layer.flat.data.chunk(WORLD)[RANK].clone())  # (layer's size / 3,)
        self.free()
        layer.register_forward_pre_hook(lambda *_: self.gather("forward"))
        layer.register_forward_hook(lambda *_: self.free())
        layer.register_full_backward_pre_hook(lambda *_: self.gather("backward"))
        layer.flat.register_post_accumulate_grad_hook(lambda _: self.reduce_and_free())

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)  # frees the memory, keeps the tensor: the backward pass uses it again

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
    held = sum(wholes) + sum(shard.mine.nbytes for shard in shards)
    moments.append((moment, " ".join("012" if whole else MINE for whole in wholes), held))


if __name__ == "__main__":
    model = new_model()
    shards = [Sharded(name, layer) for name, layer in zip(("La", "Lb", "Lc"), model, strict=True)]
    adam = torch.optim.Adam([shard.mine for shard in shards], lr=0.01, eps=1e-3)  # eps: see zero1_by_hand.py
    for _ in range(STEPS):
        moments.clear()
        adam.zero_grad()
        note("at rest")
        nn.functional.mse_loss(model(MY_X), MY_Y).backward()
        note("at the step")
        adam.step()
    means = [adam.state[shard.mine][mean] for shard in shards for mean in ("exp_avg", "exp_avg_sq")]
    sizes = [moments[-1][2], sum(shard.mine.grad.nbytes for shard in shards), sum(mean.nbytes for mean in means)]
    everybodys: list = [None] * WORLD
    dist.all_gather_object(everybodys, (moments, sizes))
    count = sum(whole.numel() for whole in model.parameters())  # the tensors know their size, even without memory
    formula = [4 * count // WORLD, 4 * count // WORLD, 8 * count // WORLD]
    if RANK == 0:
        print(f"{'parameters':<14}" + "".join(f"rank {rank}: La  Lb  Lc".ljust(22) for rank in range(WORLD)) + "bytes")
        for index, (moment, _, size) in enumerate(moments):
            print(f"{moment:<14}" + "".join(f"{seen[index][1]:>19}   " for seen, _ in everybodys) + f"{size:>5,}")
        print(f"\n{'bytes':<14}{'parameters':>12}{'gradients':>12}{'Adam':>12}{'a parameter':>14}")
        for name, row in [*((f"rank {r}", counted) for r, (_, counted) in enumerate(everybodys)), ("16/N", formula)]:
            print(f"{name:<14}" + "".join(f"{size:>12,}" for size in row) + f"{sum(row) / count:>14.2f}")
    assert sizes == formula
    assert max(held for *_, held in moments) == formula[0] + max(shard.whole_bytes for shard in shards), "one at a time"
    assert sum(moved) == 3 * count * STEPS
    one_process = new_model()  # with the whole batch and the whole Adam
    adam = torch.optim.Adam(one_process.parameters(), lr=0.01, eps=1e-3)
    for _ in range(STEPS):
        adam.zero_grad()
        nn.functional.mse_loss(one_process(X), Y).backward()
        adam.step()
    for shard, whole in zip(shards, one_process.parameters(), strict=True):
        assert (shard.mine - whole.chunk(WORLD)[RANK]).abs().max() < 1e-6, f"{shard.name} on rank {RANK} is wrong"
    if RANK == 0:
        print(f"\nAfter {STEPS} steps every slice equals that of one process. Each step moved 3 x {count:,} elements.")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still run, and Python's normal exit may abort because of them (pytorch PR 179291)
