"""What the guards cost: the NaN guard in pairs of steps, with it and without, and a heartbeat by itself.

    OMP_NUM_THREADS=1 python benchmarks/guards.py                       # GPT-lite and DistilBERT on one CPU process
    torchrun --nproc_per_node 2 benchmarks/guards.py --models gptlite   # DDP

The guard is switched on and off from step to step of one training, so that what else the machine does meets both alike.
Printed is the median of the ratios of neighbouring steps, and the middle half of 1,000 medians drawn from them anew.
--json FILE keeps these.
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
LEFT_OUT = 10  # steps at the start, and then the slowest of each kind count as any other


class Switch(TrainerCallback):
    """Every other step without the guard; where a step begins and ends is the clock's to say."""

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
    """The ratio of a step with the guard to its neighbour without."""
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
    """The median, and the middle half of medians of as many drawn anew."""
    draw = random.Random(1)
    again = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), again[250], again[750]


def heartbeat() -> float:
    """Seconds of CPU of one look and one exchange, of which there is one a second."""
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
        print(f"heartbeat: {1e3 * kept['heartbeat_cpu_seconds']:.2f} ms of CPU a second")
        if asked.json:
            asked.json.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
