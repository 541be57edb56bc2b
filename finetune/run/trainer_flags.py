"""The flags of the Trainer's `TrainingArguments`, from a snapshot that a test holds against the installed release."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from finetune.run.flag import FILE, NAME_OR_PATH, OUTPUT, Flag

SNAPSHOT = Path(__file__).with_name("training_arguments.json")
PATHS = {
    "output_dir": OUTPUT,
    "deepspeed": NAME_OR_PATH,
    **dict.fromkeys(("accelerator_config", "fsdp_config", "liger_kernel_config"), FILE),  # where it is no object
}


@cache
def trainer_flags() -> tuple[Flag, ...]:
    rows = json.loads(SNAPSHOT.read_text(encoding="utf-8"))["flags"]
    return tuple(
        Flag(**{**row, "choices": tuple(row.get("choices", ())), "path": PATHS.get(row["name"])}) for row in rows
    )
