"""Renders the pages of docs/results/ from the data beside them; measures nothing.

    python benchmarks/pages.py                  # all pages
    python benchmarks/pages.py seq_cls plan     # some pages

A page can only have figures from the data: tests/test_claims.py compares each page with what this script renders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import async_save
import basics
import bf16_weights
import causal_lm
import causal_lm_gpu
import causal_lm_parts
import channels_last
import chat_templates
import check
import check_truth
import comm_hooks_page
import defaults
import durability_page
import elastic
import expert_parallel
import faults_changed
import generate
import gpu
import identity_cost
import images
import kernel_losses
import limit_page
import long_context_gpu
import mutants
import nothing_silent
import path_flags
import pipeline
import plan
import plan_gpu
import plan_public
import post_training
import profiling
import reshard
import resume_flags
import seq_cls
import sequence_parallel
import startup
import tasks
import zero_speed

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def _of(name: str, render: Callable[[Any], str]) -> Callable[[], str]:
    return lambda: render(json.loads((RESULTS / f"{name}.json").read_text()))


PAGES: dict[str, Callable[[], str]] = {
    "async_save": _of("async_save", async_save.render),
    "basics": _of("basics", basics.page),
    "bf16_weights": _of("bf16_weights", bf16_weights.page),
    "causal_lm": _of("causal_lm", causal_lm.render),
    "causal_lm_parts": _of("causal_lm_parts", causal_lm_parts.render),
    "channels_last": _of("channels_last", channels_last.page),
    "chat_templates": _of("chat_templates", chat_templates.render),
    "check": _of("check", check.render),
    "check_truth": lambda: check_truth.render(_lines("check_truth.json")),
    "comm_hooks": _of("comm_hooks", comm_hooks_page.page),
    "defaults": lambda: defaults.page(_lines("defaults.jsonl")),
    "durability": durability_page.page,
    "elastic": _of("elastic", elastic.page),
    "expert_parallel": _of("expert_parallel", expert_parallel.page),
    "faults_changed": lambda: faults_changed.page(_lines("faults_changed.jsonl")),
    "generate": _of("generate", generate.page),
    "identity_cost": _of("identity_cost", identity_cost.page),
    "images": _of("images", images.page),
    "limit": _of("limit", limit_page.page),
    "mutants": lambda: mutants.page(mutants.read_rows()),
    "nothing_silent": _of("nothing_silent", nothing_silent.page),
    "path_flags": lambda: path_flags.page(_lines("path_flags.jsonl")),
    "pipeline": _of("pipeline", pipeline.render),
    "plan": _of("plan", plan.report),
    "plan_public": _of("plan_public", plan_public.page),
    "plan_gpu": _of("plan_gpu", plan_gpu.page),
    "post_training": _of("post_training", post_training.render),
    "post_training_bf16": _of("post_training_bf16", post_training.render),
    "profiling": _of("profiling", profiling.page),
    "reshard": _of("reshard", reshard.page),
    "resume_flags": lambda: resume_flags.page(_lines("resume_flags.jsonl")),
    "seq_cls": _of("seq_cls", seq_cls.render),
    "sequence_parallel": _of("sequence_parallel", sequence_parallel.page),
    "startup": _of("startup", startup.page),
    "tasks": _of("tasks", tasks.render),
    "zero_speed": _of("zero_speed", zero_speed.render),
}
# Measured by gpu.py on a machine with a GPU; they are pages once their data exists.
ON_GPU: dict[str, Callable[[Any], str]] = {
    "async_save_gpu": async_save.render,
    "causal_lm_gpu": causal_lm_gpu.render,
    "gpu": gpu.page,
    "kernel_losses_gpu": kernel_losses.page,
    "long_context_gpu": long_context_gpu.page,
    "pipeline_gpu": pipeline.render,
    "post_training_gpu": post_training.render,
    "seq_cls_gpu": seq_cls.render,
    "zero_speed_gpu": zero_speed.render,
}
PAGES |= {name: _of(name, render) for name, render in ON_GPU.items() if (RESULTS / f"{name}.json").is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(PAGES))
    for name in parser.parse_args().names or PAGES:
        (RESULTS / f"{name}.md").write_text(PAGES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
