"""Large tensors on a CPU: how often the kernel is asked for memory, counted, not timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ELEMENTS = 16_777_216  # 64 MiB, above what malloc keeps for reuse (32 MiB)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# As a recipe begins: `finetune` first, then all that the Trainer brings in, which makes tensors as it is imported.
FAULTS = f"""
import resource
from finetune.training.start import start
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones({ELEMENTS})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(env: dict[str, str], code: str = FAULTS) -> int:
    inherited = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", code], env=inherited | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not SETTING.is_file() or "[never]" in SETTING.read_text() or "[always]" in SETTING.read_text(),
    reason="this kernel gives huge pages to nobody, or to everybody, and not to those who ask",
)
def test_a_large_tensor_of_a_recipe_is_not_faulted_in_page_by_page_unless_the_user_says_so() -> None:
    pages = ELEMENTS * 4 // PAGE_BYTES
    assert faults({}) < pages / 4
    assert faults({"THP_MEM_ALLOC_ENABLE": "0"}) > pages / 2


MEDIUM = 786_432  # elements: 3 MiB, which with the alignment for huge pages always lie above malloc's own threshold
REUSED = f"""
import resource
from finetune.training import runtime
import torch
runtime.keep_freed_memory()
found = []
for turn in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({MEDIUM})
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(found))  # another thread may fault in pages of its own meanwhile
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="this system has another malloc than glibc's")
@pytest.mark.parametrize("setting", [{"MALLOC_ARENA_TEST": "8"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_test=8"}])
def test_a_freed_tensor_is_not_faulted_in_again_unless_the_user_configures_malloc(setting: dict[str, str]) -> None:
    pages = MEDIUM * 4 // PAGE_BYTES
    assert faults({}, REUSED) < pages / 50
    assert faults(setting, REUSED) > pages / 10
