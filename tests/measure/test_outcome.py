"""How a run has ended, told from its exit status and its log."""

from __future__ import annotations

import signal

import pytest

from finetune.measure.outcome import CRASHED, DONE, OOM, TIMEOUT, UNSUPPORTED, Outcome, outcome_of

TRACEBACK = """{0}Traceback (most recent call last):
{0}  File "recipes/benchmark.py", line 1, in <module>
{0}{1}
"""
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TORCHRUN = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
  exitcode  : {0}
  traceback : {1}
"""


def raised(line: str, rank: str = "") -> str:
    return TRACEBACK.format(rank, line)


@pytest.mark.parametrize(
    ("status", "log", "expected"),
    [
        (0, raised(CUDA), Outcome(DONE)),
        (1, raised(CUDA), Outcome(OOM, "out of memory")),
        (1, raised("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
         Outcome(OOM, "out of memory")),
        (1, raised("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 3 TiB"),
         Outcome(OOM, "out of memory")),
        (1, raised("MemoryError"), Outcome(OOM, "out of memory")),
        (-signal.SIGKILL, "", Outcome(OOM, "out of memory")),
        (1, TORCHRUN.format(-9, "Signal 9 (SIGKILL) received by PID 7"), Outcome(OOM, "out of memory")),
        (1, raised("RuntimeError: Connection closed by peer", "[rank0]: ") + raised(CUDA, "[rank1]: "),
         Outcome(OOM, "out of memory")),
        (1, "warning: cudaMalloc ran out of memory, and tries again\n" + raised("ValueError: no such layer"),
         Outcome(CRASHED, "ValueError: no such layer")),
        (1, raised(CUDA) + "smaller buckets are tried\n" + raised("ValueError: no such layer"),
         Outcome(CRASHED, "ValueError: no such layer")),
        (1, "[W] NotImplementedError is what Unable to JIT load means\n" + raised("ValueError: no"),
         Outcome(CRASHED, "ValueError: no")),
        (1, raised("KeyError: 'x'") + "\nDuring handling of the above exception\n\n" + raised("ValueError: no x"),
         Outcome(CRASHED, "ValueError: no x")),
        (1, raised("ValueError: no", "[rank0]: ") + TORCHRUN.format(1, "none"),
         Outcome(CRASHED, "[rank0]: ValueError: no")),
        (1, raised("ValueError: no") + "Exception ignored in: <function end at 0x7>\n" + raised("AttributeError: gone"),
         Outcome(CRASHED, "ValueError: no")),
        (1, raised("NotImplementedError: no such kernel"), Outcome(UNSUPPORTED, "NotImplementedError: no such kernel")),
        (1, raised("RuntimeError: Unable to JIT load it"), Outcome(UNSUPPORTED, "RuntimeError: Unable to JIT load it")),
        (2, "error: zeropp.json: no GPU\n", Outcome(UNSUPPORTED, "error: zeropp.json: no GPU")),
        (1, "error: no GPU\n" + TORCHRUN.format(2, "none"), Outcome(UNSUPPORTED, "error: no GPU")),
        (None, raised(CUDA), Outcome(TIMEOUT, "not done after 60 s")),
        (1, "", Outcome(CRASHED, "no output")),
        (1, "first\nlast words\n", Outcome(CRASHED, "last words")),
    ],
)  # fmt: skip
def test_the_last_exception_of_a_rank_says_what_became_of_it(status: int | None, log: str, expected: Outcome) -> None:
    assert outcome_of(status, log, 60) == expected
