"""What DeepSpeed's offload asks of the Trainer: an optimizer that works on states in CPU memory, and clipping."""

from __future__ import annotations

from typing import Any

from finetune.dsconfig.load import wants_cpu_adam, wants_trainer_clipping


def left_to_the_trainer(config: dict[str, Any]) -> dict[str, Any]:
    """What a DeepSpeed config must say instead where the Trainer clips, or brings the optimizer."""
    changes: dict[str, Any] = {}
    if wants_trainer_clipping(config):
        changes["gradient_clipping"] = 0.0  # once is enough
    if wants_cpu_adam(config):
        # accelerate 1.15 would make it anew as Adam, whose decay goes through the gradient, for it knows AdamW by
        # torch's class alone (utils/deepspeed.py, map_pytorch_optim_to_deepspeed).
        changes["zero_force_ds_cpu_optimizer"] = False
    return changes


def cpu_adam(args: Any) -> tuple[Any, dict[str, Any]]:
    """DeepSpeed's AdamW for states in CPU memory, with the Trainer's weight-decay groups: a section in the JSON would
    put weight decay on biases and norms too (transformers, integrations/deepspeed.py, deepspeed_optim_sched)."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    betas = (args.adam_beta1, args.adam_beta2)
    return DeepSpeedCPUAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "adamw_mode": True}
