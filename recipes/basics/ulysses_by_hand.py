"""Sequence parallelism by hand: ranks share one text, and trade tokens for heads around attention (Ulysses).

    torchrun --nproc_per_node 4 recipes/basics/ulysses_by_hand.py

The problem. The activations of a long text do not fit on one rank. Data parallelism gives each rank other texts, and
ZeRO shards weights and states; with both, a rank still computes with whole texts. So cut the text itself: with N ranks
each has T / N tokens. Embeddings, norms, MLPs and the loss work on each token separately, and need no others.

    tokens   0 1 2 3 4 5 6 7
    rank     0 0 1 1 2 2 3 3

Attention does need them: a token attends to all tokens before it. But heads are independent. So the ranks trade in an
all-to-all: each sends its tokens' parts for other heads, and receives the other tokens' parts for its own heads.

                 before: 2 tokens, all heads        after: 8 tokens, 1 head
    rank 1       t2 t3  x  h0 h1 h2 h3              t0 t1 t2 t3 t4 t5 t6 t7  x  h1

It attends as one process would, with an unchanged kernel, and trades back. A rank has whole heads, so N must divide
their number. Source: DeepSpeed Ulysses, arXiv 2309.14509, section 3.

The bytes. Query, key, value and output are each T / N x C numbers on a rank, which keeps 1/N of them. So a layer sends
4 (N-1)/N x T / N x C numbers in its forward pass and as many in its backward pass: the more ranks, the fewer.

The loss. Parts differ in how many tokens are trained on (prompt tokens are not). So sum the losses of tokens, not the
means of ranks, and divide by the total number of trained-on tokens. Gradients of weights are summed over ranks.

To try: average the ranks' mean losses instead, as in data parallelism, and see which assertion fails; give
each rank positions 0, 1 instead of its own; let 3 ranks share the 4 heads.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

TOKENS, WIDTH, HEADS, VOCABULARY, IGNORED = 64, 32, 4, 16, -100


class Trade(torch.autograd.Function):
    """All-to-all: part i of dimension 0 goes to rank i. The gradient takes the same way back, with the same trade."""

    sent = 0  # bytes to other ranks

    @staticmethod
    def forward(ctx, parts: torch.Tensor) -> torch.Tensor:  # (N, ...) -> (N, ...): what each rank had for us
        Trade.sent += parts.numel() * parts.element_size() * (len(parts) - 1) // len(parts)
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    @staticmethod
    def backward(ctx, gradients: torch.Tensor) -> torch.Tensor:
        return Trade.apply(gradients)


def tokens_to_heads(mine: torch.Tensor, ranks: int) -> torch.Tensor:
    """From (T / N, heads, D) for this rank's tokens to (T, heads / N, D) for its heads."""
    parts = mine.unflatten(1, (ranks, -1)).movedim(1, 0)  # (N, T / N, heads / N, D): part i has the heads of rank i
    return Trade.apply(parts).flatten(0, 1)  # the ranks' tokens are in order


def heads_to_tokens(mine: torch.Tensor, ranks: int) -> torch.Tensor:
    """From (T, heads / N, D) back to (T / N, heads, D)."""
    parts = mine.unflatten(0, (ranks, -1))  # (N, T / N, heads / N, D): part i has the tokens of rank i
    return Trade.apply(parts).movedim(0, 1).flatten(1, 2)


class Layer(nn.Module):
    """Embedding, attention, MLP and head of a tiny language model, over all tokens or over a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, ranks: int) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)  # (T / N, C)
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)  # each (T / N, heads, D)
        if ranks > 1:
            query, key, value = (tokens_to_heads(part, ranks) for part in (query, key, value))  # (T, heads / N, D)
        heads = (part.transpose(0, 1) for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)
        if ranks > 1:
            mixed = heads_to_tokens(mixed, ranks)
        x = x + self.out(mixed.flatten(1))
        return self.head(x + self.mlp(x))  # (T / N, vocabulary)


def loss_sum(model: Layer, ids: torch.Tensor, labels: torch.Tensor, first: int, ranks: int) -> torch.Tensor:
    """The summed loss of these tokens; the first one is at position `first` of the text."""
    logits = model(ids, torch.arange(first, first + len(ids)), ranks)
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def main() -> None:
    if "RANK" not in os.environ:
        print("error: start it with: torchrun --nproc_per_node 4 recipes/basics/ulysses_by_hand.py", file=sys.stderr)
        sys.exit(2)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # every rank has the same weights and text, and reads its part
    model, text = Layer(), torch.randint(VOCABULARY, (TOKENS + 1,))
    ids, labels = text[:-1], text[1:].clone()
    labels[: TOKENS * 3 // 8] = IGNORED  # a prompt: with 4 ranks, all of rank 0's tokens and half of rank 1's
    learnt = (labels != IGNORED).sum()

    whole_loss = loss_sum(model, ids, labels, first=0, ranks=1) / learnt
    whole_loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    share = TOKENS // ranks
    mine = slice(rank * share, (rank + 1) * share)
    count = (labels[mine] != IGNORED).sum()
    dist.all_reduce(count)  # trained-on tokens of all parts
    loss = loss_sum(model, ids[mine], labels[mine], first=mine.start, ranks=ranks) / count
    loss.backward()
    dist.all_reduce(loss := loss.detach())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

    gradients = [parameter.grad for parameter in model.parameters()]
    difference = max((ours - whole).abs().max().item() for ours, whole in zip(gradients, expected, strict=True))
    formula = 2 * 4 * (ranks - 1) * share * WIDTH * 4 // ranks  # forward and back, q, k, v and output, fp32
    for each in range(ranks):
        dist.barrier()
        if rank == each:
            had = f"tokens {mine.start:2}-{mine.stop - 1:2}, {int((labels[mine] != IGNORED).sum()):2} of them learnt"
            print(f"rank {rank}: {had}; attended for {HEADS // ranks} of {HEADS} heads", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"a rank sent {Trade.sent:,} bytes; 8 (N-1)/N x T/N x C x 4 bytes = {formula:,}")
        print(f"against one process: loss {abs(loss - whole_loss).item():.0e}, gradients {difference:.0e}")
    assert abs(loss - whole_loss) < 1e-6, "the loss is not that of one process"
    assert difference < 1e-6, f"rank {rank}: the gradients are not those of one process"
    assert Trade.sent == formula, f"rank {rank} sent {Trade.sent} bytes, and not {formula}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
