"""The cost of what the recipes' trainer adds to each step: the NaN guard alone, and all of it (guard, speed meter,
losses, callbacks), measured in pairs of steps with and without it; and a heartbeat alone.

    OMP_NUM_THREADS=1 python benchmarks/guards.py                       # GPT-lite and DistilBERT on one CPU process
    torchrun --nproc_per_node 2 benchmarks/guards.py --models gptlite   # DDP

What is measured is switched on and off from step to step of one training run, so that other work on the machine affects
both alike. Prints the median ratio of neighboring steps, the middle half of 1,000 bootstrap medians, the same of the
difference in milliseconds, and the median step without it. --json FILE writes them to a file.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import MethodType

from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments

from finetune.bench.data import MadeUp, build
from finetune.bench.models import find_model
from finetune.run.flags.guards import GuardArguments
from finetune.training.guards.pulse import Pulse
from finetune.training.loss import settle_loss_scaling
from finetune.training.trainer import FinetuneTrainer

SCALES = {"gptlite": 0.1, "distilbert": 0.25, "wide": 0.05}
LEFT_OUT = 10  # pairs at the start; of the others, even the slowest count


GUARD, ALL = "guard", "all"
# Methods of ours that every step calls. Not `floating_point_ops`, with which the Trainer's own is slower.
EACH_STEP = ("get_batch_samples", "training_step", "compute_loss", "_prepare_inputs", "_get_grad_norm")


class Switch(TrainerCallback):
    """Switches the guard, or all of ours, off for every other step, and times the steps."""

    def __init__(self, trainer: FinetuneTrainer, what: str) -> None:
        self.trainer, self.suspect, self.what = trainer, trainer.suspect, what
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.start, self.is_on = 0.0, True
        self.callbacks = list(trainer.callback_handler.callbacks)

    def on_train_begin(self, args, state, control, **kwargs):
        self.callbacks = list(self.trainer.callback_handler.callbacks)
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.seconds[self.is_on].append(now - self.start)
        self.is_on = not self.is_on
        self.trainer.suspect = self.suspect if self.is_on else None
        kept = [one for one in self.callbacks if self.is_on or not self.is_ours(one)]
        self.trainer.callback_handler.callbacks = kept  # not in place: the handler is going through the list
        for name in EACH_STEP if self.what == ALL else ():
            if self.is_on:
                delattr(self.trainer, name)
            else:
                setattr(self.trainer, name, MethodType(getattr(Trainer, name), self.trainer))
        self.start = time.perf_counter()

    def is_ours(self, callback: TrainerCallback) -> bool:
        if self.what == GUARD:
            return callback is self.trainer.nan_guard
        return type(callback).__module__.startswith("finetune.")


def measured(name: str, steps: int, batch: int, what: str) -> list[tuple[float, float]]:
    """Seconds of each step with `what` and of its neighbor without it."""
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
        switch = Switch(trainer, what)
        trainer.add_callback(switch)
        trainer.train()
    return list(zip(switch.seconds[True], switch.seconds[False], strict=False))[LEFT_OUT:]


def spread(values: list[float]) -> tuple[float, float, float]:
    """The median, and the middle half of bootstrap medians."""
    draw = random.Random(1)
    again = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return statistics.median(values), again[250], again[750]


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
        kept["models"][name] = {}
        for what in (GUARD, ALL):
            pairs = measured(name, asked.steps, asked.batch, what)
            row = {"pairs": len(pairs), "step_seconds": statistics.median(off for _, off in pairs)}
            row |= {"ratio": spread([on / off for on, off in pairs])}
            row |= {"more_seconds": spread([on - off for on, off in pairs])}
            kept["models"][name][what] = row
            if not distributed.is_initialized() or distributed.get_rank() == 0:
                said = "{:+.2f}% ({:+.2f} to {:+.2f})".format(*(100 * (one - 1) for one in row["ratio"]))
                more = "{:+.3f} ms ({:+.3f} to {:+.3f})".format(*(1e3 * one for one in row["more_seconds"]))
                print(f"{name}, {what}: {said} of a step of {1e3 * row['step_seconds']:.1f} ms, {more}", flush=True)
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        kept["heartbeat_cpu_seconds"] = heartbeat()
        print(f"heartbeat: {1e3 * kept['heartbeat_cpu_seconds']:.2f} ms of CPU time per second")
        if asked.json:
            asked.json.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
