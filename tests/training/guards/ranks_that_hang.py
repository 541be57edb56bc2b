"""One of two ranks without a model, for test_pulse.py: `python ranks_that_hang.py FOLDER RANK [--hang_blame]`. It takes
steps, each with a collective, and does what the folder tells it to: `slow` is a step of 3 s, the pipe `hang` one that
ends when something is written to it, and `fail` makes rank 0 fail."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed

from finetune.training.interruption import StopOnSignal
from finetune.training.watch import watching

FOLDER, RANK = Path(sys.argv[1]), int(sys.argv[2])


def train(stop: StopOnSignal) -> None:
    args, control = SimpleNamespace(device=SimpleNamespace(type="cpu")), SimpleNamespace(should_evaluate=False)
    with watching(lambda rank: f"rank {rank}", stop, FOLDER, 5.0, "--hang_blame" in sys.argv) as progress:
        step, gradient = 0, torch.ones(1024)
        while not (FOLDER / "end").exists():
            progress()
            step += 1
            if not RANK and (FOLDER / "fail").exists():
                raise RuntimeError("an error of its own")
            if RANK and (FOLDER / "slow").exists():
                (FOLDER / "slow").unlink()
                time.sleep(3)
            if RANK and (FOLDER / "hang").exists():
                (FOLDER / "hang").read_bytes()
                (FOLDER / "hang").unlink()
            distributed.all_reduce(gradient)
            stop.on_step_end(args, None, control)
            (FOLDER / f"steps-{RANK}").write_text(str(step))
            time.sleep(0.05)


if __name__ == "__main__":
    distributed.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting", rank=RANK, world_size=2)
    train(StopOnSignal())
    distributed.destroy_process_group()  # its threads may abort over Python's own end
