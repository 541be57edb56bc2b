"""What is left over in a shell, or set by hand, and libraries would heed without a word. Each such variable is obeyed
and said, or refused. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from finetune.run.run import Run

ON = ("1", "true", "t", "yes", "y", "on")  # accelerate 1.15, utils/environment.py, str_to_bool
PRECISION, CPU = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"
PRECISIONS = ("no", "bf16", "fp16")
# Engines that recipes do not have, under any launcher; what else makes a run another one (accelerate 1.15, state.py,
# accelerator.py; transformers 5.23, training_args.py, _setup_devices).
SWITCHES = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_SAGEMAKER")
VALUES = {
    "ACCELERATE_TORCH_DEVICE": "--use_cpu True or CUDA_VISIBLE_DEVICES chooses the device",
    "ACCELERATE_DYNAMO_BACKEND": "--torch_compile_backend compiles the model",
}
# Fields of DeepSpeed's config, with which accelerate fills each "auto" of one that is given by flag (1.15,
# utils/dataclasses.py, DeepSpeedPlugin.__post_init__).
FIELDS = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_")


def left_over(run: Run, deepspeed: str | None) -> Iterator[str]:
    """What is wrong with the environment of a run, which trains by the DeepSpeed config of that name, if any."""
    yield from _of_any_launcher()
    if run.launch.launcher == "accelerate":
        return
    told = "accelerate launch has not started this run"
    if is_on("ACCELERATE_USE_DEEPSPEED") and not deepspeed:
        yield f"{_said('ACCELERATE_USE_DEEPSPEED')}, but {told}. Unset it, or give --deepspeed."
    if is_on("ACCELERATE_USE_FSDP"):
        yield f"{_said('ACCELERATE_USE_FSDP')}, but {told}. Unset it, or give --fsdp."
    fields = [name for name in sorted(os.environ) if name.startswith(FIELDS)]
    if run.value("fsdp"):
        fields += [name for name in sorted(os.environ) if name.startswith("FSDP_")]
    for name in fields:
        yield f"{_said(name)}, but {told}: it would change what the flags say. Unset it."


def _of_any_launcher() -> Iterator[str]:
    for name in filter(is_on, SWITCHES):
        yield f"{_said(name)}: recipes train by DeepSpeed, FSDP or DDP. Unset it, or change accelerate's config."
    for name, instead in VALUES.items():
        if os.environ.get(name, "no").lower() not in ("no", ""):
            yield f"{_said(name)}, which recipes do not heed: {instead}. Unset it, or change accelerate's config."
    if os.environ.get(PRECISION, "no").lower() not in PRECISIONS:
        yield f"{_said(PRECISION)}, but it must be one of {', '.join(PRECISIONS)}."


def obeyed(run: Run) -> Run:
    """The run as the environment asks for it, with notes of what that is."""
    if is_on(CPU) and not run.value("use_cpu"):
        run = run.settled(f"{CPU} in the environment", use_cpu=True)
        run = run.noted(f"note: {_said(CPU)}, so that this run keeps to the CPU.")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if run.launch.launcher == "python" and tasks != "1":
        run = run.noted(
            f"note: this is one of {tasks} tasks of a Slurm step, and each trains by itself. For one run of all "
            "of them let srun start torchrun (recipes/launch/slurm.sbatch)."
        )
    if run.launch.launcher != "accelerate" and os.environ.get(PRECISION, "no") != "no":
        run = run.noted(f"note: {_said(PRECISION)}; --bf16, --fp16 and a DeepSpeed config that states one overrule it.")
    return run


def is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ON


def _said(name: str) -> str:
    return f"{name} is {os.environ[name]!r} in the environment"
