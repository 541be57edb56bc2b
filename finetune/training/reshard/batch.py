"""The global batch of a run that goes on with another number of ranks: kept by changing the accumulation."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import RequestError
from finetune.run.files import PIPELINE_RECORD
from finetune.run.run import Run
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.manifest import MANIFEST, read_manifest

MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
FACTORS = f"{MICRO} x {ACCUMULATION} x "


def keep_global_batch(run: Run, checkpoint: str | None) -> tuple[Run, str | None]:
    """The run with the --gradient_accumulation_steps by which a step takes as many samples as those before the
    checkpoint did, and a line that says so, None where nothing needs to change. Raises RequestError where it cannot
    be."""
    batch = global_batch_of(Path(checkpoint)) if checkpoint else None
    if checkpoint is None or batch is None:
        return run, None
    stages = run.stages
    ranks = run.data_parallel_size
    micro, accumulation = int(run.value(MICRO)), int(run.value(ACCUMULATION))
    if micro * accumulation * ranks == batch:
        return run, None
    what = "pipelines" if stages else "groups of ranks" if run.sequence_parallel_size > 1 else "ranks"
    found = (
        f"--resume: {Path(checkpoint).name} was trained with a global batch of {batch}, and this run makes {micro} x "
        f"{accumulation} x {ranks} = {micro * accumulation * ranks} ({FACTORS}{what})"
    )
    needed, rest = divmod(batch, micro * ranks)
    if rest:
        raise RequestError(
            f"{found}. No number of accumulation steps keeps it: {batch} / ({micro} x {ranks}) is "
            f"{batch / (micro * ranks):g}. {_mend(batch, micro, ranks, what)}"
        )
    if ACCUMULATION in run.given:
        raise RequestError(
            f"{found}. Drop --gradient_accumulation_steps {accumulation} (also from a YAML), and it is set to keep the "
            f"batch: {micro} x {needed} x {ranks} = {batch}."
        )
    note = (
        f"resume: --gradient_accumulation_steps is {needed} instead of {accumulation}, to keep the global batch: "
        f"{micro} x {needed} x {ranks} = {batch} ({FACTORS}{what})"
    )
    return run.settled("to keep the global batch", **{ACCUMULATION: needed}), note


def refuse_other_batch(run: Run, checkpoint: str | None) -> None:
    """Where the ranks have settled on an older checkpoint than the one that `keep_global_batch` saw."""
    other, note = keep_global_batch(run, checkpoint)
    if note:
        raise RequestError(
            f"--resume: {checkpoint} is the newest that verifies, and another global batch than that of newer ones. "
            f"Give --{ACCUMULATION} {other.value(ACCUMULATION)} in place of {run.value(ACCUMULATION)}, or another "
            "checkpoint."
        )


def global_batch_of(checkpoint: Path) -> int | None:
    """By its manifest; one that is older than manifests may have it elsewhere."""
    if (checkpoint / MANIFEST).is_file():
        return read_manifest(checkpoint).global_batch_size
    if (checkpoint / PIPELINE_RECORD).is_file():
        return int(read_json_object(checkpoint / PIPELINE_RECORD)["global_batch_size"])
    return None


def _mend(batch: int, micro: int, ranks: int, what: str) -> str:
    """The flag by which it can be, the largest micro-batch that is not more than the one asked for."""
    fitting = [size for size in range(1, micro + 1) if batch % (size * ranks) == 0]
    if not fitting:
        return f"Launch with a number of {what} that divides {batch}."
    size = fitting[-1]
    steps = batch // (size * ranks)
    return f"Give --per_device_train_batch_size {size}: {size} x {steps} x {ranks} = {batch}."
