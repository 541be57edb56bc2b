"""A parameter server: nobody waits for the slowest. The price is stale gradients, and there is a mend.

    torchrun --nproc_per_node 4 recipes/basics/parameter_server.py

The problem. In synchronous training every step waits for the slowest worker. Asynchronously, a server (rank 0) holds
the weights, and each worker takes them, computes a gradient, hands it in, and takes the new ones, at its own pace:

                          server: w -= rate * g,  version += 1
                         /           |            \\
       weights + version |           | gradient + the version it was computed on
                         |           |             |
                     worker 1    worker 2     worker 3 (slow)

Meanwhile the others have moved the weights: the gradient is right for weights that are gone. Its staleness s is the
number of updates in between: the server's version - the gradient's version. With W workers its mean is W - 1 at any
speeds: while one computes, the others hand in W - 1 gradients on average, and more for the slow one.

Why it hurts. On a parabola of curvature c, w -= rate * c * w converges for rate < 2 / c, but with gradients 2 updates
old only for rate < 0.62 / c: one steers by where one was. A rate that suits synchronous steps makes stale ones diverge.

The mend. Trust a gradient the less, the staler it is: rate / (1 + s). Zhang et al., Staleness-aware Async-SGD, arXiv
1511.05950, divide by s; 1 + s also serves s = 0, and is W on average, as in the mean of W synchronous gradients.

To try: LEARNING_RATE = 0.3 (stale gradients are then harmless, and faster); SLOW = 0.05, and the seconds and histogram.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

GRADIENTS, BATCH, LEARNING_RATE = 600, 32, 1.0  # as many gradients in every way of training
FAST, SLOW = (
    0.002,
    0.010,
)  # seconds that a worker takes longer, as if its part were larger; the last one is the slow one
MEASURE_EVERY = 20  # gradients
STOP = -1.0  # instead of a version

RATES = {  # the learning rate for a gradient of staleness s
    "synchronous": lambda s: LEARNING_RATE,
    "asynchronous": lambda s: LEARNING_RATE,
    "asynchronous, rate / (1 + s)": lambda s: LEARNING_RATE / (1 + s),
}


class Task:
    """Digits, and a small network whose weights are one vector (n,)."""

    def __init__(self) -> None:
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, labels = images[order].float() / 16, labels[order]  # (1797, 64) from 0 to 1, (1797,)
        self.images, self.labels = images[:1400], labels[:1400]
        self.test_images, self.test_labels = images[1400:], labels[1400:]
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.start = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def gradient(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        nn.utils.vector_to_parameters(weights, self.model.parameters())
        loss = nn.functional.cross_entropy(self.model(self.images[rows]), self.labels[rows])
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(self.model.parameters()))])

    @torch.no_grad()
    def measure(self, weights: torch.Tensor) -> tuple[float, float]:
        """Loss on the training images, accuracy on the others in percent."""
        nn.utils.vector_to_parameters(weights, self.model.parameters())
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        right = self.model(self.test_images).argmax(1) == self.test_labels
        return loss.item(), right.float().mean().item() * 100


def work(task: Task) -> None:
    """A worker's whole life: it does not know whether the others are waited for."""
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    draw = torch.Generator().manual_seed(rank)
    message = torch.empty(len(task.start) + 1)  # weights or gradient (n,), and a version
    while True:
        dist.recv(message, 0)
        weights, version = message[:-1], message[-1]
        if version == STOP:
            return
        rows = torch.randint(len(task.images) // workers, (BATCH,), generator=draw) * workers + rank - 1
        gradient = task.gradient(weights, rows)
        time.sleep(SLOW if rank == workers else FAST)
        dist.send(torch.cat([gradient, version.reshape(1)]), 0)


def serve(task: Task, rate: Callable, together: int) -> dict:
    """Train on GRADIENTS gradients, `together` of them in a step, from whoever comes first; then stop the workers."""
    workers = dist.get_world_size() - 1
    weights, version, began = task.start.clone(), 0, time.perf_counter()
    used, thrown_away = [], []  # the staleness of each gradient
    curve = [task.measure(weights)[0]]
    message = torch.empty(len(weights) + 1)
    for worker in range(1, workers + 1):
        dist.send(torch.cat([weights, torch.tensor([float(version)])]), worker)
    while workers > 0:
        step, came_from = torch.zeros_like(weights), []
        for _ in range(together):
            came_from.append(dist.recv(message))  # from anyone: who it was is the answer
            stale = version - int(message[-1])
            step += rate(stale) * message[:-1] / together
            (used if version < GRADIENTS else thrown_away).append(stale)
        answer = STOP
        if version < GRADIENTS:
            weights -= step
            version += together
            answer = float(version)
            if version % MEASURE_EVERY < together:
                curve.append(task.measure(weights)[0])
        else:  # each worker has one gradient under way: the end waits for that, and for nothing else
            workers -= together
        for worker in came_from:
            dist.send(torch.cat([weights, torch.tensor([answer])]), worker)
    loss, accuracy = task.measure(weights)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "used": used, "thrown": thrown_away, "curve": curve, "loss": loss, "accuracy": accuracy}


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) < 3:  # one worker alone is never stale
        print("start it with: torchrun --nproc_per_node 4 recipes/basics/parameter_server.py", file=sys.stderr)
        sys.exit(2)
    parser = argparse.ArgumentParser(
        description="Asynchronous training with a parameter server, on handwritten digits."
    )
    parser.add_argument("--output", type=Path, default=Path("runs/basics/parameter_server.png"))
    output = parser.parse_args().output
    dist.init_process_group("gloo")
    task, workers, results = Task(), dist.get_world_size() - 1, {}
    for name, rate in RATES.items():
        if dist.get_rank() > 0:
            work(task)
        else:
            results[name] = serve(task, rate, together=workers if name == "synchronous" else 1)
    if dist.get_rank() == 0:
        tell(results, workers)
        draw(results, output)
    dist.destroy_process_group()


