"""A parameter server: no rank waits for the slowest. The price is stale gradients, and there is a remedy.

    torchrun --nproc_per_node 4 recipes/basics/parameter_server.py

The problem. In synchronous training every step waits for the slowest worker. Asynchronously, a server (rank 0) holds
the weights; each worker fetches them, computes a gradient, sends it, and fetches the new ones, at its own pace:

                      rank 0, the server:  w -= rate * g,  version += 1
        weights + version  |               |               |  gradient + the version it was computed on
                       worker 1        worker 2        worker 3 (slow)

Meanwhile other workers have changed the weights, so the gradient is right for old weights. Its staleness s is the
number of updates in between. With W workers its mean is W - 1 at any speeds; a slow worker's gradients are the stalest.
Time is simulated: a gradient takes 1 tick, the last worker's 10, and the server takes gradients in this order.

Why it hurts. On a parabola of curvature c, w -= rate * c * w converges for rate < 2 / c, but with gradients 2 updates
old only for rate < 0.62 / c: they point from where the weights were.

The remedy. Trust a gradient less the staler it is: rate / (1 + s). Zhang et al., Staleness-aware Async-SGD, arXiv
1511.05950, divide by s; 1 + s also works for s = 0, and is W on average, as in the mean of W synchronous gradients.

To try: LEARNING_RATE = 0.3 (stale gradients are then harmless); SLOW = 100 (what happens to ticks and staleness?).
"""

import argparse
import heapq
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

GRADIENTS, BATCH, LEARNING_RATE = 600, 32, 1.0  # the same number of gradients in every way of training
FAST, SLOW = 1, 10  # ticks that a gradient takes; the last worker is the slow one
STOP, LOOK_EVERY = -1.0, 12  # STOP replaces a version; the loss is measured after every 12 gradients
RATES = {  # the learning rate for a gradient of staleness s
    "synchronous": lambda s: LEARNING_RATE,  # s is 0
    "stale, the same rate": lambda s: LEARNING_RATE,
    "stale, rate / (1 + s)": lambda s: LEARNING_RATE / (1 + s),
}


def work(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """A worker's whole life. It does not know whether training is synchronous."""
    rank, workers, parameters = dist.get_rank(), dist.get_world_size() - 1, list(model.parameters())
    draw = torch.Generator().manual_seed(rank)
    message = torch.empty(sum(parameter.numel() for parameter in parameters) + 1)  # weights (n,) and their version
    while True:
        dist.recv(message, 0)
        if message[-1] == STOP:
            return
        nn.utils.vector_to_parameters(message[:-1], parameters)
        rows = torch.randint(1400 // workers, (BATCH,), generator=draw) * workers + rank - 1  # its own images
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        gradient = [each.flatten() for each in torch.autograd.grad(loss, parameters)]
        dist.send(torch.cat([*gradient, message[-1:]]), 0)  # with the version that it was computed on


def serve(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, rate: Callable, together: int) -> dict:
    """Train on GRADIENTS gradients, `together` of them per step, in the order they are ready; then stop the workers."""
    workers = range(1, dist.get_world_size())
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()  # (n,)
    under_way = [(FAST, worker) for worker in workers[:-1]] + [(SLOW, workers[-1])]  # a heap of when each will be ready
    message, version, staleness, losses = torch.empty(len(weights) + 1), 0, [], []
    for worker in workers:
        dist.send(torch.cat([weights, torch.zeros(1)]), worker)
    for _ in range(GRADIENTS // together):
        ready = [heapq.heappop(under_way) for _ in range(together)]
        for _, worker in ready:
            dist.recv(message, worker)
            staleness.append(version - int(message[-1]))
            weights -= rate(staleness[-1]) * message[:-1] / together
        version += together
        for _, worker in ready:
            dist.send(torch.cat([weights, torch.tensor([float(version)])]), worker)
            heapq.heappush(under_way, (ready[-1][0] + (SLOW if worker == workers[-1] else FAST), worker))
        if version % LOOK_EVERY == 0:
            nn.utils.vector_to_parameters(weights, model.parameters())
            losses.append((ready[-1][0], nn.functional.cross_entropy(model(images[:1400]), labels[:1400]).item()))
    for worker in workers:  # each has one more gradient under way, which is too late
        dist.recv(message, worker)
        staleness.append(version - int(message[-1]))
        dist.send(torch.full_like(message, STOP), worker)
    accuracy = 100 * (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    return {"ticks": ready[-1][0], "staleness": staleness, "losses": losses, "accuracy": accuracy}


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) < 3:  # a single worker is never stale
        if speaks := os.environ.get("RANK", "0") == "0":
            told = "error: start it with: torchrun --nproc_per_node 4 recipes/basics/parameter_server.py"
            print(told, file=sys.stderr)
        sys.exit(2 if speaks else 0)  # if another rank failed first, torchrun would end rank 0 before it prints
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("runs/basics/parameter_server.png"))
    output = parser.parse_args().output
    dist.init_process_group("gloo")
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]  # (1797, 64) from 0 to 1, (1797,); 397 for the test
    workers, results = dist.get_world_size() - 1, {}
    for name, rate in RATES.items():
        torch.manual_seed(0)  # the same initial weights
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        if dist.get_rank() > 0:
            work(model, images, labels)
        else:
            results[name] = serve(model, images, labels, rate, workers if name == "synchronous" else 1)
    if dist.get_rank() == 0:
        tell(results)
        draw(results, output)
    dist.destroy_process_group()


def tell(results: dict) -> None:
    print(f"{GRADIENTS} gradients           ticks  staleness: mean  most    loss  accuracy")
    for name, row in results.items():
        mean, most = sum(row["staleness"]) / GRADIENTS, max(row["staleness"])
        print(f"{name:22}{row['ticks']:7,}{mean:17.2f}{most:6}{row['losses'][-1][1]:8.3f}{row['accuracy']:9.1f}%")
    print("The last run's gradients by staleness:", dict(sorted(Counter(row["staleness"]).items())))
    synchronous, stale, mended = results.values()
    assert set(synchronous["staleness"][:GRADIENTS]) == {0}, "a synchronous gradient was stale"
    assert stale["ticks"] == mended["ticks"] < synchronous["ticks"] / 5, "waiting for the slowest cost little"
    total = (dist.get_world_size() - 2) * GRADIENTS  # exactly, since the late gradients are counted too
    assert sum(stale["staleness"]) == sum(mended["staleness"]) == total, "the mean is not W - 1"
    assert stale["accuracy"] < synchronous["accuracy"] - 5, "staleness did no harm"
    assert abs(mended["accuracy"] - synchronous["accuracy"]) < 3, "the mend did not help"


def draw(results: dict, output: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left = figure.add_subplot(1, 2, 1, xlabel="ticks", ylabel="training loss", yscale="log")
    for name, row in results.items():
        left.plot(*zip(*row["losses"], strict=True), label=name)
    left.legend()
    right = figure.add_subplot(1, 2, 2, xlabel="staleness: updates in between", ylabel="gradients", yscale="log")
    right.hist(row["staleness"], bins=range(max(row["staleness"]) + 2), align="left")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
