"""Large tensors on a CPU: how often the kernel is asked for memory, counted, not timed."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from finetune.training import kept_memory
from finetune.training.kept_memory import keep_freed_memory, stop_keeping_freed_memory

glibc = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="this system has another malloc than glibc's"
)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ELEMENTS = 16_777_216  # 64 MiB, above what malloc keeps by itself (32 MiB)
FAULTS = f"""
import resource
from finetune.training.kept_memory import keep_freed_memory
import torch
keep_freed_memory()
found = []
for turn in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({ELEMENTS})
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(found))  # another thread may fault in pages of its own meanwhile
"""


HELD = """
import mmap
from types import SimpleNamespace
from finetune.training.kept_memory import SETTLING_STEPS, KeptMemory, own_bytes
import torch
kept = KeptMemory()
kept.on_train_begin(SimpleNamespace(device=torch.device("cpu")), None, None)
def step(mib):
    tensors = [torch.ones(2**20) for _ in range(mib // 4)]
    fence = torch.ones(64)  # above them in the heap
    del tensors
    before = own_bytes()
    kept.on_step_end(None, None, None)
    print(before >> 20, own_bytes() >> 20)
    return fence
fences = [step(256) for _ in range(SETTLING_STEPS)]
fences += [step(320), step(2048), step(320)]
shared = mmap.mmap(-1, 2**31)
shared.write(bytes(2**31))
fences += [step(320)]
before = own_bytes()
kept.on_evaluate(None, None, None)
print(before >> 20, own_bytes() >> 20)
"""

STOPPED = """
from finetune.training.kept_memory import keep_freed_memory, own_bytes, stop_keeping_freed_memory
import torch
keep_freed_memory()
def freed(mib):
    tensors = [torch.ones(2**20) for _ in range(mib // 4)]
    fence = torch.ones(64)  # above them in the heap
    del tensors
    print(own_bytes() >> 20)
    return fence
fences = [freed(4), freed(200)]
stop_keeping_freed_memory()
print(own_bytes() >> 20)
large = torch.ones(2**26)  # does not fit into what the others left
del large
print(own_bytes() >> 20)
"""


def faults(env: dict[str, str]) -> int:
    return int(printed(FAULTS, env)[-1])


def held(env: dict[str, str]) -> list[list[int]]:
    """MiB in the process before and after each call of the callback."""
    return [[int(word) for word in line.split()] for line in printed(HELD, env)]


def printed(program: str, env: dict[str, str]) -> list[str]:
    configured = ("THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES", "MALLOC_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(configured)}
    done = subprocess.run([sys.executable, "-c", program], env=inherited | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@glibc
@pytest.mark.parametrize("setting", [{"MALLOC_ARENA_TEST": "8"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_test=8"}])
def test_a_freed_tensor_is_not_faulted_in_again_unless_the_user_configures_malloc(setting: dict[str, str]) -> None:
    pages = ELEMENTS * 4 // PAGE_BYTES
    assert faults({}) < pages / 50
    assert faults(setting) > pages / 2


@glibc
def test_a_process_gives_freed_memory_back_once_it_has_grown_by_half_and_after_an_evaluation() -> None:
    *_, (settled, _), (little, kept), (grown, left), _, (_, again), (_, evaluated) = held({})
    assert kept == little > settled, "in MiB"
    assert grown > 1.5 * settled
    assert left < settled
    assert evaluated < settled < again, "what is shared, as 2 GiB were before `again`, does not count"


@glibc
def test_nothing_is_given_back_if_the_user_configures_malloc() -> None:
    *_, (grown, left), _, _, (kept, evaluated) = held({"MALLOC_TRIM_THRESHOLD_": str(2**40)})
    assert left >= 0.9 * grown
    assert evaluated == kept


@glibc
def test_a_process_that_keeps_nothing_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    libc = SimpleNamespace(
        mallopt=lambda *what: asked.append(what) or 1, malloc_trim=lambda pad: asked.append((0, pad))
    )
    monkeypatch.setattr(kept_memory, "_glibc", lambda: libc)
    stop_keeping_freed_memory()
    assert asked == [], "as after a run on a GPU"
    keep_freed_memory()
    stop_keeping_freed_memory()
    assert (0, 0) in asked
    asked.clear()
    stop_keeping_freed_memory()
    assert asked == []


@glibc
def test_a_process_that_lives_on_gives_back_what_a_run_kept_and_keeps_no_more() -> None:
    before, kept, stopped, freed = (int(line) for line in printed(STOPPED, {}))
    assert kept > before + 180, "in MiB"
    assert stopped < before + 40
    assert freed < before + 40
