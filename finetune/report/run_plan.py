"""What `finetune plan` predicts for a finished run, on the machine that it ran on."""

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

# What a recipe.yaml that no run wrote can raise.
BROKEN = ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError, OSError


def plan_of_run(run: RunFolder) -> Plan | None:
    """None if no plan can be made; the run's notes say why."""
    if not run.recipe:
        return None
    try:
        machine = _machine(run)
        launch = Launch(world_size=run.ranks, local_world_size=run.ranks, launcher="torchrun")
        job, _, _ = job_of(run_of_record(run.folder, launch), machine)
        return plan(_as_it_was(run, job), machine)
    except FinetuneError as error:
        run.notes.append(f"There is no plan beside it: {first_line(error)}")
    except BROKEN as error:
        run.notes.append(f"There is no plan beside it: recipe.yaml gives {first_line(error)}")
    return None


def tokens_a_sample(run: RunFolder) -> float | None:
    """The mean, including padding, which is computed on as well. None if the samples are not texts."""
    names = ("real_tokens_per_second", "samples_per_second", "padding_share")
    real, samples, padding = (as_number(run.results.get(name)) for name in names)
    if not real or not samples or padding is None or padding >= 1:
        return None
    return real / (1 - padding) / samples


def has_one_length(run: RunFolder) -> bool:
    """Whether all samples have the same length. If not, the longest batch sets the peak, and its length is unknown."""
    tokens, padding = tokens_a_sample(run), as_number(run.results.get("padding_share"))
    return tokens is None or (not padding and abs(tokens - round(tokens)) < 1e-6 * tokens)


def _as_it_was(run: RunFolder, job: Job) -> Job:
    """`job` with the run's mean sample length: a plan before the run assumes the maximum length."""
    tokens = tokens_a_sample(run)
    if tokens is None or round(tokens) >= job.sample_tokens:
        return job
    run.notes.append(
        f"Planned for samples of {max(1, round(tokens)):,} tokens, the run's mean, rather than the maximum of "
        f"{job.sample_tokens:,}."
    )
    share = tokens / job.sample_tokens  # for sources and targets alike
    targets = None if job.targets is None else max(1, round(share * job.targets))
    return replace(job, tokens=max(1, round(share * job.tokens)), targets=targets)


def _machine(run: RunFolder) -> Machine:
    gpus = as_list(run.environment.get("gpus"))
    return find_machine(str(gpus[0]) if gpus else "cpu")
