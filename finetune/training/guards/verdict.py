"""Where each rank's main thread is, and which rank therefore blocks the run. No threads or networking in this file."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from finetune.training.guards.flight import Joined, say_who_is_behind

SILENT_SECONDS = 40.0  # heartbeats come once a second, from a thread that waits for nothing
COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/deepspeed/comm/", "/deepspeed/ops/comm/")
BACKWARD = "_engine_run_backward"  # torch/autograd/graph.py: DDP and ZeRO wait for their collectives in it
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Where one rank may wait for a disk or a service for as long as that takes, while the others wait for it. In a
# user-space file system (FUSE), an fsync or a rename waits in state S, which looks idle.
PATIENT_STEPS = {
    "/finetune/training/checkpoints/": "saves or deletes a checkpoint",
    "/finetune/training/pipeline/checkpoint.py": "saves or loads a checkpoint",
    "/finetune/training/hub.py": "talks to the hub",
    "/huggingface_hub/": "talks to the hub",
    "/fsspec/": "reads over the network",
    "/datasets/utils/file_utils.py": "reads over the network",  # it waits 5 s for a server, up to 20 times
    "/transformers/integrations/integration_utils.py": "talks to a tracker",
}


@dataclass(frozen=True)
class Position:
    """`where` is for people: the innermost function, and the innermost one outside any library. `collective` names the
    transfer in which the thread waits, or "". `key` changes whenever the thread has moved."""

    where: str
    collective: str
    key: str
    patient: str = ""  # why waiting here is not a fault; "" if it is one


@dataclass(frozen=True)
class Heartbeat:
    """What a rank tells the others. `still_seconds`: since its main thread last moved; `idle_seconds`: since anything
    in the process last moved (CPU time, bytes, a disk wait). `has_stepped`: a step since this start. `joined`: its
    collectives, once it has stood still for a while."""

    rank: int
    number: int
    position: Position
    still_seconds: float
    idle_seconds: float
    has_left: bool = False
    has_stepped: bool = True
    joined: tuple[Joined, ...] = ()


def position_of(thread: int) -> Position:
    """The position of the thread with this ident."""
    frame = sys._current_frames().get(thread)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    if not frames:
        return Position("its end", "", "")
    inner = _words(frames[0])
    own = next((f for f in frames if not f.f_code.co_filename.startswith((*LIBRARIES, "<"))), None)
    where = inner if own is None or own is frames[0] else f"{inner}, called by {_words(own)}"
    key = " ".join(f"{id(f)}:{f.f_lasti}" for f in frames)
    files = [f.f_code.co_filename for f in frames]
    patient = next((what for part, what in PATIENT_STEPS.items() if any(part in file for file in files)), "")
    return Position(where, _collective(frames), key, patient)


def _collective(frames: list[FrameType]) -> str:
    if frames[0].f_code.co_name == BACKWARD:
        return "backward"
    found = [f for f in frames if any(part in f.f_code.co_filename for part in COLLECTIVES)]
    # The call sits inside wrappers of torch and DeepSpeed.
    named = [f.f_code.co_name for f in found if f.f_code.co_name not in ("wrapper", "log_wrapper", "inner", "decorate")]
    return named[-1].strip("_") if named else ""


def _words(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({'/'.join(path.parts[-2:])}:{frame.f_lineno})"


@dataclass(frozen=True)
class Verdict:
    """`ranks` are to blame; empty if all wait for one another. `said` is one sentence. A verdict by stillness can be
    wrong, because the rank may wait for a slow service; a verdict by silence means that no heartbeat arrived."""

    ranks: tuple[int, ...]
    said: str
    by_stillness: bool = True


def judge(
    beats: Mapping[int, Heartbeat], ages: Mapping[int, float], limit: float, name_of: Callable[[int], str]
) -> Verdict | None:
    """`ages` are the seconds since each rank's last heartbeat, by the judging rank's clock.

    A rank is to blame if it sends no heartbeat for `limit` (at most SILENT_SECONDS), or if its process has been idle
    for `limit` outside any collective while another rank waits. If all are idle in collectives, no rank is to blame,
    and the collectives are named. A rank is never blamed while it computes or moves bytes, before its first step, or
    while it saves or talks to a hub or a tracker, however long that takes. What the flight recorder knows is added to
    what is said, and blames nobody.
    """
    silence = min(limit, SILENT_SECONDS)
    left = {rank for rank, beat in beats.items() if beat.has_left}
    silent = [rank for rank, age in sorted(ages.items()) if age >= silence and rank not in left]
    if silent:
        names = _join([_silent(beats.get(rank), name_of(rank), ages[rank]) for rank in silent])
        heard = {rank: beat for rank, beat in beats.items() if rank not in left and rank not in silent}
        return Verdict(tuple(silent), names + _behind(heard, name_of), by_stillness=False)
    there = {rank: beat for rank, beat in sorted(beats.items()) if rank not in left}
    stuck = [rank for rank, beat in there.items() if beat.idle_seconds >= limit and _is_a_fault(beat)]
    waiting = [rank for rank, beat in there.items() if beat.still_seconds >= limit and rank not in stuck]
    if stuck and waiting:
        still = {rank: f"has not moved for {there[rank].idle_seconds:.0f} s (--hang_timeout)" for rank in stuck}
        names = _join([f"{name_of(rank)} {still[rank]}, in {there[rank].position.where}" for rank in stuck])
        others = _join([f"{name_of(rank)} in {_place(there[rank])}" for rank in waiting[:4]])
        behind = _behind(there, name_of)
        return Verdict(tuple(stuck), f"{names}; {others} {'waits' if len(waiting) == 1 else 'wait'} for it{behind}")
    idle = [beat for beat in there.values() if beat.idle_seconds >= limit and beat.position.collective]
    if not len(idle) == len(there) > 1:
        return None
    names = _join([f"{name_of(rank)} in {_place(beat)}" for rank, beat in there.items()])
    behind = _behind(there, name_of)
    if len({beat.position.where for beat in there.values()}) > 1:
        return Verdict((), f"the ranks wait for one another in different places: {names}{behind}")
    said = f"all ranks wait in one place, and no data moves between them ({names}): check the network"
    return Verdict((), said + behind)


def _behind(beats: Mapping[int, Heartbeat], name_of: Callable[[int], str]) -> str:
    return say_who_is_behind({rank: beat.joined for rank, beat in beats.items()}, name_of)


def _is_a_fault(beat: Heartbeat) -> bool:
    """Whether waiting there is a fault. In a collective, a rank waits for others."""
    return beat.has_stepped and not beat.position.collective and not beat.position.patient


def _silent(beat: Heartbeat | None, name: str, age: float) -> str:
    at = f"; it stood in {_place(beat)}" if beat and beat.position.where else ""
    return f"{name} has not responded for {age:.0f} s (stopped, or its host is gone){at}"


def _place(beat: Heartbeat) -> str:
    position = beat.position
    return f"{position.collective} [{position.where}]" if position.collective else position.where


def _join(parts: list[str]) -> str:
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"
