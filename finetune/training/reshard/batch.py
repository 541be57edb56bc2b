"""Keeps the global batch size of a run that resumes with a different number of ranks, by changing the accumulation."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import RequestError, UnevenBatchError
from finetune.run.files import PIPELINE_RECORD, SUPERVISION
from finetune.run.run import Run
from finetune.run.supervised import batch_at_first_start, has_begun_with, hosts_of_launch
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.manifest import MANIFEST, read_manifest

MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
FACTORS = f"{MICRO} x {ACCUMULATION} x "


def keep_global_batch(run: Run, checkpoint: str | None) -> tuple[Run, str | None]:
    """The run with --gradient_accumulation_steps set so that the global batch size stays that of the checkpoint, or of
    the first start of a supervised run that has none yet; and a note that says so, or None if nothing changes. Raises
    RequestError if that is impossible."""
    batch = global_batch_of(Path(checkpoint)) if checkpoint else batch_at_first_start()
    if batch is None:
        return run, None
    stages = run.stages
    ranks = run.data_parallel_size
    micro, accumulation = int(run.value(MICRO)), int(run.value(ACCUMULATION))
    if micro * accumulation * ranks == batch:
        return run, None
    name = Path(checkpoint).name if checkpoint else "this run's first start"
    forget = "" if checkpoint else f" To begin with another batch, delete {SUPERVISION}/ in the run folder."
    what = "pipelines" if stages else "groups of ranks" if run.sequence_parallel_size > 1 else "ranks"
    found = (
        f"--resume: {name} was trained with a global batch of {batch}, but this run has {micro} x {accumulation} x "
        f"{ranks} = {micro * accumulation * ranks} ({FACTORS}{what})"
    )
    needed, rest = divmod(batch, micro * ranks)
    if rest:
        raise UnevenBatchError(
            f"{found}. No number of accumulation steps keeps it: {batch} / ({micro} x {ranks}) is "
            f"{batch / (micro * ranks):g}. {_mend(batch, micro, ranks, what)}{forget}",
            _most_hosts(batch, micro, ranks),
        )
    if ACCUMULATION in run.given and not has_begun_with(batch):
        raise RequestError(
            f"{found}. Drop --gradient_accumulation_steps {accumulation} (also from a YAML), and it is set to keep the "
            f"batch: {micro} x {needed} x {ranks} = {batch}."
        )
    note = (
        f"resume: --gradient_accumulation_steps is {needed} instead of {accumulation}, to keep the global batch: "
        f"{micro} x {needed} x {ranks} = {batch} ({FACTORS}{what}){'.' if forget else ''}{forget}"
    )
    return run.settled("to keep the global batch", **{ACCUMULATION: needed}), note


def refuse_other_batch(run: Run, checkpoint: str | None) -> None:
    """Raise if the ranks settled on an older checkpoint with another global batch than `keep_global_batch` saw."""
    other, note = keep_global_batch(run, checkpoint)
    if note:
        raise RequestError(
            f"--resume: {checkpoint} is the newest that verifies, but its global batch differs from the newer ones'. "
            f"Give --{ACCUMULATION} {other.value(ACCUMULATION)} instead of {run.value(ACCUMULATION)}, or another "
            "checkpoint."
        )


def global_batch_of(checkpoint: Path) -> int | None:
    """The checkpoint's global batch size, from its manifest or, if it predates manifests, from a pipeline's record."""
    if (checkpoint / MANIFEST).is_file():
        return read_manifest(checkpoint).global_batch_size
    if (checkpoint / PIPELINE_RECORD).is_file():
        return int(read_json_object(checkpoint / PIPELINE_RECORD)["global_batch_size"])
    return None


def _most_hosts(batch: int, micro: int, ranks: int) -> int:
    """The largest number of hosts, below that of this launch, among whose ranks the batch divides; 0 if none."""
    hosts = hosts_of_launch()
    on_each = ranks // hosts
    return max((some for some in range(1, hosts) if on_each and batch % (micro * on_each * some) == 0), default=0)


def _mend(batch: int, micro: int, ranks: int, what: str) -> str:
    """The flag to give: the largest micro-batch that fits and does not exceed the requested one."""
    fitting = [size for size in range(1, micro + 1) if batch % (size * ranks) == 0]
    if not fitting:
        return f"Launch with a number of {what} that divides {batch}."
    size = fitting[-1]
    steps = batch // (size * ranks)
    return f"Give --per_device_train_batch_size {size}: {size} x {steps} x {ranks} = {batch}."
