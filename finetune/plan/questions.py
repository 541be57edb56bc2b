"""From a run to the answer to a question about it: which flags the question varies, and which layouts it searches."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from finetune.errors import RequestError
from finetune.plan.answers import Answer, most_that_fits
from finetune.plan.from_run import job_of
from finetune.plan.job import PIPELINE, Job
from finetune.plan.machine import Machine
from finetune.plan.named import model_names
from finetune.plan.run_model import head_of
from finetune.plan.search import Limits
from finetune.run.facts import TOKENS, positions_of, tokens_flag
from finetune.run.recipe import ENGINE_FLAG
from finetune.run.run import Run
from finetune.shipped import is_recipes_yaml

LONGEST, BATCH, MODEL, DEADLINE = "longest", "largest_batch", "largest_model", "deadline"
BATCHES = ("per_device_train_batch_size", "per_device_eval_batch_size")
OPEN = {LONGEST: tuple(TOKENS), BATCH: BATCHES[:1], MODEL: ("model_name_or_path",), DEADLINE: ()}  # the flags it varies
FIXING = ("deepspeed", "deepspeed_config", "fsdp", ENGINE_FLAG)  # the flags that fix a run's layout
BLOCK_STEP, MOST_TOKENS, MOST_BATCH = 64, 2**24, 2**16


def check_asked(asked: argparse.Namespace, question: str | None) -> None:
    """Raises RequestError for options that contradict a question, before anything is planned."""
    for name in ("price_per_gpu_hour", DEADLINE):
        if (number := getattr(asked, name)) is not None and not 0 < number < math.inf:
            raise RequestError(f"--{name} is {number:g}, but it must be a number above 0.")
    said = question or next((name for name in ("price_per_gpu_hour", "one_more_gpu") if getattr(asked, name)), None)
    others = ["verify", "estimator"] if said else []
    if question:
        others += ["autotune", "write", *(("nodes", "no_search") if question == DEADLINE else ("global_batch_size",))]
    other = next((name for name in others if (one := getattr(asked, name)) is not None and one is not False), None)
    other = other or next((name for name in OPEN.get(question or "", ()) if name in asked.flags), None)
    if other:
        raise RequestError(f"--{said} cannot be combined with --{other}. Drop one.")
    if question == MODEL and asked.target and not is_recipes_yaml(asked.target):
        raise RequestError(f"--{question} searches the known models, but {asked.target} names one. Drop one.")
    if question == DEADLINE and asked.global_batch_size == 0:
        raise RequestError("--deadline needs a fixed global batch, but --global_batch_size 0 allows any. Give one.")


def check_layouts(run: Run, asked: argparse.Namespace, question: str | None) -> None:
    """Raises RequestError if a question searches layouts, but the run fixes one. Only a YAML's DeepSpeed config is no
    obstacle: the flags in the answer overrule it."""
    if question is None or not (asked.layouts or question == DEADLINE):
        return
    for name in FIXING:
        if run.value(name) and (name in asked.flags or name in ("fsdp", ENGINE_FLAG)):
            said = "layouts" if asked.layouts else DEADLINE
            raise RequestError(
                f"--{said} cannot be combined with --{name} ({run.source(name)}): --{question} would search layouts, "
                f"but --{name} fixes one. Drop one."
            )


def small(run: Run, question: str | None = None) -> Run:
    """The run with one sample per rank, unless a batch size is given: the recipe's default would leave less room. For
    --longest with the shortest samples: the length given may be more than the model reads."""
    if question == LONGEST and (flag := tokens_flag(run)):
        run = run.settled(f"--{LONGEST}", **{flag: run.sequence_parallel_size * TOKENS[flag][1]})
    return run.settled("one, since no batch size is given", **{name: 1 for name in BATCHES if name not in run.given})


def allowed(run: Run, limits: Limits, layouts_said: bool, as_asked: bool) -> Limits | None:
    """The layouts to search; None if the run fixes one."""
    asked = any(name in run.given for name in FIXING)
    if as_asked or (asked and not layouts_said):
        return None
    if not (layouts := [name for name in limits.layouts if name != PIPELINE]):
        raise RequestError(f"--layouts {PIPELINE}: questions do not search pipelines. Give --{ENGINE_FLAG} N instead.")
    return replace(limits, layouts=layouts)


def longest(
    run: Run, machine: Machine, limits: Limits | None, params_per_layer: int | None
) -> tuple[Answer, list[str]]:
    """The answer, and notes on its job."""

    def at(size: int | str) -> tuple[Job, dict[str, Any] | None, list[str]]:
        return job_of(run.settled(f"--{LONGEST}", **{str(flag): size}), machine, params_per_layer)

    job, flag = job_of(run, machine, params_per_layer)[0], tokens_flag(run)
    if flag is None or not job.model.reads_text:
        raise RequestError(f"--{LONGEST}: {run.recipe.script} reads no text. Ask for --{BATCH} instead.")
    grows = flag != "block_size" and not run.value("model_name_or_path")  # a new encoder has enough
    most = MOST_TOKENS if grows else min(positions_of(job.model.sizes.config.get), MOST_TOKENS)
    sharing = run.sequence_parallel_size
    step, most = math.lcm(BLOCK_STEP, sharing), most - most % sharing
    sizes = [*range(step, most + 1, step), *((most,) if most % step else ())]
    answer = most_that_fits(LONGEST, flag, sizes, lambda size: at(size)[0], machine, limits)
    return answer, at(answer.found)[2]


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
    """The job and notes of each known model that the recipe can train. Raises RequestError if there is none, with the
    reason that most models share."""
    found, refused = dict[str, tuple[Job, list[str]]](), dict[str, RequestError]()
    for name in model_names():
        try:
            run, notes = described(name)
            job, _, more = job_of(small(run), machine, params_per_layer)
        except RequestError as error:  # made for another task, or reads less than the block
            refused[name] = error
            continue
        if job.model.head == (head_of(run) or job.model.head):
            found[name] = job, [*notes, *more]
        else:
            refused[name] = RequestError(f"it is planned for {job.model.head} only.")
    if not found:
        alike = {name: re.sub(r"'[^']*'|\d[\d,]*", "", str(error)) for name, error in refused.items()}
        [(most, _)] = Counter(alike.values()).most_common(1)
        name = next(name for name, text in alike.items() if text == most)
        raise RequestError(
            f"--largest_model: this run can train none of the {len(refused)} known models. For example, {name}: "
            f"{refused[name]}"
        )
    return found
