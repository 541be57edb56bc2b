"""On CPUs: keep the memory of freed tensors for the next step, within bounds."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from transformers import TrainerCallback

# Parameters of glibc's mallopt (malloc.h), and their values: tensors of up to 1 GiB, or else 32 MiB, come from the
# heap, which never shrinks by itself.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, KEPT_BYTES = -1, (2**30, 2**25)
OWN_MOST = 2**25  # glibc raises its threshold to the size of a freed tensor up to here, and trims above twice that
SETTLING_STEPS = 10  # after each trim, in which a process takes again what it needs
MOST_GROWTH = 1.5  # where lengths vary, the heap's free pieces are often too small for the next tensor


_keeping = set[bool]()  # not empty while freed memory is kept


def keep_freed_memory() -> ctypes.CDLL | None:
    """Make glibc's malloc keep the memory of freed tensors for the next step, and return glibc, or None if this is not
    glibc or the environment configures its malloc.

    Otherwise, tensors above its threshold, which grows up to 32 MiB, go back to the kernel when they are freed, and the
    kernel clears the pages of the next ones (glibc 2.36, malloc.c, munmap_chunk). Huge pages, which torch asks for with
    THP_MEM_ALLOC_ENABLE=1, then gain nothing, and cost memory where lengths vary (benchmarks/switches.py: memory).
    """
    libc = _glibc()
    # Older releases take at most 32 MiB. Without a threshold of ours, theirs would no longer grow.
    if libc is not None and any(libc.mallopt(M_MMAP_THRESHOLD, size) for size in KEPT_BYTES):
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
        _keeping.add(True)
    return libc


def stop_keeping_freed_memory() -> None:
    """If this process keeps freed memory, return it to the system, now and from now on, with the largest thresholds
    that glibc chooses by itself; its own would no longer grow. For a process that lives on."""
    libc = _glibc()
    if libc is not None and _keeping:
        _keeping.clear()
        libc.mallopt(M_MMAP_THRESHOLD, OWN_MOST)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * OWN_MOST)
        libc.malloc_trim(0)


class _Heap(ctypes.Structure):
    """struct mallinfo2 (malloc.h)."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free top".split()]


def heap_bytes() -> tuple[int, int] | None:
    """What malloc has given out, tensors included, and what its heaps hold free. None where it cannot tell (before
    glibc 2.33)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Heap
    found = libc.mallinfo2()
    return int(found.used + found.mapped), int(found.free)


def _glibc() -> ctypes.CDLL | None:
    given = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(n.startswith("MALLOC_") for n in os.environ)
    return None if "CS_GNU_LIBC_VERSION" not in os.confstr_names or given else ctypes.CDLL(None)


class KeptMemory(TrainerCallback):
    """Keeps freed memory, and returns it after evaluations and once the process has grown by half."""

    def __init__(self) -> None:
        self.libc: ctypes.CDLL | None = None
        self.settled_bytes, self.settling = 0, SETTLING_STEPS

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cpu":
            self.libc = keep_freed_memory()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.libc is None:
            return
        held = own_bytes()
        if self.settling > 0:
            self.settling -= 1
            self.settled_bytes = max(self.settled_bytes, held)
        elif held > MOST_GROWTH * self.settled_bytes:
            self.give_back()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.give_back()

    def give_back(self) -> None:
        if self.libc is not None:
            self.libc.malloc_trim(0)
            self.settling = SETTLING_STEPS


def own_bytes() -> int:
    """Resident memory of this process, without what it shares, such as an asynchronous save's copy, and without mapped
    files. Source: proc(5), /proc/pid/statm."""
    with open("/proc/self/statm", "rb", buffering=0) as file:  # in each step, a third of what Path.read_text() takes
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
