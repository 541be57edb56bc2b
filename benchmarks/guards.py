"""The cost of the guards: the NaN guard, measured in pairs of steps with and without it, and a heartbeat alone.

    OMP_NUM_THREADS=1 python benchmarks/guards.py                       # GPT-lite and DistilBERT on one CPU process
    torchrun --nproc_per_node 2 benchmarks/guards.py --models gptlite   # DDP

The guard is switched on and off from step to step of one training run, so that other work on the machine affects both
alike. Prints the median ratio of neighboring steps, and the middle half of 1,000 bootstrap medians. --json FILE writes
them to a file.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from torch import distributed
from transformers import TrainerCallback, TrainingArguments

from finetune.bench.data import MadeUp, build
from finetune.bench.models import find_model
from finetune.run.flags.guards import GuardArguments
from finetune.training.guards.pulse import Pulse
from finetune.training.loss import settle_loss_scaling
from finetune.training.trainer import FinetuneTrainer

SCALES = {"gptlite": 0.1, "distilbert": 0.25, "wide": 0.05}
LEFT_OUT = 10  # pairs at the start; of the others, even the slowest count


class Switch(TrainerCallback):
    """Switches the guard off for every other step, and times the steps."""

    def __init__(self, trainer: FinetuneTrainer) -> None:
        self.trainer, self.suspect = trainer, trainer.suspect
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.start = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.seconds[self.trainer.suspect is not None].append(now - self.start)
        callbacks = self.trainer.callback_handler.callbacks
        if self.trainer.suspect is None:
            self.trainer.suspect = self.suspect
            callbacks.append(self.trainer.nan_guard)
        else:
            self.trainer.suspect = None
            callbacks.remove(self.trainer.nan_guard)
        self.start = time.perf_counter()


def measured(name: str, steps: int, batch: int) -> list[float]:
    """Ratios of a step with the guard to its neighbor without it."""
    model = find_model(name, SCALES[name])
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            logging_steps=steps,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        built = build(model, 1)
        settle_loss_scaling(built, label_per_token=name == "gptlite")
        guards = GuardArguments(hang_timeout=0, on_nan="stop", stop_grace=0)
        trainer = FinetuneTrainer(model=built, args=args, train_dataset=MadeUp(model, 4096, 1, False), guards=guards)
        switch = Switch(trainer)
        trainer.add_callback(switch)
        trainer.train()
    pairs = zip(switch.seconds[True], switch.seconds[False], strict=False)
    return [on / off for on, off in list(pairs)[LEFT_OUT:]]


def spread(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and the middle half of bootstrap medians."""
    draw = random.Random(1)
    again = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), again[250], again[750]


def heartbeat() -> float:
    """CPU seconds of one look and one exchange, which happen once per second."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    pulse = Pulse(store, 40.0, {}, str)
    pulse.others = range(0)
    times = 500
    start = time.process_time()
    for _ in range(times):
        pulse._look()
        pulse._exchange()
    return (time.process_time() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gptlite", "distilbert"], choices=list(SCALES))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    kept: dict = {"models": {}}
    for name in asked.models:
        ratios = measured(name, asked.steps, asked.batch)
        median, low, high = spread(ratios)
        kept["models"][name] = {"pairs": len(ratios), "median": median, "low": low, "high": high}
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            print(f"{name}: {100 * (median - 1):+.2f}% a step ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})")
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        kept["heartbeat_cpu_seconds"] = heartbeat()
        print(f"heartbeat: {1e3 * kept['heartbeat_cpu_seconds']:.2f} ms of CPU time per second")
        if asked.json:
            asked.json.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
