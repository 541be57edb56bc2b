"""The flags that say what becomes of a run that meets a fault, and which of them a layout cannot have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.errors import RequestError
from finetune.run.flags.compression import KEEPS_ERRORS

if TYPE_CHECKING:
    from finetune.run.run import Run

POLICIES = ("stop", "skip", "rollback", "off")
SHORTEST_HANG_SECONDS = 5.0  # heartbeats come once a second, and a busy machine delays them


@dataclass
class GuardArguments:
    """What becomes of a run that meets a fault; docs/faults.md says what is caught and how."""

    hang_timeout: float = field(
        default=45.0,
        metadata={
            "help": "seconds that a rank may stand still while others wait for it, and no more than 40 of them without "
            "a sign of life; then the run ends; 0: wait for ever"
        },
    )
    on_nan: str = field(
        default="stop",
        metadata={
            "help": f"where loss or gradients are not finite: {', '.join(POLICIES)} (docs/faults.md)",
            "choices": POLICIES,
        },
    )
    nan_limit: int = field(default=3, metadata={"help": "so many such steps of 1000 are skipped or rolled back"})
    stop_grace: float = field(
        default=600.0,
        metadata={"help": "seconds after a signal to stop until which ranks may save; then the run ends; 0: no end"},
    )


def check_guards(run: Run) -> None:
    """Raises RequestError for a policy that this run cannot keep to."""
    guards = run[GuardArguments]
    policy = guards.on_nan
    if guards.nan_limit < 1:
        raise RequestError(f"{run.said('nan_limit')}, but it must be 1 or more.")
    if guards.stop_grace < 0:
        raise RequestError(f"{run.said('stop_grace')}, but it must be 0 (no end) or more seconds.")
    hang = guards.hang_timeout
    if hang and hang < SHORTEST_HANG_SECONDS:
        raise RequestError(
            f"{run.said('hang_timeout')}, but it must be {SHORTEST_HANG_SECONDS:g} seconds or more (a busy machine "
            "delays a sign of life), or 0 to wait for ever."
        )
    hook = run.value("ddp_comm_hook")
    if policy in ("skip", "rollback") and hook in KEEPS_ERRORS:
        raise RequestError(
            f"--on_nan {policy} and --ddp_comm_hook {hook}: the hook keeps what it has not sent yet for later steps, "
            "and a NaN in it stays. Give --on_nan stop and --resume auto after it, or another hook."
        )
    if policy == "rollback" and run.value("save_strategy") == "no":
        raise RequestError("--on_nan rollback goes back to a checkpoint, and --save_strategy no saves none. Save some.")
    if policy == "rollback" and run.value("save_only_model"):
        raise RequestError(
            "--on_nan rollback goes back to weights and optimizer states, and --save_only_model saves none of these. "
            "Drop one."
        )
