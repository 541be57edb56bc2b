"""What holds while a recipe imports the stack, from its command line to `start`. Never imports torch."""

from __future__ import annotations

import gc
import os

from finetune.run.run import Run

EAGER = "TORCHDYNAMO_DISABLE"


def begin_imports(run: Run) -> None:
    """To be called by a process that is ours alone; a notebook's is not.

    Nothing that a library's import makes is garbage before the process ends. Python would look through it again and
    again.

    Where bitsandbytes is installed, peft brings it in and transformers' Trainer peft. It wraps four of its functions
    in `torch.compile`, for which torch imports all of Inductor (bitsandbytes 0.50, backends/default/ops.py,
    _try_torch_compile). torch leaves them as they are where this variable is set. They serve quantized weights and
    optimizers, of which this run must have none.
    """
    gc.disable()
    if not uses_bitsandbytes(run) and EAGER not in os.environ:
        os.environ[EAGER] = "1"
        _set.append(EAGER)


def end_imports() -> None:
    """To be called in `start`, before any work. What has been imported is left out of all later collections, too."""
    while _set:
        del os.environ[_set.pop()]
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def uses_bitsandbytes(run: Run) -> bool:
    """Whether weights or optimizer may be quantized: a quantized checkpoint trains by an adapter alone."""
    optimizer = str(run.value("optim") or "")
    return bool(run.value("use_peft") or run.value("load_in_4bit") or "bit" in optimizer or "bnb" in optimizer)


_set: list[str] = []
