"""What is said of the flight recorder's entries; torch's own recorder, with gloo; and a device that is blocked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO
from torch._C import _distributed_c10d as c10d

from finetune.training.guards import flight
from finetune.training.guards.flight import Joined, Recorder, last_joined, say_who_is_behind

# As torch 2.13 wrote it for gloo; NCCL's differs in the name and the state (FlightRecorderDetail.hpp, dump_json).
ENTRY = {
    "collective_seq_id": 5,
    "input_dtypes": ["Float"],
    "input_sizes": [[1024]],
    "is_p2p": False,
    "op_id": 5,
    "output_dtypes": ["Float"],
    "output_sizes": [[1024]],
    "p2p_seq_id": 0,
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "gloo:all_reduce",
    "record_id": 4,
    "retired": True,
    "state": "scheduled",
    "thread_id": "140336586541952",
    "thread_name": "python",
    "time_created_ns": 1795855455052699198,
    "time_discovered_completed_ns": 0,
    "time_discovered_started_ns": 0,
    "timeout_ms": 1800000,
}
ENDED = Joined("gloo's default group", 41, "all_reduce", "of 1,024 float32", False)
WAITS = Joined("gloo's default group", 42, "all_reduce", "of 1,024 float32", True)
GATHERS = Joined("gloo's default group", 42, "all_gather", "of 8 float32", True)


def entry(**values: Any) -> dict[str, Any]:
    return {**ENTRY, **values}


def name_of(rank: int) -> str:
    return f"rank {rank}"


@pytest.mark.parametrize(
    ("values", "said", "under_way"),
    [
        ({}, "all_reduce number 5 of 1,024 float32 in gloo's default group", False),
        ({"retired": False}, "all_reduce number 5 of 1,024 float32 in gloo's default group", True),
        (
            {
                "profiling_name": "nccl:_all_gather_base",
                "process_group": ["12", "undefined"],
                "input_sizes": [[2, 3072], [8]],
                "input_dtypes": ["BFloat16", "Float"],
                "retired": False,
                "state": "started",
            },
            "all_gather_base number 5 of 2 x 3,072 bfloat16 and 1 more in nccl's group 12",
            True,
        ),
        (
            {"retired": False, "state": "completed"},
            "all_reduce number 5 of 1,024 float32 in gloo's default group",
            False,
        ),
        (
            {"profiling_name": "nccl:all_to_all", "input_sizes": [[10, 5]], "collective_seq_id": "7"},
            "all_to_all number 7 in nccl's default group",
            False,
        ),
        (
            {"profiling_name": "gloo:barrier", "input_sizes": [], "input_dtypes": []},
            "barrier number 5 in gloo's default group",
            False,
        ),
    ],
    ids=["ended", "under way", "NCCL's", "NCCL's that its watchdog has not seen", "uneven", "without a tensor"],
)
def test_an_entry_is_said_in_words(values: dict[str, Any], said: str, under_way: bool) -> None:
    (joined,) = last_joined([entry(**values)])
    assert str(joined) == said
    assert joined.under_way is under_way


def test_of_each_group_the_last_collective_counts_and_of_many_groups_those_under_way_and_the_newest() -> None:
    groups = [entry(process_group=[str(n), "undefined"], time_created_ns=n) for n in range(1, 6)]
    groups[0]["retired"] = False
    groups.append(entry(process_group=["5", "undefined"], collective_seq_id=6, time_created_ns=9))
    groups.append(entry(process_group=["5", "undefined"], collective_seq_id=7, is_p2p=True, time_created_ns=10))
    found = [(joined.group[-1], joined.number) for joined in last_joined(groups)]
    assert found == [("1", 5), ("5", 6), ("4", 5)]


@pytest.mark.parametrize(
    ("joined", "said"),
    [
        (
            {0: (WAITS,), 1: (ENDED,)},
            "; rank 1 has not joined all_reduce number 42 of 1,024 float32 in gloo's default group",
        ),
        (
            {0: (WAITS,), 1: (GATHERS,)},
            "; rank 0 has joined all_reduce number 42 of 1,024 float32 in gloo's default group"
            " but rank 1 has joined all_gather number 42 of 8 float32 in gloo's default group",
        ),
        (
            {**dict.fromkeys(range(5), (WAITS,)), 5: (GATHERS,)},
            "; rank 0, rank 1, rank 2, rank 3 and 1 more have joined all_reduce number 42 of 1,024 float32"
            " in gloo's default group but rank 5 has joined all_gather number 42 of 8 float32 in gloo's default group",
        ),
        (
            {0: (WAITS,), 2: (WAITS,)},
            "; rank 0, rank 2 have joined all_reduce number 42 of 1,024 float32 in gloo's default group,"
            " which has not ended",
        ),
        (
            {0: (WAITS,), **dict.fromkeys(range(1, 7), (ENDED,))},
            "; rank 1, rank 2, rank 3, rank 4 and 2 more have not joined all_reduce number 42 of 1,024 float32"
            " in gloo's default group",
        ),
        ({0: (ENDED,), 1: (ENDED,)}, ""),
        ({0: (), 1: ()}, ""),
        ({}, ""),
    ],
    ids=[
        "one is behind",
        "two collectives",
        "one of six in another collective",
        "all are there",
        "many are behind",
        "none is under way",
        "none",
        "no rank",
    ],
)
def test_what_is_said_of_all_ranks(joined: dict[int, tuple[Joined, ...]], said: str) -> None:
    assert say_who_is_behind(joined, name_of) == said


def test_torchs_own_recorder_is_read_and_a_torch_without_one_has_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process of its own: the recorder keeps what earlier groups of a process have joined."""
    script = f"""
import torch
from torch import distributed
from finetune.training.guards.flight import Recorder
distributed.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=0, world_size=1)
for _ in range(3):
    distributed.all_reduce(torch.ones(7, 5))
(joined,) = Recorder(set()).read()
print(joined.operation, joined.of, joined.number)
distributed.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^all_reduce of 7 x 5 float32 [3-9]$", done.stdout, re.MULTILINE)
    monkeypatch.delattr(c10d, "_dump_fr_trace_json")
    assert Recorder(set()).read() == ()


def test_nccls_recorder_is_read_unless_the_device_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a stand-in: there is none here."""
    blocked, asked = threading.Event(), []
    dump = json.dumps({"entries": [entry(profiling_name="nccl:all_reduce")]}).encode()
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda *_: dump, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *_: b"{}")
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: None)
    monkeypatch.setattr(flight, "PROBE_SECONDS", 0.05)
    recorder = Recorder(set())
    assert recorder.read() == ()  # CUDA is not in use
    recorder.device = 3
    assert [str(joined) for joined in recorder.read()] == [
        "all_reduce number 5 of 1,024 float32 in nccl's default group"
    ]
    assert asked == [3]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: blocked.wait(20))
    assert recorder.read() == ()
    probe = recorder.probe
    assert recorder.read() == ()
    assert recorder.probe is probe  # no second one while the first has not come back
    blocked.set()


def failed(device: int) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_has_failed_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", failed)
    recorder = Recorder(set())
    recorder.device = 0
    assert not recorder._device_answers()
