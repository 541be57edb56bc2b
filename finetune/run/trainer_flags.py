"""The flags of the Trainer's `TrainingArguments`, from a snapshot that a test compares with the installed release."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from finetune.run.flag import AT_LEAST_ONE, FILE, NAME_OR_PATH, NOT_NEGATIVE, OUTPUT, POSITIVE, RATE, STEPS, Flag, Range
from finetune.run.on_resume import OF_TRAINER
from finetune.run.schedules import Schedule
from finetune.run.snapshot import snapshot

PATHS = {
    "output_dir": OUTPUT,
    "deepspeed": NAME_OR_PATH,
    **dict.fromkeys(("accelerator_config", "fsdp_config", "liger_kernel_config"), FILE),  # unless it is an object
}
MORE_CHOICES = {"lr_scheduler_type": tuple(one.value for one in Schedule)}
# For flags where the first sentence of the upstream help does not say what to give.
HELPS = {
    "output_dir": "folder of the run: its model, checkpoints, results and logs",
    "deepspeed": "DeepSpeed config: a name in ds_configs/ (zero2), a JSON file, or none; launchers set a default",
    "max_steps": "train for this many steps, instead of num_train_epochs",
    "report_to": "trackers to log to, e.g. wandb tensorboard; all; or none",
    "seed": "random seed of the model, the data order and dropout",
}
# Outside these, the Trainer, torch or numpy fails with a traceback, or does something unintended.
RANGES = {
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon", "eval_delay"), NOT_NEGATIVE),
    "max_grad_norm": Range(least=0, endless=True),  # infinity: the norm is measured but not clipped
    **dict.fromkeys(("dataloader_num_workers", "neftune_noise_alpha"), NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), RATE),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), AT_LEAST_ONE),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps", "ddp_timeout"), AT_LEAST_ONE),
    **dict.fromkeys(("torch_empty_cache_steps", "dataloader_prefetch_factor", "ddp_bucket_cap_mb"), AT_LEAST_ONE),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), STEPS),
    **dict.fromkeys(("seed", "data_seed"), Range(least=0, below=2**32)),  # numpy's
    "warmup_steps": Range(least=0, share=True),
    "max_steps": Range(least=1, others={-1: "for whole epochs"}),
    "num_train_epochs": POSITIVE,
    "save_total_limit": NOT_NEGATIVE,
}


@cache
def trainer_flags() -> tuple[Flag, ...]:
    rows = snapshot()["flags"]
    return tuple(Flag(**{**row, **_ours(row["name"], row["help"], row.get("choices", ()))}) for row in rows)


def _ours(name: str, help: str, choices: Sequence[str]) -> dict[str, Any]:
    every = (*choices, *MORE_CHOICES.get(name, ()))
    return {
        "choices": every,
        "path": PATHS.get(name),
        "range": RANGES.get(name),
        "on_resume": OF_TRAINER[name],
        "help": HELPS.get(name, help),
    }
