"""`finetune doctor --deep`: short two-process runs of shipped configs, started as by `finetune plan --verify`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.doctor.ops import ON_CPU, ON_DISK, build
from finetune.dsconfig.rules.offload import compiler, has_libaio
from finetune.host.result import ABSENT, FAILED, Result, verdict
from finetune.measure.start import attempt, measure
from finetune.plan.job import Job
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.search import TRAINER_ALONE, laid_out, shipped
from finetune.run.files import STATE_FILE
from finetune.run.sizes import MOE_SIZES, MOE_TYPE

RANKS = 2
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 32}
MIXTURE = {**MOE_SIZES["moe-tiny"], **TINY, "model_type": MOE_TYPE, "num_key_value_heads": 2, "vocab_size": 256}
ZERO_PLUS = {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False}


@dataclass(frozen=True)
class Trial:
    """A run of `layout`, a shipped config; `zero` overrides keys of its zero_optimization section. `needs` is "",
    "gpu", or "pair": two GPUs if the machine has any. `ops` are the compiled DeepSpeed ops that it uses. With `group`,
    the name of a flag, a pair of ranks shares the texts or the experts of a mixture."""

    name: str
    layout: str
    mend: str
    needed: bool = False
    needs: str = ""
    ops: tuple[str, ...] = ()
    zero: dict[str, Any] | None = None
    resumes: bool = False
    group: str = ""


def run_trials() -> Iterator[Result]:
    """Run every trial in a separate launch, so that a crash does not affect the others."""
    for trial in TRIALS:
        if why := lacking(trial):
            yield Result(trial.name, ABSENT, why)
            continue
        if said := build(trial.ops):
            yield Result(trial.name, FAILED, said, BUILD, trial.needed)
            continue
        start = time.perf_counter()
        job, config = planned(trial)
        got = resumed(job, config) if trial.resumes else attempt(job, config, steps=1)
        found, works = (got, False) if isinstance(got, str) else (f"{job.world_size} rank(s)", True)
        done = verdict(trial.name, works, found, trial.mend, trial.needed)
        yield replace(done, seconds=round(time.perf_counter() - start, 1))


def planned(trial: Trial) -> tuple[Job, dict[str, Any] | None]:
    """The run of a trial on this machine, and its DeepSpeed config."""
    import torch

    from finetune.training.runtime import choose_precision

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = min(RANKS, gpus or RANKS)
    job = laid_out(
        Job(
            model_of(MIXTURE if trial.group else find_model_config("gptlite-tiny") | TINY),
            world_size=ranks,
            ranks_per_node=ranks,
            micro_batch=2,
            tokens=32,
            accumulation=2,
            precision=choose_precision(gpus > 0),
            device="cuda" if gpus else "cpu",
        ),
        trial.layout,
    )
    if trial.layout == TRAINER_ALONE:
        return job, None
    config = shipped(trial.layout)
    config["zero_optimization"] = {**config["zero_optimization"], **(trial.zero or {})}  # type: ignore[dict-item]
    grouped: dict[str, Any] = {trial.group: RANKS} if trial.group else {}
    return replace(job, stages=ranks if trial.layout == "pipeline" else 1, **grouped), config


def resumed(job: Job, config: dict[str, Any] | None) -> str | None:
    """Resume a run from another's first step; both must report the same losses."""
    with tempfile.TemporaryDirectory(prefix="finetune-trial-") as place:
        whole, other = Path(place, "whole"), Path(place, "other")
        every = {"save_strategy": "steps", "save_steps": 1, "logging_strategy": "steps", "logging_steps": 1}
        on = {**every, "resume": whole / "run" / "checkpoint-1", "overwrite_output_dir": False}
        for folder, more in ((whole, every), (other, on)):
            if isinstance(got := measure(job, config, folder, 1, **more), str):
                return got
        losses = [_losses(folder / "run") for folder in (whole, other)]
    return None if losses[0] == losses[1] else f"the resumed run's losses are {losses[1]}, but should be {losses[0]}"


def _losses(run: Path) -> list[float]:
    newest = max(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    log = json.loads((newest / STATE_FILE).read_text(encoding="utf-8"))["log_history"]
    return [row["loss"] for row in log if "loss" in row]


def lacking(trial: Trial) -> str:
    """Why the trial cannot run here, or ""."""
    import torch

    if trial.needs == "gpu" and not torch.cuda.is_available():
        return "needs a GPU: DeepSpeed's quantizer has no CPU build"
    if trial.needs == "pair" and torch.cuda.device_count() == 1:
        return "needs two GPUs"
    if trial.ops and not compiler():
        return "needs a C++ compiler"
    return "needs libaio: apt-get install libaio-dev" if trial.ops == ON_DISK and not has_libaio() else ""


BUILD = "See the C++ compiler and the CUDA toolkit above; `ds_report` lists what each op needs."
NETWORK = (
    "Ranks on this machine cannot reach each other. Check the firewall on the loopback interface, "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (lo here); NCCL_DEBUG=INFO gives details."
)
STEP = "Look at the trials above first; then report it with the output of `finetune doctor --deep --json`."
TRIALS = (
    Trial("all-reduce (DDP)", TRAINER_ALONE, NETWORK, needed=True),
    Trial("ZeRO-0", "zero0", STEP, needed=True),
    Trial("ZeRO-1", "zero1", STEP, needed=True),
    Trial("ZeRO-2", "zero2", STEP, needed=True),
    Trial("ZeRO-3", "zero3", STEP),
    Trial("save and resume", "zero2", STEP, needed=True, resumes=True),
    Trial("CPU offload", "zero3_offload", BUILD, ops=ON_CPU),
    Trial("NVMe offload", "zero3_nvme", BUILD, ops=ON_DISK),
    Trial("pipeline", "pipeline", STEP, needs="pair"),
    Trial("sequence parallelism", "zero3", STEP, needs="pair", group="sequence_parallel_size"),
    Trial("expert parallelism", "zero2", STEP, needs="pair", group="expert_parallel_size"),
    Trial("ZeRO++ hpZ", "zeropp", STEP, needs="pair", zero=ZERO_PLUS | {"zero_hpz_partition_size": 2}),
    Trial("ZeRO++ qwZ", "zeropp", BUILD, needs="gpu", zero=ZERO_PLUS | {"zero_quantized_weights": True}),
    Trial("ZeRO++ qgZ", "zeropp", BUILD, needs="gpu", zero=ZERO_PLUS | {"zero_quantized_gradients": True}),
)
