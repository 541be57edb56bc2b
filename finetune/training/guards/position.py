"""Where a rank's main thread stands. Looked at from another thread."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

STEPS_OF_A_COLLECTIVE = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/deepspeed/comm/",
    "/deepspeed/ops/comm/",
)
BACKWARD = "_engine_run_backward"  # torch/autograd/graph.py: DDP's and ZeRO's collectives are waited for in it
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Where one rank may wait for a disk or a service, for as long as these take, while the others wait for it. A file
# system in user space (FUSE) has an fsync or a rename wait in state S, which looks like nothing.
PATIENT_STEPS = {
    "/finetune/training/checkpoints/": "saves or deletes a checkpoint",
    "/finetune/training/pipeline/checkpoint.py": "saves or loads a checkpoint",
    "/finetune/training/hub.py": "talks to the hub",
    "/huggingface_hub/": "talks to the hub",
    "/fsspec/": "reads over the network",
    "/datasets/utils/file_utils.py": "reads over the network",  # which waits 5 s, up to 20 times, for a server
    "/transformers/integrations/integration_utils.py": "talks to a tracker",
}


@dataclass(frozen=True)
class Position:
    """`where` is for people: the innermost function, and the innermost one that is of no library. `collective` names
    the transfer that is waited in; "" for none. `key` differs wherever the thread has moved."""

    where: str
    collective: str
    key: str
    patient: str = ""  # why it is no fault to stand here; "" where it is one


@dataclass(frozen=True)
class Report:
    """What a rank tells the others. `still_seconds`: since its main thread has moved; `idle_seconds`: since then, and
    nothing else moved in the process either (no CPU time, no bytes, no disk wait). `has_stepped`: since this start."""

    rank: int
    beat: int
    position: Position
    still_seconds: float
    idle_seconds: float
    has_left: bool = False
    has_stepped: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(content: dict[str, Any]) -> Report:
        return Report(**{**content, "position": Position(**content["position"])})


def position_of(thread: int) -> Position:
    """Of a thread by its ident."""
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
    return Position(where, _collective(frames), key, _patient(frames))


def _patient(frames: list[FrameType]) -> str:
    files = [frame.f_code.co_filename for frame in frames]
    return next((what for part, what in PATIENT_STEPS.items() if any(part in file for file in files)), "")


def _collective(frames: list[FrameType]) -> str:
    if frames[0].f_code.co_name == BACKWARD:
        return "backward"
    found = [f for f in frames if any(part in f.f_code.co_filename for part in STEPS_OF_A_COLLECTIVE)]
    # Wrappers of torch and DeepSpeed stand around the one that was asked for.
    named = [f.f_code.co_name for f in found if f.f_code.co_name not in ("wrapper", "log_wrapper", "inner", "decorate")]
    return named[-1].strip("_") if named else ""


def _words(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({'/'.join(path.parts[-2:])}:{frame.f_lineno})"
