"""Expert parallelism by hand: each rank holds some of the experts, and tokens travel to them and back.

    torchrun --nproc_per_node 4 recipes/basics/experts_by_hand.py

The problem. In a mixture of experts a router sends each token to k of E small MLPs, so most weights are experts, and a
token needs few. ZeRO-3 gathers them all on every rank. So send the tokens instead: each 2 of the 4 ranks share experts.

    rank              0      1      2      3
    experts          0 1    2 3    0 1    2 3      ranks 0 and 2 hold the same ones
    other weights    all    all    all    all
    tokens           its own on each: data parallel

The exchange, in each layer. The router runs on each rank, for its own tokens. Each rank then tells the others of its
group how many rows each expert gets, so that all know what arrives; sends the rows; computes its experts' rows; and
sends the results back. Gradients take the same way. These messages have no fixed size, and a rank whose experts get
nothing must still take part: the others wait for it. No row is dropped.

                 before                  there                       back
    rank 0       t0 t1 .. for 0 1 2 3    t0 t3 .. t16 .. for 0 1     t0 t1 .., k results each

The gradients. An expert's gradient is a sum over the tokens of both ranks of its group, which sent it theirs. What is
missing are the tokens of the other group. So sum it over the ranks with the same experts, not over all: that would add
up different experts. Other weights are summed over all ranks, as usual. The loss is a sum divided by the trained-on
tokens of all ranks; to divide an expert's sum by its 2 ranks, and the others by 4, is the common mistake.

To try: sum experts' gradients over all ranks, and see which assertion fails; let a rank skip the exchange if nothing
arrives; drop an expert's rows beyond 20, as older mixtures did, and look at the loss.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

TOKENS, WIDTH, EXPERTS, CHOSEN, GROUP = 16, 16, 4, 2, 2  # tokens of a rank; experts of a token; ranks of a group


class Trade(torch.autograd.Function):
    """All-to-all of rows: `sends[i]` of them go to rank i of the group, `gets[i]` come. Gradients take the way back."""

    sent = 0  # bytes to other ranks

    @staticmethod
    def forward(ctx, rows: torch.Tensor, sends: list[int], gets: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.back = gets, sends, group
        Trade.sent += (len(rows) - sends[dist.get_rank(group)]) * rows.shape[1] * rows.element_size()
        arrived = rows.new_empty(sum(gets), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), gets, sends, group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return Trade.apply(gradients, *ctx.back), None, None, None


class Mixture(nn.Module):
    """A router and the experts `held`, which are all of them, or a rank's."""

    def __init__(self, held: slice = slice(0, EXPERTS)) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank draws all weights, and keeps its part
        self.router = nn.Linear(WIDTH, EXPERTS)
        up, down = torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4, torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 6
        self.up, self.down = nn.Parameter(up[held].clone()), nn.Parameter(down[held].clone())

    def forward(self, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, int]:
        """The output for the tokens `x` (T, C), and how many rows this rank's experts computed."""
        chances, chosen = self.router(x).softmax(dim=-1).topk(CHOSEN)  # (T, k)
        order = chosen.flatten().argsort(stable=True)  # rows by expert, and so by rank
        rows, counts = x[order // CHOSEN], chosen.flatten().bincount(minlength=EXPERTS)
        if group:
            arriving = torch.empty_like(counts)  # for each rank of the group, what each of our experts gets from it
            dist.all_to_all_single(arriving, counts, group=group)
            sends, gets = (each.view(GROUP, -1).sum(dim=1).tolist() for each in (counts, arriving))
            rows, counts = Trade.apply(rows, sends, gets, group), arriving
        expert = torch.arange(len(self.up)).repeat(len(counts) // len(self.up)).repeat_interleave(counts)  # of each row
        done = torch.zeros_like(rows)
        for number in range(len(self.up)):  # without rows, too: then the gradient is zero, not missing
            mine = expert == number
            done = done.index_put((mine,), (rows[mine] @ self.up[number]).relu() @ self.down[number])
        if group:
            done = Trade.apply(done, gets, sends, group)
        results = done[order.argsort()].view(len(x), CHOSEN, WIDTH)
        return (chances[..., None] * results).sum(dim=1), len(rows)


def compare(rank: int, ranks: int, mixtures: tuple[Mixture, Mixture], groups: tuple) -> None:
    """Train one step of all tokens on one rank, and of each rank's own tokens, and compare."""
    whole, model = mixtures
    group, alike = groups  # the ranks that hold all experts together; those that hold the same
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, ranks * TOKENS, WIDTH, generator=generator)
    is_learnt = (torch.arange(ranks * TOKENS) >= TOKENS // 2).float()  # half of rank 0's tokens are a prompt
    loss = ((whole(x)[0] - target).square().sum(dim=1) * is_learnt).sum() / is_learnt.sum()
    loss.backward()

    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    learnt = is_learnt[mine].sum()
    dist.all_reduce(learnt)  # of all ranks
    Trade.sent = 0
    output, computed = model(x[mine], group)
    own = ((output - target[mine]).square().sum(dim=1) * is_learnt[mine]).sum() / learnt
    own.backward()
    for expert_weights in (model.up, model.down):
        dist.all_reduce(expert_weights.grad, group=alike)
    for parameter in model.router.parameters():
        dist.all_reduce(parameter.grad)
    dist.all_reduce(total := own.detach())

    first = rank % GROUP * len(model.up)
    held = slice(first, first + len(model.up))
    expected = [whole.up.grad[held], whole.down.grad[held], whole.router.weight.grad, whole.router.bias.grad]
    ours = [model.up.grad, model.down.grad, model.router.weight.grad, model.router.bias.grad]
    difference = max((one - other).abs().max().item() for one, other in zip(ours, expected, strict=True))
    for each in range(ranks):
        dist.barrier()
        if rank == each:
            had = f"experts {first}-{held.stop - 1} got {computed:2} rows"
            print(f"rank {rank}: {had}; sent {Trade.sent:,} bytes", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"against one process: loss {abs(total - loss).item():.0e}, gradients {difference:.0e}\n", flush=True)
    assert abs(total - loss) < 1e-5, "the loss is not that of one process"
    assert difference < 1e-5, f"rank {rank}: the gradients are not those of one process"


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        if speaks := os.environ.get("RANK", "0") == "0":
            print("error: start with: torchrun --nproc_per_node 4 recipes/basics/experts_by_hand.py", file=sys.stderr)
        sys.exit(2 if speaks else 0)  # if another rank failed first, torchrun would end rank 0 before it prints
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group, _ = dist.new_subgroups(GROUP)  # 0 1, and 2 3
    alike, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    share = EXPERTS // GROUP
    for is_lopsided in (False, True):
        mixtures = Mixture(), Mixture(slice(rank % GROUP * share, (rank % GROUP + 1) * share))
        for model in mixtures if is_lopsided else ():
            model.router.bias.data[share:] -= 100  # no token chooses experts 2 and 3
        if rank == 0:
            print("all tokens choose experts 0 and 1" if is_lopsided else "the router as drawn", flush=True)
        compare(rank, ranks, mixtures, (group, alike))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
