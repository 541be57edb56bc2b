"""ZeRO-1 by hand: each rank keeps Adam's states only for its own slice of the weights.

    torchrun --nproc_per_node 3 recipes/basics/zero1_by_hand.py

The problem. Data parallelism (ddp_by_hand.py) keeps everything on every rank. For each parameter, in fp32, that is

    4 bytes the parameter + 4 its gradient + 8 Adam's two running means (momentum and variance) = 16

All N ranks then compute the same step from the same 8 bytes. Why not let each rank do 1/N of the step?

The picture. Three layers La, Lb, Lc; each layer's parameters are cut into three slices 0, 1, 2. `012` means that a rank
holds all three slices, `-1-` that it holds only slice 1:

                    rank 0                rank 1                rank 2
                La    Lb    Lc        La    Lb    Lc        La    Lb    Lc
    parameters  012   012   012       012   012   012       012   012   012      every rank can compute
    gradients   012   012   012       012   012   012       012   012   012      of the rank's share of the batch
    Adam        0--   0--   0--       -1-   -1-   -1-       --2   --2   --2      ZeRO: one third each

A step. DDP's all-reduce is a reduce-scatter and an all-gather (collectives.py). ZeRO-1 puts the optimizer between the
two:

    backward   ->  reduce-scatter gradients  ->  Adam on my slice  ->  all-gather parameters
                   rank r: mean of slice r       slice r is new        all slices are new

So the saving is free: it sends as many bytes as DDP (section 7.2.1 of the paper below).

The formula (ZeRO, arXiv 1910.02054, figure 1: 2 + 2 + 12/N bytes per parameter in mixed precision, with K = 12 for the
fp32 copy and Adam's means; here everything is fp32):    bytes per parameter = 4 + 4 + 8/N

DeepSpeed: `"stage": 1`, ds_configs/zero1.json; it pads sizes that N does not divide. Next: zero2_by_hand.py cuts the
gradients. Try: other widths (what if 3 does not divide a layer?); SGD without momentum (what is left to save?).
"""

import os
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTHS = 5, (12, 24, 24, 6)  # La: 12 -> 24, Lb: 24 -> 24, Lc: 24 -> 6, 1,062 parameters; 3 divides all sizes
EPS = 1e-3  # Adam's; with the usual 1e-8, a gradient N times too large would give the same steps and go unnoticed

if os.environ.get("WORLD_SIZE") != "3":
    if speaks := os.environ.get("RANK", "0") == "0":
        print("error: start it with: torchrun --nproc_per_node 3 recipes/basics/zero1_by_hand.py", file=sys.stderr)
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
MY_X, MY_Y = X.chunk(WORLD)[RANK], Y.chunk(WORLD)[RANK]  # (batch / 3, width)


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


def zero_1() -> tuple[torch.Tensor, list[str], list[int], int]:
    """The weights; this rank's parts of La, Lb, Lc, in thirds and in bytes; elements passed to collectives per step."""
    model = new_model()
    wholes = list(model.parameters())  # La, Lb, Lc
    # The only new idea: my third of each layer is a separate parameter over the same memory. Adam sees nothing else.
    slices = [nn.Parameter(whole.data.chunk(WORLD)[RANK]) for whole in wholes]  # (layer's size / 3,) each
    adam = torch.optim.Adam(slices, lr=0.01, eps=EPS)
    moved = 0  # elements passed to collectives
    for _ in range(STEPS):
        nn.functional.mse_loss(model(MY_X), MY_Y).backward()
        for whole, mine in zip(wholes, slices, strict=True):
            thirds = whole.grad.chunk(WORLD)
            dist.reduce_scatter(thirds[RANK], list(thirds))  # my third becomes the sum over all ranks ...
            mine.grad = thirds[RANK].div_(WORLD)  # ... and then the mean
            moved += whole.numel()
        adam.step()

        means = [[adam.state[mine][name] for mine in slices] for name in ("exp_avg", "exp_avg_sq")]
        kinds = (wholes, [whole.grad for whole in wholes], means[0])
        pictures = [" ".join(picture(x, whole) for x, whole in zip(kind, wholes, strict=True)) for kind in kinds]
        sizes = [sum(x.nbytes for x in kind) for kind in (wholes, kinds[1], means[0] + means[1])]

        for whole, mine in zip(wholes, slices, strict=True):
            dist.all_gather(list(whole.data.chunk(WORLD)), mine.data)  # the new thirds of all ranks
            moved += whole.numel()
            whole.grad = mine.grad = None
    return nn.utils.parameters_to_vector(wholes).detach(), pictures, sizes, moved // STEPS


def picture(tensor: torch.Tensor, whole: torch.Tensor) -> str:
    return "012" if tensor.numel() == whole.numel() else MINE


if __name__ == "__main__":
    weights, pictures, sizes, moved = zero_1()
    everybodys: list = [None] * WORLD
    dist.all_gather_object(everybodys, (pictures, sizes))
    count = weights.numel()
    formula = [4 * count, 4 * count, 8 * count // WORLD]
    if RANK == 0:
        print(f"{'held':<14}" + "".join(f"rank {rank}: La  Lb  Lc".ljust(22) for rank in range(WORLD)))
        for kind, name in enumerate(("parameters", "gradients", "Adam")):
            print(f"{name:<14}" + "".join(f"{drawn[kind]:>19}   " for drawn, _ in everybodys))
        print(f"\n{'bytes':<14}{'parameters':>12}{'gradients':>12}{'Adam':>12}{'a parameter':>14}")
        rows = [("one process", [4 * count, 4 * count, 8 * count])]
        rows += [(f"rank {rank}", counted) for rank, (_, counted) in enumerate(everybodys)] + [("4 + 4 + 8/N", formula)]
        for name, row in rows:
            print(f"{name:<14}" + "".join(f"{size:>12,}" for size in row) + f"{sum(row) / count:>14.2f}")
    assert sizes == formula
    assert moved == 2 * count  # a reduce-scatter and an all-gather, just like an all-reduce
    one_process = new_model()  # with the whole batch and the whole Adam
    adam = torch.optim.Adam(one_process.parameters(), lr=0.01, eps=EPS)
    for _ in range(STEPS):
        adam.zero_grad()
        nn.functional.mse_loss(one_process(X), Y).backward()
        adam.step()
    difference = (weights - nn.utils.parameters_to_vector(one_process.parameters())).abs().max().item()
    assert difference < 1e-6, f"rank {RANK} differs from one process by {difference}"
    if RANK == 0:
        print(
            f"\n{STEPS} steps: the weights equal one process, to {difference:.0e}; each moved 2 x {count:,} elements."
        )
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still run, and Python's normal exit may abort because of them (pytorch PR 179291)
