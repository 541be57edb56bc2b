"""How to run, whatever is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.run.flag import FILE, NAME_OR_PATH, OUTPUT
from finetune.run.range import AT_LEAST_ONE


@dataclass
class RunArguments:
    """How to run, beside what the Trainer's arguments say."""

    config: str | None = field(
        default=None, metadata={"help": "YAML file of flat flag: value lines; flags overrule it", "path": FILE}
    )
    deepspeed_config: str | None = field(
        default=None, metadata={"help": "the same as --deepspeed", "path": NAME_OR_PATH}
    )
    nvme_path: str | None = field(
        default=None, metadata={"help": "folder on a fast disk for NVMe offload", "path": OUTPUT}
    )
    disable_check: list[str] | None = field(
        default=None, metadata={"help": "codes of docs/check.md that are not looked for in the DeepSpeed config"}
    )
    resume: str | None = field(
        default=None,
        metadata={
            "help": "'auto', or the checkpoint folder to go on from; 'allow': 'auto' if there is one, else start"
        },
    )
    resume_changed: str = field(
        default="refuse",
        metadata={
            "help": "allow: go on although data, seed or the like differ from the checkpoint's (docs/checkpoints.md)",
            "choices": ("refuse", "allow"),
        },
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "delete the run that output_dir holds"})
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "evaluations without improvement", "range": AT_LEAST_ONE}
    )
    group_by_length: bool = field(default=True, metadata={"help": "batches of like length, so that little is padding"})
    activation_checkpoint_interval: int | None = field(
        default=None,
        metadata={
            "help": "compute every k-th layer's activations again in the backward pass, to save memory; 1: all",
            "range": AT_LEAST_ONE,
        },
    )
