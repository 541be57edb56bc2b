"""What the peers' scripts write for benchmarks/peers.py: the seconds of each step, and peak memory."""

import json
import resource
import time
from pathlib import Path

import torch
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """A step is timed from the end of the previous one, so it includes waiting for data, as in the recipes."""

    def __init__(self):
        self.seconds, self.mark = [], None

    def on_step_begin(self, args, state, control, **kwargs):
        self.mark = self.mark or time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.seconds.append(now - self.mark)
        self.mark = now

    def write(self, result, **more):
        on_gpu = torch.cuda.is_available()
        peak = (
            torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        Path(result).write_text(json.dumps({"step_seconds": self.seconds, "peak_bytes": peak, **more}))