def tell(results: dict, workers: int) -> None:
    print(f"{GRADIENTS} gradients from {workers} workers, one of them slow")
    print(f"{'':30} {'seconds':>8} {'staleness: mean':>16} {'most':>5} {'loss':>7} {'accuracy':>9}")
    for name, row in results.items():
        mean, most = sum(row["used"]) / len(row["used"]), max(row["used"])
        print(f"{name:30} {row['seconds']:8.1f} {mean:16.2f} {most:5} {row['loss']:7.3f} {row['accuracy']:8.1f}%")
    synchronous, stale, mended = results.values()
    print("\nHow stale the gradients were, in the last run:")
    for staleness, gradients in sorted(Counter(mended["used"]).items()):
        print(f"   {staleness:3}  {'#' * -(-gradients * 50 // GRADIENTS)} {gradients}")

    assert set(synchronous["used"]) == {0}, "a synchronous gradient was stale"
    for row in (stale, mended):  # exact, once the gradients that came after the end are counted too
        assert sum(row["used"]) + sum(row["thrown"]) == (workers - 1) * GRADIENTS, "the mean is not W - 1"
    assert stale["accuracy"] < synchronous["accuracy"] - 5, "staleness did no harm"
    assert abs(mended["accuracy"] - synchronous["accuracy"]) < 3, "the mend did not help"
    print(
        f"\nThe mean staleness is W - 1 = {workers - 1} (but for the last gradients). At the same rate stale gradients"
    )
    print("spoil the training; divided by 1 + s they end where the synchronous ones do, and nobody waited.")


def draw(results: dict, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, row in results.items():
        left.plot([MEASURE_EVERY * place for place in range(len(row["curve"]))], row["curve"], label=name)
    left.set(xlabel="gradients used", ylabel="training loss", yscale="log", title="Loss at equal numbers of gradients")
    left.legend()
    counts = Counter(results["asynchronous, rate / (1 + s)"]["used"])
    right.bar(list(counts), list(counts.values()))
    right.set(xlabel="staleness (updates in between)", ylabel="gradients", title="How stale they were, last run")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
