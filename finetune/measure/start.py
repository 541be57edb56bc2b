"""Start trials with the real launcher, each in a process that may fail, and read their results. No torch."""

from __future__ import annotations

import copy
import json
import shutil
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.dsconfig.load import on_disk, wants_disk
from finetune.dsconfig.rules.optimizer import is_left_to_the_trainer
from finetune.errors import RequestError, RunError
from finetune.host.hardware import cores_here, gpus_here
from finetune.measure.outcome import CRASHED, DONE, UNSUPPORTED
from finetune.measure.processes import PYTHON, TORCHRUN, run, started, words
from finetune.plan.job import FSDP, PIPELINE, Job
from finetune.plan.machine import Machine
from finetune.plan.optimizers import optim_of
from finetune.plan.plan import Plan
from finetune.plan.search import TRAINER_ALONE, Candidate, Found, shipped
from finetune.plan.values import Lora

PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Measured:
    """Each rank's bytes between steps and at the peak, and the run's median seconds per step. On a GPU these bytes are
    its allocator's, and `reserved_bytes` those of the blocks that it has reserved."""

    resident_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    step_seconds: float
    reserved_bytes: tuple[int, ...] = ()


def attempt(job: Job, config: dict[str, Any] | None, steps: int = 5) -> Measured | str:
    """`measure` in a temporary folder. If the run fails, the folder is kept, and the returned reason names its log."""
    folder = Path(tempfile.mkdtemp(prefix="finetune-trial-"))
    got: Measured | str | None = None
    try:
        got = measure(job, config, folder, steps)
    finally:
        for name in ("nvme", "run"):  # as large as the model
            shutil.rmtree(folder / name, ignore_errors=True)
        if not isinstance(got, str):
            shutil.rmtree(folder, ignore_errors=True)
    return f"{got} (its log: {folder / 'log.txt'})" if isinstance(got, str) else got


def measure(job: Job, config: dict[str, Any] | None, folder: Path, steps: int = 5, **more: object) -> Measured | str:
    """Measure a short real run of `job`, with `more` flags; returns the reason if it fails. Its files, including
    log.txt, stay in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = TORCHRUN if job.world_size > 1 else PYTHON
    command = [*started(launcher, job.world_size), "-m", "finetune.measure"]
    found = run(command + arguments(job, config, folder, steps, **more), folder / "log.txt", PATIENCE_SECONDS)
    if found.kind == DONE:
        return _read(folder, job.world_size)
    return f"failed: {found.reason}" if found.kind in (CRASHED, UNSUPPORTED) else str(found.reason)


def arguments(job: Job, config: dict[str, Any] | None, folder: Path, steps: int, **more: object) -> list[str]:
    """The command line of `finetune.measure`; writes the files that it names into `folder`."""
    model = job.model.sizes.config
    if job.expert_parallel_size > 1:  # no logits reach the model's own router loss, which no plan has
        model = {**model, "output_router_logits": False}
    (folder / "model.json").write_text(json.dumps(model))
    flags: dict[str, Any] = {
        "model_config": folder / "model.json",
        "result_dir": folder,
        "output_dir": folder / "run",
        "timed_steps": steps,
        "planned_device": job.device,
        "use_cpu": job.device == "cpu",
        "head": job.model.head,
        "attn_implementation": job.attention,
        "sequence_tokens": job.tokens,
        "loss_chunk_tokens": job.loss_chunk_tokens,
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "logging_nan_inf_filter": job.looks_at_loss,
        "deepspeed": "none",
    }
    optional = {
        "activation_checkpoint_interval": job.checkpoint_interval,
        "activation_checkpointing_kwargs": json.dumps({"offload": True}) if job.checkpoints_on_host else None,
        "document_mask": job.document_mask,
        "fsdp": job.engine == FSDP,
        "adapter": None if job.model.lora is None else json.dumps(_adapter(job.model.lora, job.dtype)),
        "optim": _optim(job, config),
    }
    flags |= {name: value for name, value in optional.items() if value}
    grouped = {"sequence_parallel_size": 1, "expert_parallel_size": 1, "tiled_mlp_num_shards": 0}
    flags |= {name: getattr(job, name) for name, usual in grouped.items() if getattr(job, name) != usual}
    if job.engine == PIPELINE:
        flags |= {"pipeline_parallel_size": job.stages, "partition_method": job.partition_method}
    if config is not None:
        config = _with_folder_for_states(config)
        (folder / "ds.json").write_text(json.dumps(config, indent=2))
        flags |= {"deepspeed": folder / "ds.json", "max_grad_norm": job.zero.gradient_clipping}
        flags |= {"nvme_path": folder / "nvme"} if wants_disk(config) else {}
    return words(flags | more)


def _adapter(lora: Lora, dtype: str) -> dict[str, Any]:
    """Flags of AdapterArguments."""
    return {
        "lora_r": lora.rank,
        "lora_dropout": lora.dropout,
        "lora_target_modules": list(lora.targets),
        "lora_modules_to_save": list(lora.saved),
        "lora_use_dora": lora.is_dora,
        "dtype": dtype,
    }


def _optim(job: Job, config: dict[str, Any] | None) -> str | None:
    """None if DeepSpeed creates the optimizer: from a section of the config, or because its states are offloaded."""
    section = (config or {}).get("optimizer")
    has_section = isinstance(section, dict) and not is_left_to_the_trainer(section)
    return None if has_section or job.zero.offload_optimizer != "none" else optim_of(job.optimizer.kind)


def _with_folder_for_states(config: dict[str, Any]) -> dict[str, Any]:
    """Keep an existing `nvme_path`, which is the user's choice of disk. One that does not exist was derived from
    another run's folder, so derive it anew."""
    config = copy.deepcopy(config)
    for section in on_disk(config):
        if not Path(section.get("nvme_path") or "auto").is_dir():
            section["nvme_path"] = "auto"
    return config


