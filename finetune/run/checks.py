"""What is wrong with a run that its flags alone show, before anything heavy is imported."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from finetune.errors import RequestError
from finetune.run.conflicts import conflicts, missing
from finetune.run.flags.compression import check_comm_hook
from finetune.run.flags.guards import check_guards
from finetune.run.flags.pipeline import check_pipeline
from finetune.run.flags.profiling import check_profile
from finetune.run.flags.trackers import check_trackers
from finetune.run.output_folder import missing_checkpoint

if TYPE_CHECKING:
    from finetune.run.run import Run

# The least that a number may be, where the Trainer would go on with less or stop with a trace.
LEAST = {
    "learning_rate": 0,
    "seed": 0,
    "data_seed": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "logging_steps": 0,
    "dataloader_num_workers": 0,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "activation_checkpoint_interval": 1,
    "max_seq_length": 1,
    "block_size": 1,
    "max_train_samples": 1,
    "max_eval_samples": 1,
    "max_predict_samples": 1,
    "sample_tokens": 0,
    "sample_temperature": 0,
    "early_stopping_patience": 1,
}
# Shares, which lie between 0 and this.
SHARES = {"validation_fraction": 1.0, "validation_split_percentage": 100.0, "label_smoothing_factor": 1.0}
TESTS = ("test_file", "test_dir", "cifar_dir", "dataset_name")


def check(run: Run, is_here: bool = True) -> None:
    """Raises RequestError for values that cannot be meant, for flags that contradict each other, for what the engine or
    the launch cannot do, and, of a run that is to be here, for what it needs and nobody gave."""
    mistakes = [
        f"{run.said(name)}, but it must be {least} or more."
        for name, least in LEAST.items()
        if (value := run.value(name)) is not None and value < least
    ]
    mistakes += [
        f"{run.said(name)}, but it must be 0 or more and less than {most:g}."
        for name, most in SHARES.items()
        if (value := run.value(name)) is not None and not 0 <= value < most
    ]
    steps, epochs = run.value("max_steps"), run.value("num_train_epochs")
    if steps == 0 or steps < -1:
        mistakes.append(f"{run.said('max_steps')}, but it must be 1 or more, or -1 for whole epochs.")
    if epochs <= 0:
        mistakes.append(f"{run.said('num_train_epochs')}, but it must be more than 0.")
    mistakes += conflicts(run)
    if is_here:
        mistakes += [*missing(run), *missing_checkpoint(run)]
    if is_here and run.values.get("do_predict") and not any(run.values.get(name) for name in TESTS):
        tests = [f"--{name}" for name in TESTS if name in run.recipe.flags]
        mistakes.append(f"--do_predict needs a test split. Give {', or '.join(tests)} with one.")
    if mistakes:
        raise RequestError("\n".join(mistakes))
    if is_here:
        _check_optimizer(run)
    if run.stages is not None:
        check_pipeline(run)
    check_guards(run)


def check_here(run: Run, deepspeed: str | None) -> None:
    """Likewise for a run that is to start on this machine, by the DeepSpeed config of that name, if any."""
    check_trackers(_listed(run.value("report_to")))
    check_profile(run, deepspeed, None)
    check_comm_hook(run, deepspeed, {name: run.given.get(name) is True for name in ("bf16", "fp16")})


def _check_optimizer(run: Run) -> None:
    """An optimizer of a package that is missing would end the run once the model is loaded."""
    name = str(run.value("optim"))
    package = "torchao" if name.startswith("adamw_torch_") and name.endswith("bit") else None
    if package is None and ("8bit" in name or "bnb" in name or name.startswith("paged_")):
        package = "bitsandbytes"
    if package and importlib.util.find_spec(package) is None:
        raise RequestError(f"{run.said('optim')}: needs {package}, which is not installed. pip install {package}.")


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]
