"""Gradient compression: send a hundredth of the gradient and still converge. Four ways, on real handwritten digits.

    torchrun --nproc_per_node 2 recipes/basics/gradient_compression.py

The problem. In data parallelism every rank sends its whole gradient in every step: 4 bytes per parameter. On a slow
network the ranks wait longer than they compute. So send less:

    gradient g    0.9 -0.1  0.02 -0.7  0.3      bytes for n numbers   what is sent
    top-k         0.9   .    .   -0.7   .       8 k                   the k largest, and their positions
    random-k       .  -0.1   .     .   0.3      4 k                   k at random: same seed on all, so no positions
    int8          0.9 -0.1  0.02 -0.7  0.3 (~)  n + 4                 round(g / scale), scale = max|g| / 127
    1-bit          +    -    +     -    +       n / 8 + 4             the signs, and mean|g|

What is dropped never reaches the weights, and training stalls. The remedy is error feedback: keep what was not sent,
and add it to the next gradient. Nothing is lost, it only arrives later:

    corrected = gradient + error;     send compress(corrected);     error = corrected - compress(corrected)

Sources: Seide et al. 2014, "1-bit stochastic gradient descent" (the idea); Stich et al., arXiv 1809.07599
(top-k and random-k with memory); Karimireddy et al., arXiv 1901.09847 (why signs alone fail).

The catch. A ring (ring_all_reduce.py) sums whole gradients for less than twice their bytes at any N. But the sum of two
top-k messages is not one: each rank must receive N - 1 messages. powersgd.py compresses in a form that can be summed.

To try: SHARE = 0.001; LEARNING_RATE = 0.3, and see which ways work without feedback.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

STEPS, BATCH, LEARNING_RATE = 250, 32, 0.2
SHARE = 0.01  # of the gradient that top-k sends; random-k, which chooses at random, sends five times as much
LINK = 100e6 / 8  # bytes a second of a 100 Mbit/s network
FALL_BEHIND = ("top-k alone", "random-k alone", "1-bit alone")  # in accuracy, by more than 2 points; the others do not
BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
MESSAGE_BYTES = {  # for n numbers
    "uncompressed": lambda n: 4 * n,
    "int8": lambda n: n + 4,
    "random-k": lambda n: 4 * int(5 * SHARE * n),
    "1-bit": lambda n: (n + 7) // 8 + 4,
    "top-k": lambda n: 8 * int(SHARE * n),
}


def compress(way: str, g: torch.Tensor, step: int) -> tuple:
    """From a gradient (n,): the tensors to send, and a function that decodes them to about g, (n,)."""
    nothing = torch.zeros_like(g)
    if way == "top-k":
        places = g.abs().topk(int(SHARE * len(g))).indices  # (k,)
        return [g[places], places.int()], lambda values, places: nothing.index_put((places.long(),), values)
    if way == "random-k":
        lot = torch.Generator().manual_seed(step)  # the same on every rank
        chosen = torch.randperm(len(g), generator=lot)[: int(5 * SHARE * len(g))]  # (k,)
        return [g[chosen]], lambda values: nothing.index_put((chosen,), values)
    if way == "int8":
        scale = g.abs().max().reshape(1) / 127
        return [(g / scale).round().to(torch.int8), scale], lambda rounded, scale: rounded * scale
    if way == "1-bit":
        signs = nn.functional.pad(g >= 0, (0, -len(g) % 8)).reshape(-1, 8)  # (n / 8, 8): eight to a byte
        message = [(signs * BITS).sum(1).to(torch.uint8), g.abs().mean().reshape(1)]
        return message, lambda packed, size: ((packed[:, None] & BITS).flatten()[: len(g)] != 0) * 2 * size - size
    return [g], lambda g: g


def train(way: str, feedback: bool, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """One run: bytes sent, time for them on a slow link, time of a step here, loss and accuracy."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights everywhere, and ...
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    parameters = list(model.parameters())
    draw = torch.Generator().manual_seed(rank)  # ... different images on each rank
    error, sent, seconds = torch.zeros(sum(parameter.numel() for parameter in parameters)), 0, []
    for step in range(STEPS):
        began = time.perf_counter()
        rows = torch.randint(1400 // ranks, (BATCH,), generator=draw) * ranks + rank
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        corrected = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)]) + error  # (n,)
        message, read = compress(way, corrected, step)
        gathered = [[torch.empty_like(tensor) for _ in range(ranks)] for tensor in message]
        for everyones, tensor in zip(gathered, message, strict=True):
            dist.all_gather(everyones, tensor)
            sent += tensor.nbytes
        arrived = [read(*of_one_rank) for of_one_rank in zip(*gathered, strict=True)]  # one (n,) from each rank
        error = corrected - arrived[rank] if feedback else error
        weights = nn.utils.parameters_to_vector(parameters).detach() - LEARNING_RATE * sum(arrived) / ranks
        nn.utils.vector_to_parameters(weights, parameters)
        seconds.append(time.perf_counter() - began)
    assert sent == STEPS * MESSAGE_BYTES[way](len(error)), f"{way} sent {sent / STEPS} bytes a step"
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images[:1400]), labels[:1400]).item()
        accuracy = 100 * (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    sizes = {"bytes a step": sent / STEPS, "ms, 100 Mbit/s": 1e3 * sent / STEPS / LINK}
    return {**sizes, "ms here": 1e3 * statistics.median(seconds), "loss": loss, "accuracy, %": accuracy}


def main() -> None:
    if "RANK" not in os.environ:
        print(
            "error: start it with: torchrun --nproc_per_node 2 recipes/basics/gradient_compression.py", file=sys.stderr
        )
        sys.exit(2)
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("runs/basics/gradient_compression.png"))
    output = parser.parse_args().output
    dist.init_process_group("gloo")
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]  # (1797, 64) from 0 to 1, (1797,); 397 for the test
    plain = train("uncompressed", False, images, labels)
    results = {"uncompressed": plain}
    for way in list(MESSAGE_BYTES)[1:]:
        for name, feedback in ((f"{way} + feedback", True), (f"{way} alone", False)):
            results[name] = train(way, feedback, images, labels)
            behind = results[name]["accuracy, %"] < plain["accuracy, %"] - 2
            assert behind == (name in FALL_BEHIND), f"{name}: {results[name]}, and uncompressed: {plain}"
    if dist.get_rank() == 0:
        print(" " * 19, *(f"{title:>14}" for title in plain))
        for name, row in results.items():
            print(f"{name:19}", *(f"{row[key]:14,.{3 if key == 'loss' else 1}f}" for key in row))
        print("Alone all fall behind but int8, which throws little away. With error feedback none does.")
        draw(results, output)
    dist.destroy_process_group()


def draw(results: dict, output: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    colours = ["tab:red" if "alone" in name else "tab:blue" if "feedback" in name else "tab:gray" for name in results]
    for place, (key, look) in enumerate({"bytes a step": ",.0f", "loss": ".3f", "accuracy, %": ".1f"}.items()):
        axis = figure.add_subplot(1, 3, place + 1, xlabel=key, xscale="log" if place < 2 else "linear", xmargin=0.4)
        bars = axis.barh(list(results), [row[key] for row in results.values()], color=colours)
        axis.bar_label(bars, fmt=f"{{:{look}}}", padding=3)
        axis.invert_yaxis()
        axis.tick_params(labelleft=place == 0)  # names only once
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
