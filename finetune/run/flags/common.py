"""How to run, whatever is trained."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import FILE, NAME_OR_PATH, OUTPUT, flag
from finetune.run.on_resume import GOES_ON, VALUES
from finetune.run.range import AT_LEAST_ONE


@dataclass
class RunArguments:
    """How to run, beside what the Trainer's arguments say."""

    config: str | None = flag(None, "YAML file of flat flag: value lines; flags overrule it", GOES_ON, path=FILE)
    deepspeed_config: str | None = flag(None, "the same as --deepspeed", GOES_ON, path=NAME_OR_PATH)
    nvme_path: str | None = flag(None, "folder on a fast disk for NVMe offload", GOES_ON, path=OUTPUT)
    disable_check: list[str] | None = flag(
        None, "codes of docs/check.md that are not looked for in the DeepSpeed config", GOES_ON
    )
    resume: str | None = flag(
        None, "'auto', or the checkpoint folder to go on from; 'allow': 'auto' if there is one, else start", GOES_ON
    )
    resume_changed: str = flag(
        "refuse",
        "allow: go on although data, seed or the like differ from the checkpoint's (docs/checkpoints.md)",
        GOES_ON,
        choices=("refuse", "allow"),
    )
    overwrite_output_dir: bool = flag(False, "delete the run that output_dir holds", GOES_ON)
    early_stopping_patience: int | None = flag(None, "evaluations without improvement", GOES_ON, range=AT_LEAST_ONE)
    group_by_length: bool = flag(True, "batches of like length, so that little is padding", VALUES)
    activation_checkpoint_interval: int | None = flag(
        None,
        "compute every k-th layer's activations again in the backward pass, to save memory; 1: all",
        GOES_ON,
        range=AT_LEAST_ONE,
    )
