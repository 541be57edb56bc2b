"""What torch's flight recorder knows of collectives: the last one that a rank has joined in each process group, and,
from all ranks together, who has not joined one that others wait in.

The analyser that ships with torch (torch/distributed/flight_recorder) compares whole files of all ranks, prints, and
matches from the first entry on. Here each rank sends the end of its record within a heartbeat, so we compare numbers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import listed

PROBE_SECONDS = 1.0  # for a CUDA call that takes microseconds, unless another one blocks the device
GROUPS_AT_MOST = 3  # heartbeats must stay small: Movement takes more than 4 KiB a rank on rank 0 for work
NAME_LETTERS = 16  # hashed names of groups have 40
RANKS_NAMED = 4
# c10/core/ScalarType.h: the others are the same in lower case.
DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16",
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
}  # fmt: skip
UNEVEN = ("all_to_all", "alltoall", "scatter", "gather")  # ranks give tensors of different sizes


@dataclass(frozen=True)
class Joined:
    """The last collective that a rank has put on a process group, for example `all_reduce` number 42, `of 1,024
    float32`, in `gloo's default group`."""

    group: str
    number: int
    operation: str
    of: str
    under_way: bool

    def __str__(self) -> str:
        of = f" {self.of}" if self.of else ""
        return f"{self.operation} number {self.number:,}{of} in {self.group}"


class Recorder:
    """Reads the recorders of this process: gloo's and, in builds with CUDA, NCCL's, which is another one. Make it in
    the main thread, and read in one other thread. The threads that it starts are added to `watchers`.

    torch reads NCCL's with Python's interpreter lock held (torch/csrc/distributed/c10d/init.cpp, 2.13) and asks a CUDA
    event whether each pending collective has ended (FlightRecorderDetail.hpp, update_state). Where the device is
    blocked, that would stop all of Python, heartbeats too. So a call that releases the lock (cudaMemGetInfo,
    torch/csrc/cuda/shared/cudart.cpp) goes first, in a thread of its own, and nothing is read until it comes back."""

    def __init__(self, watchers: set[int]) -> None:
        self.watchers = watchers
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.probe: threading.Thread | None = None
        self.has_answered = False

    def read(self) -> tuple[Joined, ...]:
        """() where this torch, or its setting (TORCH_FR_BUFFER_SIZE), records nothing."""
        from torch._C import _distributed_c10d as c10d

        entries: list[dict[str, Any]] = []
        if hasattr(c10d, "_dump_fr_trace_json"):
            entries += json.loads(c10d._dump_fr_trace_json(True, False)).get("entries", [])
        if hasattr(c10d, "_dump_nccl_trace_json") and self._device_answers():
            torch.cuda.set_device(self.device)  # of this thread: events would make a context on the first device
            entries += json.loads(c10d._dump_nccl_trace_json(True, False)).get("entries", [])
        return last_joined(entries)

    def _device_answers(self) -> bool:
        if self.device is None or (self.probe and self.probe.is_alive()):
            return False
        self.has_answered = False
        self.probe = threading.Thread(target=self._ask_device, daemon=True)
        self.probe.start()
        self.probe.join(PROBE_SECONDS)
        return self.has_answered

    def _ask_device(self) -> None:
        self.watchers.add(threading.get_native_id())
        with suppress(RuntimeError):  # of a device that has failed
            torch.cuda.mem_get_info(self.device)
            self.has_answered = True


def last_joined(entries: Iterable[Mapping[str, Any]]) -> tuple[Joined, ...]:
    """Of each group, from the recorders' entries, oldest first; those under way and the newest ones, if there are more
    than GROUPS_AT_MOST. Sends and receives count in pairs of ranks, and are left out."""
    last: dict[str, tuple[int, Joined]] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        backend, _, operation = entry["profiling_name"].partition(":")
        name, description = entry["process_group"]
        its = "default group" if description == "default_pg" else f"group {name[:NAME_LETTERS]}"
        group, under_way = f"{backend}'s {its}", not entry["retired"] and entry["state"] != "completed"
        operation = operation.strip("_")
        of = "" if operation.startswith(UNEVEN) else _of(entry)
        joined = Joined(group, int(entry["collective_seq_id"]), operation, of, under_way)
        if group not in last or joined.number >= last[group][1].number:
            last[group] = entry["time_created_ns"], joined
    newest = sorted(last.values(), key=lambda one: (one[1].under_way, one[0]), reverse=True)
    return tuple(joined for _, joined in newest[:GROUPS_AT_MOST])


def _of(entry: Mapping[str, Any]) -> str:
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    if not sizes or not sizes[0]:
        return ""
    more = f" and {len(sizes) - 1} more" * (len(sizes) > 1)
    return f"of {' x '.join(f'{size:,}' for size in sizes[0])} {DTYPES.get(dtypes[0], dtypes[0].lower())}{more}"


def say_who_is_behind(joined: Mapping[int, tuple[Joined, ...]], name_of: Callable[[int], str]) -> str:
    """Begins with "; ", or "": of each group whose newest collective is under way, the ranks that have joined fewer, or
    another one of the same number, or else those that wait in it. Of a rank without a record, nothing is said."""
    by_group: dict[str, dict[int, Joined]] = {}
    for rank, found in sorted(joined.items()):
        for one in found:
            by_group.setdefault(one.group, {})[rank] = one
    return "".join(f"; {said}" for said in (_say(by_rank, name_of) for by_rank in by_group.values()) if said)


def _say(by_rank: Mapping[int, Joined], name_of: Callable[[int], str]) -> str:
    newest = max(one.number for one in by_rank.values())
    there = {rank: one for rank, one in by_rank.items() if one.number == newest and one.under_way}
    if not there:
        return ""
    behind = [rank for rank, one in by_rank.items() if one.number < newest]
    if behind:
        return f"{_names(behind, name_of)} not joined {next(iter(there.values()))}"
    kinds: dict[str, list[int]] = {}
    for rank, one in there.items():
        kinds.setdefault(str(one), []).append(rank)
    said = " but ".join(f"{_names(ranks, name_of)} joined {one}" for one, ranks in kinds.items())
    return f"{said}, which has not ended" if len(kinds) == 1 else said


def _names(ranks: list[int], name_of: Callable[[int], str]) -> str:
    return f"{listed([*map(name_of, ranks)], RANKS_NAMED)} {'has' if len(ranks) == 1 else 'have'}"
