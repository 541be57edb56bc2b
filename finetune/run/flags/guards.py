"""The flags that decide what a run does about a fault, and which of them a layout does not support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE, Range, flag
from finetune.run.flags.compression import KEEPS_ERRORS
from finetune.run.launch import Launch
from finetune.run.on_resume import APPLIED, GOES_ON

if TYPE_CHECKING:
    from finetune.run.run import Run

POLICIES = ("stop", "skip", "rollback", "off")
SAVES = ("auto", "on", "off")  # whether to write checkpoints in the background
WORTH_BYTES = 256 * 2**20  # `auto` writes checkpoints of this size and more in the background
SHORTEST_HANG_SECONDS = 5.0  # heartbeats come once a second, and a busy machine delays them


@dataclass
class GuardArguments:
    """What a run does about a fault; docs/faults.md says what is detected and how."""

    hang_timeout: float = flag(
        45.0,
        "end the run if a rank sends no heartbeat for this many seconds (at most 40), and name a rank that makes no "
        "progress for as long while others wait for it; 0: never",
        GOES_ON,
        range=Range(least=SHORTEST_HANG_SECONDS, others={0: "to wait forever"}),
    )
    hang_blame: bool = flag(
        False, "also end the run if a rank sends heartbeats but makes no progress for --hang_timeout seconds", GOES_ON
    )
    on_nan: str = flag(
        "stop",
        f"what to do if the loss or a gradient is not finite: {', '.join(POLICIES)} (docs/faults.md)",
        APPLIED,
        choices=POLICIES,
    )
    nan_limit: int = flag(
        3, "end the run after this many skipped or rolled-back steps in 1000", APPLIED, range=AT_LEAST_ONE
    )
    stop_grace: float = flag(
        600.0,
        "seconds that ranks may take to save after a signal to stop; then the run ends; 0: no limit",
        GOES_ON,
        range=NOT_NEGATIVE,
    )
    async_save: str = flag(
        "auto",
        "on or yes: write checkpoints while training continues, from a copy in host memory; auto: if it pays off and "
        "memory allows, on the CPUs of one host; off or no: training waits (docs/checkpoints.md)",
        GOES_ON,
        choices=SAVES,
    )


def saves_beside_from(asked: str, device: str, launch: Launch) -> int | None:
    """Bytes from which a checkpoint is written while training continues, by the value of --async_save; None: never.
    `auto` leaves out what has not been tested: copies from GPUs, and ranks on several hosts."""
    is_tested = device == "cpu" and launch.world_size == launch.local_world_size
    return {"on": 0, "auto": WORTH_BYTES if is_tested else None}.get(asked)


def guard_faults(run: Run) -> Iterator[str]:
    """Policies that this run cannot follow."""
    policy, hook = run.value("on_nan"), run.value("ddp_comm_hook")
    if policy in ("skip", "rollback") and hook in KEEPS_ERRORS:
        yield (
            f"{run.said('on_nan')}, and {run.said('ddp_comm_hook')}: the hook keeps what it has not sent yet for later "
            "steps, and a NaN in it stays. Use --on_nan stop and then --resume allow, or another hook."
        )
    if policy == "rollback" and run.value("save_strategy") == "no":
        yield (
            f"{run.said('on_nan')}, which goes back to a checkpoint, but {run.said('save_strategy')}, which saves "
            "none. Give --save_strategy steps or epoch."
        )
    if policy == "rollback" and run.value("save_only_model"):
        yield (
            f"{run.said('on_nan')}, which goes back to weights and optimizer states, but "
            f"{run.said('save_only_model')}, which saves none of these. Drop one."
        )
