"""The DeepSpeed config that accelerate builds from the fields of its own YAML or flags; checked like any other."""

from __future__ import annotations

import json
import os
from typing import Any

from finetune.dsconfig.check import check
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import named
from finetune.errors import RequestError

# Path in the DeepSpeed config -> accelerate's field, and the variable that `accelerate launch` passes it in (accelerate
# 1.15, utils/launch.py, prepare_deepspeed_cmd_env).
FIELDS = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
    "gradient_clipping": ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING"),
    "zero_optimization.stage": ("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
    "zero_optimization.offload_optimizer": (
        "offload_optimizer_device",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    ),
    "zero_optimization.offload_param": ("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "zero3_save_16bit_model",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    ),
}


def config_of_fields() -> dict[str, Any]:
    """The config as accelerate 1.15 builds it (utils/dataclasses.py, DeepSpeedPlugin.__post_init__)."""
    said = {place: os.environ.get(variable) for place, (_, variable) in FIELDS.items()}
    zero = "zero_optimization"
    clipping = _number(said["gradient_clipping"] or "auto")
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": _number(said["gradient_accumulation_steps"] or "auto"),
        zero: {
            "stage": _number(said[f"{zero}.stage"] or "2"),
            "offload_optimizer": {"device": said[f"{zero}.offload_optimizer"] or "none"},
            "offload_param": {"device": said[f"{zero}.offload_param"] or "none"},
            "stage3_gather_16bit_weights_on_model_save": (
                said[f"{zero}.stage3_gather_16bit_weights_on_model_save"] == "true"
            ),
        },
    }
    for what in ("offload_optimizer", "offload_param"):
        path = os.environ.get(f"ACCELERATE_DEEPSPEED_{what.upper()}_NVME_PATH", "none")
        if config[zero][what]["device"] == "nvme":
            config[zero][what]["nvme_path"] = path
        elif config[zero][what]["device"] == "none" and path != "none":
            config[zero][what] = {"nvme_path": path}  # for the check: a section with a path and no device
    return config | ({"gradient_clipping": clipping} if clipping else {})


def check_fields(run: Context, disabled: tuple[str, ...]) -> None:
    """Raises RequestError with every error in accelerate's fields for this run, under accelerate's names. The Trainer
    fills in what the fields leave open, and compares the rest with its arguments."""
    found = check(json.dumps(config_of_fields()), run, disabled).errors
    lines = []
    for placed in found:
        field, _ = FIELDS.get(named(placed.finding.path), ("", ""))
        where = f"accelerate's deepspeed_config{f', {field}' if field else ''}"
        lines.append(f"{where}: error {placed.finding.code}: {placed.finding.message}")
    if lines:
        raise RequestError("\n".join(lines))


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
