"""Large tensors on a CPU: how often the kernel is asked for memory, counted, not timed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ELEMENTS = 16_777_216  # 64 MiB, above what malloc keeps by itself (32 MiB)
FAULTS = f"""
import resource
from finetune.training import runtime
import torch
runtime.keep_freed_memory()
found = []
for turn in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({ELEMENTS})
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(found))  # another thread may fault in pages of its own meanwhile
"""


def faults(env: dict[str, str]) -> int:
    configured = ("THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES", "MALLOC_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(configured)}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=inherited | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="this system has another malloc than glibc's")
@pytest.mark.parametrize("setting", [{"MALLOC_ARENA_TEST": "8"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_test=8"}])
def test_a_freed_tensor_is_not_faulted_in_again_unless_the_user_configures_malloc(setting: dict[str, str]) -> None:
    pages = ELEMENTS * 4 // PAGE_BYTES
    assert faults({}) < pages / 50
    assert faults(setting) > pages / 2
