"""Gradient compression: send a hundredth of the gradient, and still arrive. Four ways, on real handwritten digits.

    torchrun --nproc_per_node 2 recipes/basics/gradient_compression.py

The problem. In data parallelism every rank sends its whole gradient in every step: 4 bytes a parameter. On a slow
network the ranks wait longer than they compute. So send less:

    gradient g    0.9 -0.1  0.02 -0.7  0.3      bytes for n numbers   what goes over the wire
    top-k         0.9   .    .   -0.7   .       8 k                   the k largest, and their places
    random-k       .  -0.1   .     .   0.3      4 k                   k drawn by lot: one seed for all, so no places
    int8          0.9 -0.1  0.02 -0.7  0.3 (~)  n + 4                 round(g / scale), scale = max|g| / 127
    1-bit          +    -    +     -    +       n / 8 + 4             the signs, and mean|g|

What is thrown away never reaches the weights, and training stalls. The cure is **error feedback**: keep what was not
sent, and add it to the next gradient. Nothing is lost, it comes later:

    corrected = gradient + error;     send compress(corrected);     error = corrected - compress(corrected)

Sources: Seide et al. 2014, "1-bit stochastic gradient descent" (the idea); Stich et al., arXiv 1809.07599, algorithm 1
(top-k and random-k with memory); Karimireddy et al., arXiv 1901.09847, section 3 (why signs alone fail).

The catch. Whole gradients are added up on their way round a ring (ring_all_reduce.py), which sends less than twice the
gradient for any number of ranks N. Two top-k choices do not add up to one, so everybody must get everybody's message:
N - 1 times the bytes of the table. powersgd.py shows messages that add up.

To try: SHARE = 0.001; LEARNING_RATE = 0.3, and who gets away without feedback; 4 processes.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

STEPS, BATCH, LEARNING_RATE = 400, 32, 0.1
SHARE = 0.01  # of the gradient that top-k sends; random-k, which chooses blindly, sends five times as much
LINK = 100e6 / 8  # bytes a second of a 100 Mbit/s network
BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


# Each way takes the gradient g (n,), and gives the tensors to send, and how a receiver reads them: as (n,), nearly g.
def whole(g: torch.Tensor, step: int) -> tuple[list, Callable]:
    return [g], lambda g: g


def top_k(g: torch.Tensor, step: int) -> tuple[list, Callable]:
    places = g.abs().topk(int(SHARE * len(g))).indices  # (k,)
    return [g[places], places.int()], lambda values, places: torch.zeros_like(g).index_put((places.long(),), values)


def random_k(g: torch.Tensor, step: int) -> tuple[list, Callable]:
    same_lot = torch.Generator().manual_seed(step)  # on every rank
    places = torch.randperm(len(g), generator=same_lot)[: int(5 * SHARE * len(g))]  # (k,)
    return [g[places]], lambda values: torch.zeros_like(g).index_put((places,), values)


def int8(g: torch.Tensor, step: int) -> tuple[list, Callable]:
    scale = g.abs().max().reshape(1) / 127
    return [(g / scale).round().to(torch.int8), scale], lambda rounded, scale: rounded * scale


def one_bit(g: torch.Tensor, step: int) -> tuple[list, Callable]:
    positive = nn.functional.pad(g >= 0, (0, -len(g) % 8)).reshape(-1, 8)  # (n / 8, 8), eight signs to a byte
    packed = (positive * BITS).sum(1).to(torch.uint8)  # (n / 8,)

    def read(packed: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        signs = (packed[:, None] & BITS).flatten()[: len(g)] != 0  # (n,)
        return torch.where(signs, size, -size)

    return [packed, g.abs().mean().reshape(1)], read


WAYS = {  # and the bytes of a message for n numbers
    "uncompressed": (whole, lambda n: 4 * n),
    "int8": (int8, lambda n: n + 4),
    "random-k": (random_k, lambda n: 4 * int(5 * SHARE * n)),
    "1-bit": (one_bit, lambda n: math.ceil(n / 8) + 4),
    "top-k": (top_k, lambda n: 8 * int(SHARE * n)),
}


def train(way: str, feedback: bool, digits: list[torch.Tensor]) -> dict:
    """One run: the bytes of a message, milliseconds a step, final loss and test accuracy."""
    compress, formula = WAYS[way]
    images, labels, test_images, test_labels = digits
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights everywhere, and ...
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    draw = torch.Generator().manual_seed(rank)  # ... images of its own for each rank
    parameters = list(model.parameters())
    n = sum(parameter.numel() for parameter in parameters)
    error, sent, seconds = torch.zeros(n), 0, []
    for step in range(STEPS):
        began = time.perf_counter()
        rows = torch.randint(len(images) // ranks, (BATCH,), generator=draw) * ranks + rank
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])  # (n,)

        corrected = gradient + error
        message, read = compress(corrected, step)
        gathered = [[torch.empty_like(tensor) for _ in range(ranks)] for tensor in message]
        for everyones, tensor in zip(gathered, message, strict=True):
            dist.all_gather(everyones, tensor)
            sent += tensor.nbytes
        understood = [read(*of_rank) for of_rank in zip(*gathered, strict=True)]  # of each rank, (n,)
        if feedback:
            error = corrected - understood[rank]

        weights = nn.utils.parameters_to_vector(parameters).detach() - LEARNING_RATE * sum(understood) / ranks
        nn.utils.vector_to_parameters(weights, parameters)
        seconds.append(time.perf_counter() - began)
    assert sent == STEPS * formula(n), f"{way} sent {sent / STEPS} bytes a step, not {formula(n)}"
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels).item()
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    ms = 1e3 * statistics.median(seconds)
    slow = ms + 1e3 * sent / STEPS / LINK
    return {"bytes": sent / STEPS, "ms": ms, "slow ms": slow, "loss": loss, "accuracy": 100 * accuracy}


def main() -> None:
    if "RANK" not in os.environ:
        print("start it with: torchrun --nproc_per_node 2 recipes/basics/gradient_compression.py", file=sys.stderr)
        sys.exit(2)
    parser = argparse.ArgumentParser(description="Gradient compression, on handwritten digits.")
    parser.add_argument("--output", type=Path, default=Path("runs/basics/gradient_compression.png"))
    output = parser.parse_args().output
    dist.init_process_group("gloo")
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]  # (1797, 64) from 0 to 1, (1797,)
    digits = [images[:1400], labels[:1400], images[1400:], labels[1400:]]

    results = {}
    for way in WAYS:
        for feedback in (False,) if way == "uncompressed" else (True, False):
            name = way + ("" if way == "uncompressed" else " + feedback" if feedback else " alone")
            results[name] = train(way, feedback, digits)
    if dist.get_rank() == 0:
        tell(results)
        draw(results, output)
        check(results)
    dist.destroy_process_group()


def tell(results: dict) -> None:
    plain = results["uncompressed"]["bytes"]
    print(f"{'':20} {'bytes/step':>10} {'smaller':>8} {'ms here':>8} {'ms, slow net':>13} {'loss':>6} {'accuracy':>9}")
    for name, row in results.items():
        print(f"{name:20} {row['bytes']:10,.0f} {plain / row['bytes']:7.1f}x {row['ms']:8.1f}", end=" ")
        print(f"{row['slow ms']:13.1f} {row['loss']:6.3f} {row['accuracy']:8.1f}%")
    print("(slow net: the time here, and that of the bytes at 100 Mbit/s)\n")


def check(results: dict) -> None:
    """What the page teaches."""
    plain = results["uncompressed"]
    for name, row in results.items():
        if "feedback" in name:
            assert abs(row["accuracy"] - plain["accuracy"]) <= 2, f"{name}: {row['accuracy']:.1f}%"
        elif name not in ("uncompressed", "int8 alone"):
            assert row["accuracy"] < plain["accuracy"] - 2, f"{name} is as good as uncompressed"
    print("With error feedback every way comes within 2 points of uncompressed. Alone, top-k, random-k and 1-bit fall")
    print("behind; int8 does not: it throws little away.")


def draw(results: dict, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 4), sharey=True, layout="constrained")
    names = list(results)[::-1]  # barh begins at the bottom
    colours = ["tab:red" if "alone" in name else "tab:blue" if "feedback" in name else "tab:gray" for name in names]
    titles = ("bytes", "bytes of a message (log)"), ("slow ms", "ms a step at 100 Mbit/s"), ("accuracy", "accuracy, %")
    for axis, (key, title) in zip(axes, titles, strict=True):
        bars = axis.barh(names, [results[name][key] for name in names], color=colours)
        axis.bar_label(bars, fmt="{:,.0f}" if key == "bytes" else "{:.1f}", padding=3)
        axis.set_xlabel(title)
        axis.margins(x=0.2)
    axes[0].set_xscale("log")
    figure.suptitle(f"Gradient compression: handwritten digits, {dist.get_world_size()} ranks, {STEPS} steps")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
