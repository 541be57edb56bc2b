"""`finetune plan`: predict a run's memory and time, find layouts that fit, and, on demand, measure a real run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.plan.from_run import job_of
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.mends import ways_out
from finetune.plan.notes import notes as notes_of
from finetune.plan.plan import Plan, plan
from finetune.plan.run_model import SHAPING, described, with_kept_model
from finetune.plan.search import LAYOUTS, Found, Limits, scaling, search
from finetune.run.files import RUN_RECORD
from finetune.run.launch import Launch
from finetune.run.run import Run

YAMLS = (".yaml", ".yml")
MOST_RANKS = 65_536  # more is probably a typo


def run(asked: argparse.Namespace) -> int:
    """The exit status. 0: it fits, or was measured; 1: it does not fit; 2: the request was wrong."""
    if asked.calibrate:
        from finetune.measure.calibrate import calibrate

        disk = asked.flags.get("nvme_path")
        calibrate(Path(asked.calibrate), asked.ranks, nvme_path=Path(disk[0]) if disk else None)
        return 0
    found, config, notes, limits = plan_of(asked)
    if asked.estimator:
        from finetune.measure.estimator import show as show_estimates

        return show_estimates(found.job, found.machine)
    if asked.verify:
        from finetune.measure.start import verify

        return verify(found, config)
    layouts = None if asked.no_search else layouts_of(found, limits)
    if asked.autotune and layouts is not None:
        from finetune.measure.start import autotune

        layouts = autotune(layouts, asked.autotune)
    _say(asked, found, layouts, notes)
    if asked.write:
        from finetune.plan.write import write

        print(write(Path(asked.write), layouts), file=sys.stderr if asked.json else sys.stdout)
    return 0 if found.fits or (layouts and layouts.fitting) else 1


def plan_of(asked: argparse.Namespace) -> tuple[Plan, dict[str, Any] | None, list[str], Limits]:
    """The plan, its DeepSpeed config, notes on it, and the limits of a search for other layouts. Raises
    RequestError."""
    if not asked.target and not asked.recipe and not asked.flags:
        raise RequestError(
            "nothing to plan. Give a recipe's YAML, a model's folder or config.json, or a known name such as gpt2."
        )
    _check(asked)
    machine = _machine(asked.gpu)
    planned, notes = _run(asked, machine)
    job, config, more = job_of(planned, machine, asked.params_per_layer)
    limits = _limits(asked, job, any(name in planned.given for name in ("bf16", "fp16")))
    return plan(job, machine), config, [*notes, *more, *notes_of(job)], limits


def layouts_of(found: Plan, limits: Limits) -> Found:
    return search(found.job, found.machine, limits)


def _check(asked: argparse.Namespace) -> None:
    """Raises RequestError for options that contradict each other, before anything is planned."""
    if asked.target and "model_name_or_path" in asked.flags and not asked.target.endswith(YAMLS):
        raise RequestError(f"{asked.target} and --model_name_or_path are both a model. Keep one.")
    if asked.target and "config" in asked.flags and asked.target.endswith(YAMLS):
        raise RequestError(f"{asked.target} and --config {' '.join(asked.flags['config'])} are both YAMLs. Keep one.")
    searched = next((name for name in ("autotune", "write") if getattr(asked, name) is not None), None)
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


def _machine(name: str) -> Machine:
    try:
        return find_machine(name)
    except RequestError as error:
        raise RequestError(f"--gpu {error}") from error


def _limits(asked: argparse.Namespace, job: Job, precision_asked: bool) -> Limits:
    layouts = tuple(asked.layouts or LAYOUTS)
    if wrong := [name for name in layouts if name not in LAYOUTS]:
        raise RequestError(f"--layouts {wrong[0]}: give some of {', '.join(LAYOUTS)}.")
    if asked.autotune is not None and asked.autotune < 1:
        raise RequestError(f"--autotune is {asked.autotune}, but it must be 1 or more.")
    batch = job.global_batch if asked.global_batch_size is None else asked.global_batch_size
    return Limits(batch or None, layouts, job.accumulation, () if precision_asked else ("fp32", "bf16", "fp16"))


def _run(asked: argparse.Namespace, machine: Machine) -> tuple[Run, list[str]]:
    """The run that the flags describe, on a machine that need not be this one; and notes on it."""
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
    if not asked.target.endswith(YAMLS):
        return described([*argv, "--model_name_or_path", asked.target], launch, asked.recipe)
    run, notes = described(["--config", asked.target, *argv], launch, asked.recipe)
    if Path(asked.target).name == RUN_RECORD and not any(
        name in asked.flags for name in ("model_name_or_path", *SHAPING)
    ):
        run = with_kept_model(run, Path(asked.target).parent)
    return run, notes


def _say(asked: argparse.Namespace, found: Plan, layouts: Found | None, notes: list[str]) -> None:
    if asked.json:
        print(json.dumps(as_json(found, layouts, notes), indent=1))
        return
    from finetune.report.plan_tables import show

    show(found, layouts, ways_out(found, layouts) if not found.fits else [], notes)
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


def as_json(found: Plan, layouts: Found | None, notes: list[str]) -> dict[str, Any]:
    """Bytes and seconds, never scaled."""
    return {
        "job": _job(found.job),
        "machine": found.machine.name,
        "fits": found.fits,
        "limit_bytes": found.limit_bytes,
        "ranks": [_rank(rank) for rank in found.ranks],
        "seconds": asdict(found.seconds),
        "samples_per_second": found.seconds.samples_per_second,
        "notes": notes,
        "layouts": None if layouts is None else [
            {
                "layout": one.layout,
                "job": _job(one.plan.job),
                "peak_bytes": one.plan.peak_bytes,
                "host_bytes": one.plan.host_bytes,
                "step_seconds": one.plan.seconds.total,
                "samples_per_second": one.samples_per_second,
                "why_not": one.why_not,
            }
            for one in (*layouts.fitting, *layouts.failing)
        ],
    }  # fmt: skip


def _job(job: Job) -> dict[str, Any]:
    names = ("engine", "world_size", "ranks_per_node", "stages", "micro_batch", "tokens", "accumulation", "precision",
             "checkpoint_interval", "attention", "loss_chunk_tokens", "device", "global_batch")  # fmt: skip
    return {
        "model": job.model.family,
        "parameters": job.model.parameters,
        **{name: getattr(job, name) for name in names},
        "zero": asdict(job.zero),
        "optimizer": job.optimizer.kind,
    }


def _rank(rank: Any) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "resident": rank.resident,
        "resident_bytes": rank.resident_bytes,
        "peak": asdict(rank.peak),
        "peaks": {phase: moment.bytes for phase, moment in rank.peaks.items()},
        "host": rank.host,
        "timeline": rank.timeline,
    }
