"""Processes with this folder on PYTHONPATH start side by side, but use the GPU one after the other: before it
initializes CUDA, each waits for the file that GPU_TURNS names, and holds it until it ends. Importing torch,
transformers and DeepSpeed takes longer than many a measurement, and a GPU may be paid for by the second."""

import fcntl
import os

if os.environ.get("GPU_TURNS"):
    import torch

    _initialize, _held = torch.cuda._lazy_init, []

    def _in_turn() -> None:
        if not _held:
            file = open(os.environ["GPU_TURNS"], "w")  # noqa: SIM115 - held until the process ends
            fcntl.flock(file, fcntl.LOCK_EX)
            _held.append(file)
        _initialize()

    torch.cuda._lazy_init = _in_turn
