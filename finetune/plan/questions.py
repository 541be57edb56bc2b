"""From a run to the answer to a question about it: which flags the question varies, and which layouts it searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from finetune.errors import RequestError
from finetune.plan.families.no_text import NO_TEXT
from finetune.plan.from_run import job_of
from finetune.plan.job import PIPELINE, Job
from finetune.plan.largest import Answer, most_that_fits
from finetune.plan.machine import Machine
from finetune.plan.named import model_names
from finetune.plan.run_model import head_of
from finetune.plan.search import Limits
from finetune.run.facts import TOKENS, positions_of, tokens_flag
from finetune.run.recipe import ENGINE_FLAG
from finetune.run.run import Run

LONGEST, BATCH, MODEL, DEADLINE = "longest", "largest_batch", "largest_model", "deadline"
BATCHES = ("per_device_train_batch_size", "per_device_eval_batch_size")
OPEN = {LONGEST: tuple(TOKENS), BATCH: BATCHES[:1], MODEL: ("model_name_or_path",), DEADLINE: ()}  # the flags it varies
BLOCK_STEP, MOST_TOKENS, MOST_BATCH = 64, 2**24, 2**16


def small(run: Run) -> Run:
    """The run with one sample per rank, unless a batch size is given: the recipe's default would leave less room."""
    return run.settled("one, since no batch size is given", **{name: 1 for name in BATCHES if name not in run.given})


def allowed(run: Run, limits: Limits, layouts_said: bool, as_asked: bool) -> Limits | None:
    """The layouts to search; None if the run fixes one. NVMe offload is opt-in: it is slow and needs a fast disk."""
    asked = any(name in run.given for name in ("deepspeed", "deepspeed_config", "fsdp", ENGINE_FLAG))
    if as_asked or (asked and not layouts_said):
        return None
    left_out = (PIPELINE,) if layouts_said or run.value("nvme_path") else (PIPELINE, "zero3_nvme")
    if not (layouts := [name for name in limits.layouts if name not in left_out]):
        raise RequestError(f"--layouts {PIPELINE}: questions do not search pipelines. Give --{ENGINE_FLAG} N instead.")
    return replace(limits, layouts=layouts)


def longest(run: Run, machine: Machine, limits: Limits | None, params_per_layer: int | None) -> Answer:
    def job_at(size: int) -> Job:
        return job_of(run.settled(f"--{LONGEST}", **{str(flag): size}), machine, params_per_layer)[0]

    job, flag = job_of(run, machine, params_per_layer)[0], tokens_flag(run)
    if flag is None or job.model.family in NO_TEXT:
        raise RequestError(f"--{LONGEST}: {run.recipe.script} reads no text. Ask for --{BATCH} instead.")
    grows = flag != "block_size" and not run.value("model_name_or_path")  # a new encoder has enough
    most = MOST_TOKENS if grows else min(positions_of(job.model.sizes.config.get), MOST_TOKENS)
    return most_that_fits(LONGEST, flag, range(BLOCK_STEP, most + 1, BLOCK_STEP) or (most,), job_at, machine, limits)


def largest_batch(job: Job, machine: Machine, limits: Limits | None) -> Answer:
    sizes = range(1, MOST_BATCH + 1)
    return most_that_fits(BATCH, "", sizes, lambda size: replace(job, micro_batch=size), machine, limits)


def largest_model(known: dict[str, Job], machine: Machine, limits: Limits | None) -> Answer:
    """The largest by number of parameters; of models with the same shape the first."""
    alike = {(job.model.family, job.model.parameters): name for name, job in reversed(list(known.items()))}
    names = sorted(alike.values(), key=lambda name: known[name].model.parameters)
    return most_that_fits(MODEL, "model_name_or_path", names, known.__getitem__, machine, limits)


def known_models(
    described: Callable[[str], tuple[Run, list[str]]], machine: Machine, params_per_layer: int | None
) -> dict[str, tuple[Job, list[str]]]:
    """The job and notes of each known model that the recipe can train. Raises RequestError if there is none."""
    found, refused = dict[str, tuple[Job, list[str]]](), list[RequestError]()
    for name in model_names():
        try:
            run, notes = described(name)
            job, _, more = job_of(small(run), machine, params_per_layer)
        except RequestError as error:  # made for another task, or reads less than the block
            refused.append(error)
            continue
        if job.model.head == (head_of(run) or job.model.head):
            found[name] = job, [*notes, *more]
    if not found:
        raise refused[-1]
    return found
