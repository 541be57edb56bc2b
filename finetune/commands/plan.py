"""`finetune plan`: predict a run's memory and time, find layouts that fit, and, on demand, measure a real run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.plan import questions
from finetune.plan.advice import limits_of, ways_out
from finetune.plan.advice import notes as notes_of
from finetune.plan.answers import Answer, Cost, cost_of, one_more_of, smallest_cluster, write_config
from finetune.plan.from_run import job_of
from finetune.plan.job import Job
from finetune.plan.machine import LEAST_HOST_GIB, Machine, find_machine, with_host_memory
from finetune.plan.named import refuse_size
from finetune.plan.plan import Plan, plan
from finetune.plan.questions import BATCH, DEADLINE, LONGEST, MODEL, OPEN
from finetune.plan.run_model import SHAPING, described, with_kept_model
from finetune.plan.search import LAYOUTS, Candidate, Found, Limits, scaling, search
from finetune.report.plan_json import as_json
from finetune.report.plan_words import lines_of, show_answer
from finetune.run.choose import recipes
from finetune.run.files import RUN_RECORD
from finetune.run.launch import Launch
from finetune.run.run import Run
from finetune.shipped import is_recipes_yaml

MOST_RANKS = 65_536  # more is probably a typo
MOST_HOST_GIB = 1e9


def run(asked: argparse.Namespace) -> int:
    """The exit status. 0: it fits, or was measured; 1: it does not fit; 2: the request was wrong."""
    if asked.calibrate:
        from finetune.measure.calibrate import calibrate

        ranks, disk = 2 if asked.ranks is None else asked.ranks, asked.flags.get("nvme_path")
        calibrate(Path(asked.calibrate), ranks, nvme_path=Path(disk[0]) if disk else None)
        return 0
    outcome = plan_of(asked)
    found = outcome.plan
    if asked.estimator:
        from finetune.measure.estimator import show as show_estimates

        return show_estimates(found.job, found.machine)
    if asked.verify:
        from finetune.measure.start import verify

        return verify(found, outcome.config)
    outcome = with_layouts(outcome, asked.no_search, asked.autotune)
    _say(asked, outcome)
    if asked.write:
        written = write_config(Path(asked.write), outcome.layouts, outcome.limits.has_disk)
        print(written, file=sys.stderr if asked.json else sys.stdout)
    return 0 if found.fits or (outcome.layouts and outcome.layouts.fitting) else 1


@dataclass(frozen=True)
class Outcome:
    """A plan, its DeepSpeed config, notes on it, and the limits of a search for other layouts. If a question was asked,
    `plan` is the plan of its `answer`. `layouts`: what the search found. `ways_out`: what would fit if the plan does
    not."""

    plan: Plan
    run: Run
    config: dict[str, Any] | None
    notes: list[str]
    limits: Limits
    answer: Answer | None = None
    cost: Cost | None = None
    one_more: Plan | None = None
    layouts: Found | None = None
    ways_out: tuple[Candidate, ...] = ()

    @property
    def lines(self) -> list[str]:
        """What is printed first: the answer, the cost, and the effect of one more GPU."""
        return lines_of(self.plan, self.answer, self.cost, self.one_more)

    def as_json(self) -> dict[str, Any]:
        return as_json(self.plan, self.layouts, self.ways_out, self.notes, self.answer, self.cost, self.one_more)


def plan_of(asked: argparse.Namespace) -> Outcome:
    """The plan of what the flags ask for. Raises RequestError."""
    question = next((name for name in OPEN if getattr(asked, name)), None)
    if asked.target in recipes() and not Path(asked.target).exists():
        if asked.recipe not in (None, asked.target):
            raise RequestError(f"{asked.target} and --recipe {asked.recipe} are both a recipe. Keep one.")
        asked = argparse.Namespace(**{**vars(asked), "recipe": asked.target, "target": None})
    if not asked.target and not asked.recipe and not asked.flags and question != MODEL:
        raise RequestError(
            "nothing to plan. Give a recipe or its YAML, a model's folder or config.json, or a known name such as gpt2."
        )
    _check(asked, question)
    machine = _machine(asked.gpu, asked.host_memory)
    planned, notes = _run(asked, machine)
    questions.check_layouts(planned, asked, question)
    more = list[str]()
    if question == MODEL:
        config, known = None, _known_models(asked, planned, machine)
        job = next(iter(known.values()))[0]
    else:
        planned = questions.small(planned, question) if question in (LONGEST, BATCH) else planned
        job, config, more = job_of(planned, machine, asked.params_per_layer)
        more = [*more, *_batch_note(asked.global_batch_size, job, question)]
    limits = _limits(asked, job, planned, question)
    answer, among = None, None
    if question in (LONGEST, BATCH, MODEL):
        among = questions.allowed(planned, limits, bool(asked.layouts), asked.no_search)
    if question == MODEL:
        answer = questions.largest_model({name: job for name, (job, _) in known.items()}, machine, among)
        notes = known[str(answer.found)][1]
    elif question == LONGEST:
        answer, more = questions.longest(planned, machine, among, asked.params_per_layer)
    elif question == BATCH:
        answer = questions.largest_batch(job, machine, among)
    elif question == DEADLINE:
        answer = smallest_cluster(job, machine, limits, planned.value("max_steps"), asked.deadline)
    found = plan(job, machine) if answer is None else answer.plan
    price = asked.price_per_gpu_hour
    cost = None if price is None else cost_of(found, price, planned.value("max_steps"))
    one_more = one_more_of(found) if asked.one_more_gpu else None
    return Outcome(found, planned, config, [*notes, *more, *notes_of(found)], limits, answer, cost, one_more)


def _batch_note(asked: int | None, job: Job, question: str | None) -> list[str]:
    """That --global_batch_size is not that of the plan itself, if so."""
    if question is not None or asked in (None, 0, job.global_batch):
        return []
    return [
        f"--global_batch_size {asked} is for the layouts that are searched; the plan is of the run's own "
        f"{job.global_batch:,} samples per step. --gradient_accumulation_steps changes that."
    ]


def with_layouts(outcome: Outcome, no_search: bool, tries: int | None = None) -> Outcome:
    """With a search for layouts, of which the fastest `tries` are measured, and with the ways out of a plan that does
    not fit. A question's answer has already searched."""
    found, layouts = outcome.plan, None
    if not (no_search or outcome.answer):
        layouts = search(found.job, found.machine, outcome.limits)
        if tries:
            from finetune.measure.start import autotune

            layouts = autotune(layouts, tries)
    out = [] if found.fits else ways_out(found, layouts, outcome.run, outcome.limits)
    return replace(outcome, layouts=layouts, ways_out=tuple(out))


