"""What `finetune plan` says of a run that has been, on the machine that it ran on."""

from __future__ import annotations

from dataclasses import replace

from finetune.errors import FinetuneError, first_line
from finetune.plan.from_run import job_of
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.plan import Plan, plan
from finetune.plan.run_model import run_of_record
from finetune.report.run_folder import RunFolder
from finetune.report.text import as_list, as_number
from finetune.run.launch import Launch

# What a recipe.yaml leads to that no run has written.
BROKEN = ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError, OSError


def plan_of_run(run: RunFolder) -> Plan | None:
    """None where no plan can be made, which is said in the run's notes."""
    if not run.recipe:
        return None
    try:
        machine = _machine(run)
        launch = Launch(world_size=run.ranks, local_world_size=run.ranks, launcher="torchrun")
        job, _, _ = job_of(run_of_record(run.folder, launch), machine)
        return plan(_as_it_was(run, job), machine)
    except FinetuneError as error:
        run.notes.append(f"Nothing is planned beside it: {first_line(error)}")
    except BROKEN as error:
        run.notes.append(f"Nothing is planned beside it: recipe.yaml gives {first_line(error)}")
    return None


def tokens_a_sample(run: RunFolder) -> float | None:
    """On the mean, padding included, which is computed with as well. None of what is no text."""
    names = ("real_tokens_per_second", "samples_per_second", "padding_share")
    real, samples, padding = (as_number(run.results.get(name)) for name in names)
    if not real or not samples or padding is None or padding >= 1:
        return None
    return real / (1 - padding) / samples


def has_one_length(run: RunFolder) -> bool:
    """Of all samples. If not, the peak is that of the longest batch, which nobody has written down."""
    tokens, padding = tokens_a_sample(run), as_number(run.results.get("padding_share"))
    return tokens is None or (not padding and abs(tokens - round(tokens)) < 1e-6 * tokens)


def _as_it_was(run: RunFolder, job: Job) -> Job:
    """With samples as long as the run's were on the mean: a plan before the run counts each as long as it may be."""
    tokens = tokens_a_sample(run)
    if tokens is None or round(tokens) >= job.sample_tokens:
        return job
    run.notes.append(
        f"Planned for samples of {max(1, round(tokens)):,} tokens, as the run's were on the mean, and not of the "
        f"{job.sample_tokens:,} that they may have."
    )
    share = tokens / job.sample_tokens  # of what is read and of what is written alike
    targets = None if job.targets is None else max(1, round(share * job.targets))
    return replace(job, tokens=max(1, round(share * job.tokens)), targets=targets)


def _machine(run: RunFolder) -> Machine:
    gpus = as_list(run.environment.get("gpus"))
    return find_machine(str(gpus[0]) if gpus else "cpu")