def _read(folder: Path, ranks: int) -> Measured:
    each = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return Measured(
        tuple(one.get("resting_bytes") or one["between_steps_bytes"] for one in each),
        tuple(one.get("allocated_bytes") or max(one["step_peaks_bytes"].values()) for one in each),
        statistics.median(max(times) for times in zip(*(one["seconds"] for one in each), strict=True)),
        tuple(one["reserved_bytes"] for one in each if "reserved_bytes" in one),
    )


def verify(found: Plan, config: dict[str, Any] | None) -> int:
    """Run what was planned, and print plan and measurement. Raises RunError if the run fails."""
    check_room(found.job, found.machine)
    peak = max(rank.step_peak.bytes for rank in found.ranks)
    print("measuring: a real run of a few steps on synthetic tokens", flush=True)
    got = attempt(found.job, config)
    if isinstance(got, str):
        raise RunError(f"the planned run ended: {got}. The plan's peak is {peak:,} bytes.")
    rows = [
        ("between steps, rank 0, MiB", found.ranks[0].resident_bytes / 2**20, got.resident_bytes[0] / 2**20),
        ("peak, fullest rank, MiB", peak / 2**20, max(got.peak_bytes) / 2**20),
        ("step, ms", found.seconds.total * 1e3, got.step_seconds * 1e3),
    ]
    print(f"{'':32}{'planned':>12}{'measured':>12}{'error':>9}")
    for name, planned, measured in rows:
        print(f"{name:32}{planned:12.2f}{measured:12.2f}{planned / measured - 1:+9.1%}")
    if not found.machine.sources["launch_seconds"].startswith("measured"):
        print(
            f"The step time was planned for the shipped profile {found.machine.name}, not for this machine, so the two "
            "are not comparable. Run `finetune plan --calibrate here.json` to measure it; then give --gpu here.json."
        )
    return 0


def autotune(found: Found, many: int) -> Found:
    """Run the `many` best-planned layouts for real; returns those that ran, fastest first."""
    ran: list[tuple[float, Candidate]] = []
    for one in found.fitting[:many]:
        check_room(one.plan.job, one.plan.machine)
        got = attempt(one.plan.job, None if one.layout == TRAINER_ALONE else shipped(one.layout))
        if isinstance(got, str):
            print(f"{one.words}: {got}", flush=True)
            continue
        speed = one.plan.job.global_batch / got.step_seconds
        print(f"{one.words}: planned {one.samples_per_second:.2f}, measured {speed:.2f} samples/s", flush=True)
        ran.append((speed, one))
    if not ran:
        raise RunError("none of them ran, so only the plan's order is known. The reasons are above.")
    ran.sort(key=lambda pair: -pair[0])
    return Found(tuple(replace(one, measured=speed) for speed, one in ran), found.failing, found.seen)


def check_room(job: Job, machine: Machine) -> None:
    """Raises RequestError for a job that these trials do not support, or that this machine cannot run."""
    what = (
        "preferences" if job.texts > 1
        else "beside a teacher" if job.teacher is not None
        else "weights in 4 bits" if any(tensor.is_packed for tensor in job.model.tensors)
        else "ResNets" if job.model.family == "resnet"
        else None
    )  # fmt: skip
    if what:
        raise RequestError(f"--verify and --autotune do not train {what}. Drop them to get the plan alone.")
    ranks = job.world_size
    if ranks > job.ranks_per_node:
        raise RequestError(
            f"{ranks} ranks are more than this machine has. Give --nodes 1 --gpus_per_node N for a run here."
        )
    if machine.device == "cuda" and ranks > (gpus := gpus_here()):
        mend = f"Give --nodes 1 --gpus_per_node {gpus}" if gpus else "Give --gpu cpu, or a profile of this CPU"
        raise RequestError(
            f"--verify and --autotune run on this machine, which has {gpus} GPUs by nvidia-smi, but {ranks} rank(s) of "
            f"{machine.name} are planned. {mend}; or drop them to get the plan alone."
        )
    if machine.device == "cpu" and ranks > (cores := cores_here()):
        raise RequestError(
            f"--verify and --autotune run on this machine, where {cores} core(s) may be used, but {ranks} ranks are "
            f"planned. Give --nodes 1 --gpus_per_node {cores}; or drop them to get the plan alone."
        )