def _known_models(asked: argparse.Namespace, planned: Run, machine: Machine) -> dict[str, tuple[Job, list[str]]]:
    def described(name: str) -> tuple[Run, list[str]]:
        flags = {**asked.flags, "model_name_or_path": [name]}
        return _run(argparse.Namespace(**{**vars(asked), "flags": flags, "recipe": planned.recipe.name}), machine)

    return questions.known_models(described, machine, asked.params_per_layer)


def _check(asked: argparse.Namespace, question: str | None) -> None:
    """Raises RequestError for options that contradict each other, before anything is planned."""
    questions.check_asked(asked, question)
    if asked.ranks is not None:
        raise RequestError(
            f"--ranks is {asked.ranks}, but it is for --calibrate. --gpus_per_node sets the ranks of a plan."
        )
    if asked.target and "model_name_or_path" in asked.flags and not is_recipes_yaml(asked.target):
        raise RequestError(f"{asked.target} and --model_name_or_path are both a model. Keep one.")
    if asked.target and "config" in asked.flags and is_recipes_yaml(asked.target):
        raise RequestError(f"{asked.target} and --config {' '.join(asked.flags['config'])} are both YAMLs. Keep one.")
    searching = ("autotune", "write", "layouts")
    searched = next((name for name in searching if getattr(asked, name) is not None), None)
    if asked.no_search and searched:
        raise RequestError(f"--{searched} needs the search, but --no_search turns it off. Drop one.")
    alone = next((name for name in ("verify", "estimator") if getattr(asked, name)), None)
    shown = next((name for name in ("autotune", "write", "html", "png", "json") if getattr(asked, name)), None)
    if alone and shown:
        raise RequestError(f"--{alone} prints its own comparison; --{shown} does not apply to it. Drop one.")
    if asked.verify and asked.estimator:
        raise RequestError("--verify and --estimator cannot be combined. Drop one.")
    if asked.json and (asked.html or asked.png):
        raise RequestError("--json cannot be combined with --html or --png. Drop one.")
    for path in (Path(name) for name in (asked.write, asked.html, asked.png) if name):
        if not path.absolute().parent.is_dir():
            raise RequestError(f"{path}: there is no folder {path.parent}. Make it, or give another path.")


