"""The layout that a search found, as a file and a command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from finetune.errors import RequestError
from finetune.plan.job import PIPELINE, Job
from finetune.plan.search import TRAINER_ALONE, Found, shipped
from finetune.run.flags.groups import GROUPS


def write(path: Path, found: Found | None, has_disk: bool = False) -> str:
    """Writes the DeepSpeed config of the fastest layout that has one. Returns which flags go with it. Raises
    RequestError if nothing fits, or if the file exists."""
    if found is None or not found.fitting:
        raise RequestError("--write: no layout fits, so there is nothing to write. See above for what would help.")
    if path.exists():
        raise RequestError(f"--write {path}: already exists. Give another name, or delete it.")
    fastest = found.fitting[0]
    shared = shared_by(*(one.plan.job for one in (*found.fitting, *found.failing)))
    best = next((one for one in found.fitting if one.layout != TRAINER_ALONE), None)
    alone = ""
    if fastest.layout == TRAINER_ALONE:
        alone = f"the fastest layout needs no config: --deepspeed none {flags_of(fastest.plan.job, shared=shared)}"
        if best is None:
            return f"nothing written: {alone}"
        alone += f" ({fastest.samples_per_second / best.samples_per_second:.2f}x as fast)\n"
    assert best is not None
    path.write_text(json.dumps(shipped(best.layout), indent=2) + "\n", encoding="utf-8")
    flags = flags_of(best.plan.job, has_disk=has_disk, shared=shared)
    recipe = "recipes/causal_lm_pipeline.py" if best.plan.job.engine == PIPELINE else "RECIPE"
    return f"{alone}wrote {path} ({best.words}); run {recipe} --deepspeed {path} {flags}"


def shared_by(*jobs: Job) -> list[str]:
    """The flags with which ranks share something in any of the `jobs`."""
    return [name for name in GROUPS if any(getattr(job, name) > 1 for job in jobs)]


def flags_of(job: Job, layout: str = "", has_disk: bool = False, shared: Sequence[str] = ()) -> str:
    """The recipe flags that select this job; `layout` adds a shipped config. `has_disk`: the run already has
    --nvme_path, or a config that names the folder. `shared`: flags with which ranks share something in the run; here
    they need not."""
    flags = [] if not layout or job.engine == PIPELINE else [f"--deepspeed {layout}"]
    flags += [f"--per_device_train_batch_size {job.micro_batch}", f"--gradient_accumulation_steps {job.accumulation}"]
    flags += [f"--{name} {job.precision == name}" for name in ("bf16", "fp16") if job.precision in (name, "fp32")]
    if job.checkpoint_interval:
        flags.append(f"--activation_checkpoint_interval {job.checkpoint_interval}")
    flags += [f"--{name} {getattr(job, name)}" for name in shared]
    if job.engine == PIPELINE:
        flags.append(f"--pipeline_parallel_size {job.stages}")
    if not has_disk and "nvme" in (job.zero.offload_optimizer, job.zero.offload_param):
        flags.append("--nvme_path FOLDER")
    return " ".join(flags)
