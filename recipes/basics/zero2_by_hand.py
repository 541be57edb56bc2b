"""ZeRO-2 by hand: each rank keeps only the gradients of its own slice, and frees the rest during the backward pass.

    torchrun --nproc_per_node 3 recipes/basics/zero2_by_hand.py

The problem. With ZeRO-1 (zero1_by_hand.py) each of three ranks has a third of Adam's states, but every rank still
holds the whole gradient until the step. Yet Adam on rank r needs only slice r of it.

The picture. Three layers La, Lb, Lc, each cut into slices 0, 1, 2; `012` means that a rank holds all slices, `-1-`
only slice 1. The backward pass computes gradients from the last layer to the first. As soon as one is complete, a hook
reduce-scatters it: each rank keeps the mean of its slice, and drops the whole before the next layer's is computed.

                              rank 0                rank 1                rank 2
                          La    Lb    Lc        La    Lb    Lc        La    Lb    Lc
    gradients
      Lc whole            ---   ---   012       ---   ---   012       ---   ---   012      from backward
      Lc reduced          ---   ---   0--       ---   ---   -1-       ---   ---   --2      reduce-scatter, drop
      Lb whole            ---   012   0--       ---   012   -1-       ---   012   --2      from backward
      ...
      La reduced          0--   0--   0--       -1-   -1-   -1-       --2   --2   --2      now Adam, on the slices
    parameters            012   012   012       012   012   012       012   012   012      all-gather after the step

The messages are the same as in ZeRO-1, and the bytes the same as in DDP; they are only sent earlier.

The formula (ZeRO, arXiv 1910.02054, figure 1: 2 + (2 + 12)/N in mixed precision; here everything is fp32):

    bytes per parameter = 4 + (4 + 8)/N      and, for a moment, one whole gradient: the largest layer's

DeepSpeed: `"stage": 2`, ds_configs/zero2.json; its `reduce_bucket_size` plays the role of "one layer". Next:
zero3_by_hand.py cuts the parameters. Try: do not drop the whole gradient below; one layer far larger than the others.
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
        print("error: start it with: torchrun --nproc_per_node 3 recipes/basics/zero2_by_hand.py", file=sys.stderr)
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


def zero_2() -> tuple[torch.Tensor, list[tuple[str, str, int]], list[int], int]:
    """The weights; the last backward pass, moment by moment; bytes held at the step; elements moved per step."""
    model = new_model()
    slices = {whole: nn.Parameter(whole.data.chunk(WORLD)[RANK]) for whole in model.parameters()}  # as in ZeRO-1
    names = dict(zip(slices, ("La", "Lb", "Lc"), strict=True))
    adam = torch.optim.Adam(slices.values(), lr=0.01, eps=EPS)
    moments: list[tuple[str, str, int]] = []
    moved: list[int] = []  # elements passed to each collective

    def note(moment: str) -> None:
        gradients = [mine.grad if whole.grad is None else whole.grad for whole, mine in slices.items()]
        sizes = [0 if gradient is None else gradient.untyped_storage().nbytes() for gradient in gradients]
        drawn = [{0: "---", whole.nbytes: "012"}.get(size, MINE) for size, whole in zip(sizes, slices, strict=True)]
        moments.append((moment, " ".join(drawn), sum(sizes)))

    def reduce_and_drop(whole: nn.Parameter) -> None:  # called during the backward pass: this gradient is complete
        note(f"{names[whole]} whole")
        mine = slices[whole]
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter(mine.grad, list(whole.grad.chunk(WORLD)))
        moved.append(whole.numel())
        mine.grad /= WORLD  # the mean of the three shares
        whole.grad = None
        note(f"{names[whole]} reduced")

    for whole in slices:
        whole.register_post_accumulate_grad_hook(reduce_and_drop)
    for _ in range(STEPS):
        moments.clear()
        adam.zero_grad()
        nn.functional.mse_loss(model(MY_X), MY_Y).backward()
        adam.step()
        for whole, mine in slices.items():
            dist.all_gather(list(whole.data.chunk(WORLD)), mine.data)  # the new thirds of all ranks
            moved.append(whole.numel())
    means = [adam.state[mine][mean] for mine in slices.values() for mean in ("exp_avg", "exp_avg_sq")]
    sizes = [sum(whole.nbytes for whole in slices), moments[-1][2], sum(mean.nbytes for mean in means)]
    return nn.utils.parameters_to_vector(slices).detach(), moments, sizes, sum(moved) // STEPS


if __name__ == "__main__":
    weights, moments, sizes, moved = zero_2()
    everybodys: list = [None] * WORLD
    dist.all_gather_object(everybodys, (moments, sizes))
    count = weights.numel()
    formula = [4 * count, 4 * count // WORLD, 8 * count // WORLD]
    if RANK == 0:
        print(f"{'gradients':<14}" + "".join(f"rank {rank}: La  Lb  Lc".ljust(22) for rank in range(WORLD)) + "bytes")
        for index, (moment, _, size) in enumerate(moments):
            print(f"{moment:<14}" + "".join(f"{seen[index][1]:>19}   " for seen, _ in everybodys) + f"{size:>5,}")
        print(f"\n{'bytes':<14}{'parameters':>12}{'gradients':>12}{'Adam':>12}{'a parameter':>14}")
        rows = [(f"rank {rank}", counted) for rank, (_, counted) in enumerate(everybodys)] + [("4 + (4+8)/N", formula)]
        for name, row in rows:
            print(f"{name:<14}" + "".join(f"{size:>12,}" for size in row) + f"{sum(row) / count:>14.2f}")
    assert sizes == formula
    assert moved == 2 * count  # a reduce-scatter and an all-gather, just like an all-reduce
    largest = 4 * max(whole.numel() for whole in new_model().parameters())
    assert max(size for _, _, size in moments) < formula[1] + largest < 4 * count, "never all gradients at once"
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
