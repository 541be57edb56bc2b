"""Variables that are left over in a shell, or set by hand, and that libraries obey. A run obeys each and says so, or
refuses it. Never imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from finetune.run.launch import is_on
from finetune.run.run import Run

PRECISION, CPU = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"
PRECISIONS = ("no", "bf16", "fp16")
# Engines that recipes do not have, under any launcher; what else makes a run another one (accelerate 1.15, state.py,
# accelerator.py; transformers 5.23, training_args.py, _setup_devices).
SWITCHES = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
SAGEMAKER, DYNAMO = "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "ACCELERATE_DYNAMO_BACKEND"
DEVICE = "ACCELERATE_TORCH_DEVICE"
# By which a GPU's products of fp32 matrices are rounded: NVIDIA's libraries obey the first whatever --tf32 says (its
# page on TF32), and torch takes the second for its default (ATen/Context.h); older NGC images set it.
TF32 = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
# Fields of DeepSpeed's config, with which accelerate fills each "auto" of one that is given by flag (1.15,
# utils/dataclasses.py, DeepSpeedPlugin.__post_init__).
OF_DEEPSPEED_PLUGIN = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_")


def left_over(run: Run, deepspeed: str | None) -> Iterator[str]:
    """What is wrong with the environment of a run, which trains by the DeepSpeed config of that name, if any."""
    yield from _of_any_launcher(run)
    if run.launch.launcher == "accelerate":
        return
    told = "accelerate launch has not started this run"
    if is_on("ACCELERATE_USE_DEEPSPEED") and not deepspeed:
        yield f"{_said('ACCELERATE_USE_DEEPSPEED')}, but {told}. Unset it, or give --deepspeed."
    if is_on("ACCELERATE_USE_FSDP") and not run.value("fsdp"):
        yield f"{_said('ACCELERATE_USE_FSDP')}, but {told}. Unset it, or give --fsdp."
    fields = [name for name in sorted(os.environ) if deepspeed and name.startswith(OF_DEEPSPEED_PLUGIN)]
    if run.value("fsdp"):
        fields += [name for name in sorted(os.environ) if name.startswith("FSDP_")]
    if _backend() and not run.value("torch_compile"):
        yield f"{_said(DYNAMO)}, but {told}. Unset it, or give --torch_compile True."
    for name in fields:
        yield f"{_said(name)}, but {told}: it would change what the flags say. Unset it."


def _of_any_launcher(run: Run) -> Iterator[str]:
    for name in filter(is_on, SWITCHES):
        yield f"{_said(name)}: recipes train by DeepSpeed, FSDP or DDP. Unset it, or change accelerate's config."
    if is_on("ACCELERATE_USE_SAGEMAKER") and os.environ.get(SAGEMAKER, "NO").upper() != "NO":
        yield f"{_said(SAGEMAKER)}: recipes train by DeepSpeed, FSDP or DDP. Set it to NO."
    if os.environ.get(DEVICE, ""):
        yield f"{_said(DEVICE)}, which recipes do not obey. Unset it; --use_cpu chooses the CPU."
    if is_on(CPU) and run.given.get("use_cpu") is False:
        yield f"{_said(CPU)}, but {run.said('use_cpu')}. Unset it, or drop the flag."
    if precision() not in PRECISIONS:
        yield f"{_said(PRECISION)}, but it must be one of {', '.join(PRECISIONS)}."


def precision() -> str:
    """What accelerate's variable says: "no" where nobody chose."""
    return os.environ.get(PRECISION, "no").lower()


def _backend() -> str:
    """Of torch.compile, by accelerate's variable; "" for none."""
    found = os.environ.get(DYNAMO, "no").lower()
    return "" if found == "no" else found


def obeyed(run: Run) -> Run:
    """The run as the environment asks for it, with notes of what that is."""
    if is_on(CPU) and "use_cpu" not in run.given:
        run = run.settled(f"{CPU} in the environment", use_cpu=True)
        run = run.noted(f"{_said(CPU)}, so that this run keeps to the CPU.")
    if run.launch.launcher == "accelerate" and _backend() and not run.value("torch_compile"):
        run = run.settled("accelerate's config", torch_compile=True, torch_compile_backend=_backend())
        run = run.noted(f"{_said(DYNAMO)}, so that the model is compiled.")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if run.launch.launcher == "python" and tasks != "1":
        run = run.noted(
            f"this is one of {tasks} tasks of a Slurm step, and each trains by itself. For one run of all "
            "of them let srun start torchrun (recipes/launch/slurm.sbatch)."
        )
    if run.launch.launcher != "accelerate" and precision() != "no":
        run = run.noted(f"{_said(PRECISION)}; --bf16, --fp16 and a DeepSpeed config that states one overrule it.")
    for name in TF32 if not run.value("use_cpu") else ():
        if name in os.environ:
            run = run.noted(f"{_said(name)}: on a GPU it has a say in whether fp32 products are rounded to TF32.")
    return run


def _said(name: str) -> str:
    return f"{name} is {os.environ[name]!r} in the environment"
