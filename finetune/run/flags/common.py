"""Flags that all recipes share."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import AT_LEAST_ONE, NAME_OR_PATH, OUTPUT, SHIPPED_YAML, flag
from finetune.run.on_resume import GOES_ON, VALUES


@dataclass
class RunArguments:
    """How to run, in addition to the Trainer's arguments."""

    config: str | None = flag(
        None,
        "YAML file with one `flag: value` per line, or a shipped one's name; flags on the command line win",
        GOES_ON,
        path=SHIPPED_YAML,
    )
    deepspeed_config: str | None = flag(None, "the same as --deepspeed", GOES_ON, path=NAME_OR_PATH)
    nvme_path: str | None = flag(None, "folder on a fast disk, for NVMe offload", GOES_ON, path=OUTPUT)
    disable_check: list[str] | None = flag(
        None, "codes of docs/check.md to skip when the DeepSpeed config is checked", GOES_ON
    )
    resume: str | None = flag(
        None,
        "auto: the last checkpoint in output_dir; allow: the same, or start if there is none; or a checkpoint folder",
        GOES_ON,
    )
    resume_changed: str = flag(
        "refuse",
        "allow: resume even if data, seed and the like differ from the checkpoint's (docs/checkpoints.md)",
        GOES_ON,
        choices=("refuse", "allow"),
    )
    overwrite_output_dir: bool = flag(False, "delete the run that is in output_dir", GOES_ON)
    early_stopping_patience: int | None = flag(
        None, "early stopping: end after this many evaluations without improvement", GOES_ON, range=AT_LEAST_ONE
    )
    group_by_length: bool = flag(True, "put samples of similar length into a batch, to save padding", VALUES)
    activation_checkpoint_interval: int | None = flag(
        None,
        "activation checkpointing of every k-th layer: saves memory, and costs time; 1: every layer",
        GOES_ON,
        range=AT_LEAST_ONE,
    )