def _machine(name: str, host_gib: float | None) -> Machine:
    try:
        machine = find_machine(name)
    except RequestError as error:
        raise RequestError(f"--gpu {error}") from error
    if host_gib is None:
        return machine
    if not LEAST_HOST_GIB <= host_gib < MOST_HOST_GIB:
        raise RequestError(f"--host_memory is {host_gib:g}, but it must be a number of GiB, {LEAST_HOST_GIB} or more.")
    return with_host_memory(machine, int(host_gib * 2**30))


def _limits(asked: argparse.Namespace, job: Job, planned: Run, question: str | None) -> Limits:
    layouts = tuple(dict.fromkeys(asked.layouts or LAYOUTS))
    if wrong := [name for name in layouts if name not in LAYOUTS]:
        raise RequestError(f"--layouts {wrong[0]}: give some of {', '.join(LAYOUTS)}.")
    if asked.autotune is not None and asked.autotune < 1:
        raise RequestError(f"--autotune is {asked.autotune}, but it must be 1 or more.")
    limits = limits_of(planned, job, layouts)
    if question and not asked.layouts:
        limits = limits.usual
    return limits if asked.global_batch_size is None else replace(limits, global_batch=asked.global_batch_size or None)


def _run(asked: argparse.Namespace, machine: Machine) -> tuple[Run, list[str]]:
    """The run that the flags describe, on a machine that need not be this one; and notes on it."""
    run, notes = _described(asked, machine)
    if asked.gpus_per_node is None and machine.ranks_per_node > 1 and getattr(asked, DEADLINE) is None:
        notes = [*notes, f"{machine.ranks_per_node} ranks per node are assumed; --gpus_per_node 1 plans for one."]
    return run, notes


def _described(asked: argparse.Namespace, machine: Machine) -> tuple[Run, list[str]]:
    per_node = machine.ranks_per_node if asked.gpus_per_node is None else asked.gpus_per_node
    nodes = 1 if asked.nodes is None else asked.nodes
    for name, number in (("nodes", nodes), ("gpus_per_node", per_node)):
        if number < 1:
            raise RequestError(f"--{name} is {number}, but it must be 1 or more.")
    if nodes * per_node > MOST_RANKS:
        raise RequestError(f"--nodes {nodes} x --gpus_per_node {per_node} is more than {MOST_RANKS:,} ranks. Mistyped?")
    launch = Launch(world_size=nodes * per_node, local_world_size=per_node, launcher="torchrun")
    argv = [word for name, words in asked.flags.items() for word in (f"--{name}", *words)]
    if not asked.target:
        return described(argv, launch, asked.recipe)
    if not is_recipes_yaml(asked.target):
        refuse_size(asked.target)
        return described([*argv, "--model_name_or_path", asked.target], launch, asked.recipe)
    run, notes = described(["--config", asked.target, *argv], launch, asked.recipe)
    if Path(asked.target).name == RUN_RECORD and not any(
        name in asked.flags for name in ("model_name_or_path", *SHAPING)
    ):
        run = with_kept_model(run, Path(asked.target).parent)
    return run, notes


def _say(asked: argparse.Namespace, outcome: Outcome) -> None:
    found, notes, layouts = outcome.plan, outcome.notes, outcome.layouts
    if asked.json:
        print(json.dumps(outcome.as_json(), indent=1))
        return
    from rich.console import Console

    from finetune.report.plan_tables import show

    console = Console()
    show_answer(console, outcome.answer, outcome.lines)
    show(console, found, layouts, outcome.ways_out, notes)
    notes = [*outcome.lines, *notes]
    command = shlex.join(["finetune", *sys.argv[1:]])
    if asked.html or asked.png:
        from finetune.report import plan_page as page

        curve = scaling(found.job, found.machine)
        if asked.html:
            page.write_page(Path(asked.html), found, layouts, scaling=curve, notes=notes, command=command)
            print(f"wrote {asked.html}")
        if asked.png:
            page.write_png(Path(asked.png), found, layouts, scaling=curve)
            print(f"wrote {asked.png}")
