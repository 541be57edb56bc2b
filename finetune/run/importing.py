"""Speeds up a recipe's imports, from its command line to `start`. Never imports torch."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from finetune.run.run import Run

EAGER = "TORCHDYNAMO_DISABLE"
CPP_LOG = "TORCH_CPP_LOG_LEVEL"
LOMO = "lomo_optim"


def begin_imports(run: Run) -> None:
    """Call it only in a process of our own, not in a notebook.

    Objects made by importing a library live until the process ends, but the garbage collector would scan them again
    and again.

    If bitsandbytes is installed, transformers' Trainer imports peft, and peft imports bitsandbytes. It wraps four of
    its functions in `torch.compile`, for which torch imports all of Inductor (bitsandbytes 0.50,
    backends/default/ops.py, _try_torch_compile). With this variable set, torch leaves them uncompiled. Only quantized
    weights and optimizers use them, so the variable is set only for runs without these.

    torch's C++ code warns on every rank of the same things, such as DDP of `find_unused_parameters` (torch 2.13,
    csrc/distributed/c10d/reducer.cpp, prepare_for_backward). Only the first rank of a host shows these warnings; errors
    are shown by all. torch reads the level as it is imported (c10/util/Logging.cpp).

    In each step, accelerate searches all of `sys.path` twice for an optimizer's package that hardly anyone has (1.15,
    optimizer.py, step). Python does not search for a module whose entry in `sys.modules` is None (The import system,
    5.3.1), which saves 0.13 ms a step.
    """
    gc.disable()
    if LOMO not in sys.modules and find_spec(LOMO) is None:
        sys.modules[LOMO] = None  # type: ignore[assignment]
    if run.launch.local_rank and CPP_LOG not in os.environ:
        os.environ[CPP_LOG] = "ERROR"
        _set.append(CPP_LOG)
    if not uses_bitsandbytes(run) and EAGER not in os.environ:
        os.environ[EAGER] = "1"
        _set.append(EAGER)


def end_imports() -> None:
    """Call it in `start`, before any work. The garbage collector also ignores the imported objects from here on."""
    while _set:
        del os.environ[_set.pop()]
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextmanager
def left_uncompiled() -> Iterator[None]:
    """What is imported within wraps its functions in `torch.compile` without effect."""
    before = os.environ.get(EAGER)
    os.environ[EAGER] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[EAGER]
        else:
            os.environ[EAGER] = before


def uses_bitsandbytes(run: Run) -> bool:
    """Whether weights or optimizer may be quantized: a quantized checkpoint can only train an adapter."""
    optimizer = str(run.value("optim") or "")
    return bool(run.value("use_peft") or run.value("load_in_4bit") or "bit" in optimizer or "bnb" in optimizer)


_set: list[str] = []
