"""Planned and measured memory and step times of real runs in many layouts.

python benchmarks/plan.py --measure runs/plan      # trains each configuration for some steps; about half an hour
python benchmarks/plan.py --compare runs/plan      # plans the same ones; writes docs/results/plan.json, for pages.py
python benchmarks/plan.py --fit                    # plans the step times in plan.json again, on a fitted machine
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from releases import in_words, versions

from finetune.dsconfig.config import Config
from finetune.plan.job import DEEPSPEED, FSDP, PIPELINE, TRAINER, Job
from finetune.plan.machine import Link, Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of, with_lora
from finetune.plan.optimizers import Optimizer
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import Lora
from finetune.plan.zero import Zero, read_zero
from finetune.report.png import write_png
from finetune.report.shapes import ACCENT, GRID, LIMIT, MUTED, WIDE, Dot, Line, Picture, Scale

REPO = Path(__file__).resolve().parents[1]
INTRODUCTION = """# Planned and measured memory and step times

`python benchmarks/plan.py --measure runs/plan`, then `python benchmarks/plan.py --compare runs/plan` and
`python benchmarks/plan.py --fit`.

Each configuration is a real launch on two ranks (one rank if its name has 1x), on a machine with two cores and no GPU
({machine}; {versions}; {date}), with random weights and synthetic tokens. Bytes are those of tensor storages
(`finetune.measure.memory`) on the fullest rank: weights, gradients, optimizer states, buckets, activations. The RSS of
a process is larger, because of libraries and allocator overhead. Memory that a kernel allocates and frees internally is
not counted. For comparison, the errors of DeepSpeed's estimator (model states only, for stages 2 and 3) and of the rule
of 16 bytes per parameter are also relative to the measured peak. Step times are medians of eight steps on the slower
rank. They are planned with six constants, fitted to these runs: the rates of products in fp32 and bf16 and of memory,
the seconds of a launch, and the bandwidth and latency of the link. A second line gives the errors of held-out runs: for
each fifth of the runs, the constants are fitted to the other four. `--calibrate` measures these constants instead; its
accuracy was not measured again after the model was simplified (before: median 11.93%, worst 107.77% on the same runs).
A GPU's allocator peaks and step times are in [plan_gpu.md](plan_gpu.md).

![Peak memory as planned by finetune, DeepSpeed's estimator and 16 bytes per parameter, over measured peak](plan.png)
"""

LITE = {"model_type": "gptlite", "vocab_size": 512, "num_hidden_layers": 4, "hidden_size": 256,
        "num_attention_heads": 4, "max_position_embeddings": 256}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "lite": LITE,
    "lite_tied": {**LITE, "tie_word_embeddings": True, "vocab_size": 8192},
    "lite_dropout": {**LITE, "dropout": 0.1},
    "lite_deep": {**LITE, "num_hidden_layers": 12, "hidden_size": 128},
    "lite_vocabulary": {**LITE, "vocab_size": 20000, "num_hidden_layers": 2},
    "bert": {"model_type": "bert", "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 4, "intermediate_size": 1024, "max_position_embeddings": 256},
    "distilbert": {"model_type": "distilbert", "vocab_size": 2000, "dim": 256, "n_layers": 4, "n_heads": 4,
                   "hidden_dim": 1024, "max_position_embeddings": 256},
    "gpt2": {"model_type": "gpt2", "vocab_size": 2000, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "llama": {"model_type": "llama", "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 688,
              "max_position_embeddings": 256},
    "qwen3": {"model_type": "qwen3", "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768,
              "max_position_embeddings": 256},
    "gemma2": {"model_type": "gemma2", "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768,
               "max_position_embeddings": 256},
    "mixtral": {"model_type": "mixtral", "vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "num_local_experts": 4,
                "max_position_embeddings": 256},
    "phi": {"model_type": "phi", "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 4, "intermediate_size": 1024, "max_position_embeddings": 256},
    "t5": {"model_type": "t5", "vocab_size": 2000, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2,
           "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0},
    "wide": {"model_type": "mlp", "width": 1024, "layers": 3, "num_labels": 10},
    "deep": {"model_type": "mlp", "width": 64, "layers": 200, "num_labels": 10},
}  # fmt: skip
HEADS = {"bert": "sequence_classification", "distilbert": "sequence_classification", "t5": "seq2seq_lm",
         "wide": "sequence_classification", "deep": "sequence_classification"}  # fmt: skip
TARGETS = {"llama": ["q_proj", "v_proj"], "mixtral": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}  # of adapters


@dataclass(frozen=True)
class Case:
    """A configuration to run. `deepspeed` is a shipped name, or a config that is written beside the result."""

    model: str
    deepspeed: str | dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    micro_batch: int = 8
    tokens: int = 128

    @property
    def name(self) -> str:
        layout = self.deepspeed if isinstance(self.deepspeed, str) else self.deepspeed["name"]
        words = [f"{key}={value}" for key, value in self.flags.items()]
        return "-".join([self.model, layout, f"{self.ranks}x{self.micro_batch}x{self.tokens}", *words]).replace(
            "/", "_"
        )


def small_buckets(base: str, **zero: Any) -> dict[str, Any]:
    """A shipped config with changed settings: its own buckets would outweigh models as small as these."""
    config = json.loads((REPO / "ds_configs" / f"{base}.json").read_text())
    config["zero_optimization"].update(zero)
    name = "+".join([base, *(f"{key.replace('stage3_', '')}:{value}" for key, value in zero.items())])
    return {"name": name.replace(" ", ""), "config": config}


ALONE = {"none": TRAINER, "fsdp": FSDP}  # without DeepSpeed
BUCKETS = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
ZERO1, ZERO2 = small_buckets("zero1", **BUCKETS), small_buckets("zero2", **BUCKETS)
# For each model, the plan should choose the fastest of these.
CHOICES = ("none", ZERO1, ZERO2, "zero3")
PROBLEMS: list[list[Case]] = [
    *([Case(model, layout, {}) for layout in CHOICES]
      for model in ("lite", "lite_deep", "lite_vocabulary", "distilbert", "gpt2", "llama")),
    *([Case(model, layout, {}, micro_batch=64) for layout in CHOICES] for model in ("wide", "deep")),
    *([Case(model, layout, {"bf16": True}) for layout in CHOICES] for model in ("lite", "gpt2")),
]  # fmt: skip
CASES = [
    *(case for problem in PROBLEMS for case in problem),
    *(Case("lite", layout) for layout in ("zero0", "zero1", "zero2")),
    Case("lite", small_buckets("zero2", **BUCKETS, overlap_comm=False)),
    Case("lite", small_buckets("zero2", **BUCKETS, contiguous_gradients=False)),
    *(Case("lite", layout, {"gradient_accumulation_steps": 2}) for layout in (ZERO1, ZERO2, "zero3")),
    Case("lite", "zero0", {"bf16": True}),
    *(Case("lite", layout, {}, ranks=1) for layout in ("none", ZERO2)),
    Case("lite", small_buckets("zero3", stage3_param_persistence_threshold=300_000)),
    Case("lite", small_buckets("zero3", stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=100_000)),
    *(Case("lite", small_buckets("zero2_offload", **BUCKETS), flags) for flags in ({}, {"bf16": True})),
    *(Case("lite", "zero3_offload", flags) for flags in ({}, {"bf16": True})),
    Case("lite", "zero3_nvme"),
    Case("lite", small_buckets("zeropp", zero_quantized_weights=False, zero_quantized_gradients=False)),
    Case("lite", "none", {"activation_checkpoint_interval": 1}),
    Case("lite_deep", ZERO2, {"activation_checkpoint_interval": 1}),
    Case("lite_deep", ZERO2, {"activation_checkpoint_interval": 2}),
    Case("lite_deep", "zero3", {"activation_checkpoint_interval": 1}),
    Case("lite_dropout", "none"),
    *(Case("lite_tied", layout) for layout in (ZERO1, "zero3")),
    Case("lite_vocabulary", ZERO2, {"bf16": True}),
    Case("lite", "none", {"attn_implementation": "eager"}),
    Case("lite", ZERO2, {}, micro_batch=1, tokens=32),
    Case("lite", "zero3", {}, micro_batch=1, tokens=32),
    *(Case(model, "none") for model in ("bert", "qwen3", "mixtral", "phi", "t5")),
    Case("gemma2", "none", {"attn_implementation": "eager"}),
    Case("bert", "zero3"),
    *(Case(model, ZERO2, {"bf16": True}) for model in ("bert", "distilbert", "llama")),
    *(Case("lite", "pipeline", {"pipeline_parallel_size": 2, "gradient_accumulation_steps": steps}, micro_batch=4)
      for steps in (1, 4)),
    Case("lite_deep", "pipeline", {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4,
                                   "activation_checkpoint_interval": 1}, micro_batch=4),
    Case("lite_vocabulary", "pipeline", {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2,
                                         "partition_method": "uniform"}, micro_batch=4),
    Case("lite_tied", "pipeline", {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2, "bf16": True,
                                   "partition_method": "uniform"}, micro_batch=4),
    *(Case("lite", "none", {"optim": name}) for name in ("sgd", "adafactor")),
    *(Case(model, "fsdp") for model in ("lite", "lite_tied", "lite_vocabulary", "gpt2", "llama")),
    *(Case(model, "fsdp") for model in ("bert", "distilbert", "mixtral")),
    *(Case(model, "fsdp", {"bf16": True}) for model in ("lite", "gpt2")),
    Case("lite", "fsdp", {"gradient_accumulation_steps": 2}),
    Case("lite_deep", "fsdp", {"activation_checkpoint_interval": 1}),
    *(Case("llama", layout, {"lora_r": 8}) for layout in ("none", ZERO2, "zero3", "fsdp")),
    *(Case(model, "fsdp", {"lora_r": 8}) for model in ("gpt2", "mixtral")),
    *(Case("llama", "fsdp", {"lora_r": 8, **flags})
      for flags in ({"bf16": True}, {"gradient_accumulation_steps": 2}, {"activation_checkpoint_interval": 1})),
]  # fmt: skip


def measure(case: Case, folder: Path) -> None:
    """One real launch; writes its figures, or its log, to `folder`."""
    place = (folder / case.name).resolve()
    if (place / "rank-0.json").is_file():
        return
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.json").write_text(json.dumps(MODELS[case.model]))
    deepspeed = case.deepspeed if isinstance(case.deepspeed, str) else str(place / "ds.json")
    if isinstance(case.deepspeed, dict):
        (place / "ds.json").write_text(json.dumps(case.deepspeed["config"], indent=1))
    flags = {"bf16": False, **case.flags}
    if "lora_r" in flags:
        adapter = {"lora_r": flags.pop("lora_r"), "lora_target_modules": TARGETS[case.model], "dtype": "float32"}
        flags["adapter"] = json.dumps(adapter)
    argv = ["-m", "finetune.measure", "--model_config", str(place / "model.json"), "--result_dir", str(place)]
    argv += ["--timed_steps", "8", "--head", HEADS.get(case.model, "causal_lm"), "--sequence_tokens", str(case.tokens)]
    argv += ["--per_device_train_batch_size", str(case.micro_batch), "--output_dir", str(place / "run")]
    engine = ["none", "--fsdp", "True"] if deepspeed == "fsdp" else [deepspeed]
    argv += ["--deepspeed", *engine, *(["--nvme_path", str(place / "nvme")] if "nvme" in deepspeed else [])]
    argv += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    if case.ranks > 1:
        starter = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(case.ranks)]
        argv = [*starter, "--master_port", "29611", *argv]
    else:
        argv = [sys.executable, *argv]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with (place / "log.txt").open("w") as log:
        done = subprocess.run(argv, cwd=REPO, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=400)
    print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {case.name}", flush=True)


def job_of(case: Case) -> Job:
    """The job as `finetune plan` would get it."""
    attention = case.flags.get("attn_implementation", "sdpa")
    model = model_of(MODELS[case.model], case.model, HEADS.get(case.model), attention)
    named = case.deepspeed if isinstance(case.deepspeed, str) else case.deepspeed["config"]
    config = (
        json.loads((REPO / "ds_configs" / f"{named}.json").read_text())
        if isinstance(named, str) and named not in ALONE
        else named
    )
    flags = case.flags
    if "lora_r" in flags:
        model = with_lora(model, Lora(flags["lora_r"], tuple(TARGETS[case.model])))
    stages = flags.get("pipeline_parallel_size", 1)
    engine = ALONE[named] if isinstance(named, str) and named in ALONE else PIPELINE if stages > 1 else DEEPSPEED
    zero = (
        Zero()
        if engine in ALONE.values()
        else read_zero(Config(config), model.hidden_size, 1.0, "bf16" if case.flags.get("bf16") else "fp32")
    )
    if zero.hpz_ranks == 1 and case.deepspeed != "none" and "zeropp" in case.name:
        zero = replace(zero, hpz_ranks=case.ranks)  # "auto": the ranks of a node
    kind = "cpu_adam" if zero.offload_optimizer != "none" else flags.get("optim", "adam")
    return Job(
        model,
        engine,
        zero,
        world_size=case.ranks,
        ranks_per_node=case.ranks,
        stages=stages,
        partition_method=flags.get("partition_method", "balanced"),
        micro_batch=case.micro_batch,
        tokens=1 if model.family == "mlp" else case.tokens,
        accumulation=flags.get("gradient_accumulation_steps", 1),
        precision="bf16" if flags.get("bf16") else "fp32",
        optimizer=Optimizer(kind),
        checkpoint_interval=flags.get("activation_checkpoint_interval", 0),
        attention=attention,
        device="cpu",
    )


@dataclass(frozen=True)
class Row:
    """Bytes of the fullest rank and seconds per step. `estimator`: DeepSpeed's, of model states only; None where it has
    none. `rule`: 16 bytes per parameter."""

    name: str
    resident: tuple[int, int]  # planned, measured
    peak: tuple[int, int]
    seconds: tuple[float, float]
    estimator: int | None
    rule: int

    @staticmethod
    def error(pair: tuple[float, float]) -> float:
        return pair[0] / pair[1] - 1


def compare(case: Case, folder: Path, machine: Machine) -> Row | None:
    """The row of a configuration; None if it was not measured."""
    files = [folder / case.name / f"rank-{rank}.json" for rank in range(case.ranks)]
    if not all(file.is_file() for file in files):
        return None
    got = [json.loads(file.read_text()) for file in files]
    job = job_of(case)
    planned = [plan_memory(job, machine, rank, bounds=got[0]["bounds"] or None) for rank in range(case.ranks)]
    worst = max(range(case.ranks), key=lambda rank: max(got[rank]["step_peaks_bytes"].values()))
    medians = [statistics.median(one["seconds"]) for one in got]
    return Row(
        case.name,
        (planned[worst].resident_bytes, got[worst]["between_steps_bytes"]),
        (planned[worst].peak.bytes, max(got[worst]["step_peaks_bytes"].values())),
        (plan_seconds(job, machine).total, max(medians)),
        _estimator(job),
        16 * job.model.parameters,
    )


# Where a fit begins: FLOP/s in fp32 and bf16, bytes/s of memory, seconds of a launch, bytes/s and seconds of the link.
GUESS = (80e9, 120e9, 15e9, 1e-5, 1e9, 5e-4)
FOLDS = 5
Made = Callable[[Sequence[float]], Machine]  # a machine with these constants


def cpu(constants: Sequence[float]) -> Machine:
    fp32, bf16, memory, launch, bandwidth, latency = constants
    return replace(
        find_machine("cpu"), name=repr(tuple(constants)), peak_flops={"fp32": fp32, "bf16": bf16},
        gemm_efficiency={"fp32": 1.0, "bf16": 1.0}, memory_bandwidth=memory, memory_efficiency=1.0,
        launch_seconds=launch, intra_node=Link(bandwidth, latency),
    )  # fmt: skip


def fitted(made: Made, guess: Sequence[float], runs: Sequence[tuple[Job, float]]) -> Machine:
    """The machine `made` of the constants that fit the measured step times of `runs` best, from `guess` on."""
    from scipy.optimize import minimize

    def error(logarithms: Sequence[float]) -> float:
        machine = made([math.exp(value) for value in logarithms])
        return sum(abs(math.log(plan_seconds(job, machine).total / seconds)) for job, seconds in runs)

    start = [math.log(value) for value in guess]
    best = minimize(error, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-3})
    return made([math.exp(value) for value in best.x])


def held_out(made: Made, guess: Sequence[float], runs: Sequence[tuple[Job, float]]) -> list[float]:
    """Planned seconds of each run: each fifth by the constants that fit the others."""
    found = [0.0] * len(runs)
    for fold in range(FOLDS):
        machine = fitted(made, guess, [run for at, run in enumerate(runs) if at % FOLDS != fold])
        found[fold::FOLDS] = [plan_seconds(job, machine).total for job, _ in runs[fold::FOLDS]]
    return found


def fit(found: dict[str, Any]) -> None:
    """Plans the rows' step times anew: all by the same constants, and each fifth by those that fit the others."""
    rows = {row["name"]: row for row in found["rows"]}
    jobs = {case.name: job_of(case) for case in CASES if case.name in rows}
    runs = [(job, rows[name]["seconds"][1]) for name, job in jobs.items()]
    machine = fitted(cpu, GUESS, runs)
    for name, job in jobs.items():
        rows[name]["seconds"][0] = plan_seconds(job, machine).total
    planned = held_out(cpu, GUESS, runs)
    found["held_out"] = [own / seconds - 1 for own, (_, seconds) in zip(planned, runs, strict=True)]


def _estimator(job: Job) -> int | None:
    """The estimate of deepspeed.runtime.zero, which also prints; device plus host, as on a CPU."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    offloads, whole = job.zero.offload_optimizer != "none", job.model.parameters
    if job.engine != DEEPSPEED or job.zero.stage < 2:
        return None
    if job.zero.stage == 2:
        host, device = estimate_zero2_model_states_mem_needs(whole, job.world_size, 1, offloads, 1)
    else:
        largest = max(tensor.elements for tensor in job.model.tensors)
        away = job.zero.offload_param != "none"
        host, device, _ = estimate_zero3_model_states_mem_needs(
            whole, largest, job.world_size, 1, offloads, away, True, 1
        )
    return int(device + host / job.world_size if offloads else device)


def report(found: dict[str, Any]) -> str:
    """The page in Markdown: a summary, and each row."""
    rows = [Row(**row) for row in found["rows"]]
    head = ["configuration", "resident MiB, planned", "measured", "error", "peak MiB, planned", "measured", "error",
            "error of DeepSpeed's estimator", "error of 16 bytes per parameter", "step s, planned", "measured",
            "error"]  # fmt: skip
    lines = [
        INTRODUCTION.format(**found),
        *_summary(rows, found["held_out"]),
        "",
        _row(head),
        _row(["---"] * len(head)),
    ]
    for row in rows:
        estimate = "-" if row.estimator is None else f"{row.estimator / row.peak[1] - 1:+.0%}"
        numbers = [_mib(row.resident[0]), _mib(row.resident[1]), f"{row.error(row.resident):+.2%}",
                   _mib(row.peak[0]), _mib(row.peak[1]), f"{row.error(row.peak):+.2%}",
                   estimate, f"{row.rule / row.peak[1] - 1:+.0%}",
                   f"{row.seconds[0]:.3f}", f"{row.seconds[1]:.3f}", f"{row.error(row.seconds):+.0%}"]  # fmt: skip
        lines.append(_row([row.name, *numbers]))
    return "\n".join(lines) + "\n"


def picture(found: dict[str, Any]) -> Picture:
    """Each configuration's planned peak, and that of two rules, over the measured one; on the line, they are equal."""
    rows = [Row(**row) for row in found["rows"]]
    kinds = {
        "16 bytes per parameter (states only)": (MUTED, [(row.peak[1], row.rule) for row in rows]),
        "DeepSpeed's estimator (states only)": (
            LIMIT,
            [(row.peak[1], row.estimator) for row in rows if row.estimator is not None],
        ),
        "finetune plan": (ACCENT, [(row.peak[1], row.peak[0]) for row in rows]),
    }
    sizes = [size / 2**20 for _, pairs in kinds.values() for pair in pairs for size in pair]
    low, high = min(sizes) * 0.8, max(sizes) * 1.25
    drawn = Picture(f"Peak memory of {len(rows)} runs, planned over measured", _summary(rows)[1].lstrip("- "), WIDE)
    y = drawn.legend([(name, colour) for name, (colour, _) in kinds.items()], 0) + 10
    across, up = Scale(low, high, 52, WIDE - 10, is_log=True), Scale(low, high, y + 320, y, is_log=True)
    drawn.ticks_left(up, across, "MiB planned")
    drawn.ticks_below(across, up.end, up.start, "MiB measured at the peak of the fullest rank")
    drawn.add(Line(((across(low), up(low)), (across(high), up(high))), GRID))
    for name, (colour, pairs) in kinds.items():
        for measured, said in pairs:
            drawn.add(Dot(across(measured / 2**20), up(said / 2**20), colour, name, 3))
    drawn.height = up.start + 36
    return drawn


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def _summary(rows: list[Row], held_out: Sequence[float] = ()) -> list[str]:
    def line(name: str, errors: list[float]) -> str:
        ranked = sorted(abs(error) for error in errors)
        p95 = ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))]
        median, worst = statistics.median(ranked), ranked[-1]
        return f"- {name}: median {median:.2%}, p95 {p95:.2%}, worst {worst:.2%}, over {len(ranked)} runs"

    estimated = [row for row in rows if row.estimator is not None]
    return [
        line("error of planned resident memory", [row.error(row.resident) for row in rows]),
        line("error of planned peak memory", [row.error(row.peak) for row in rows]),
        line("error of DeepSpeed's estimator for the peak", [row.estimator / row.peak[1] - 1 for row in estimated]),  # type: ignore[operator]
        line("error of 16 bytes per parameter for the peak", [row.rule / row.peak[1] - 1 for row in rows]),
        line("error of planned step time", [row.error(row.seconds) for row in rows]),
        *([line("error of planned step time, held out", [*held_out])] if held_out else []),
        _choices({row.name: row for row in rows}),
    ]


def _choices(rows: dict[str, Row]) -> str:
    """How often the layout with the fastest plan is also, within 5%, the fastest as measured."""
    found = []
    for problem in PROBLEMS:
        known = [rows[case.name] for case in problem if case.name in rows]
        if len(known) > 1:
            chosen = min(known, key=lambda row: row.seconds[0])
            found.append((chosen.seconds[1] / min(row.seconds[1] for row in known), chosen.name))
    good = sum(ratio <= 1.05 for ratio, _ in found)
    ratio, name = max(found, default=(1.0, "-"))
    chosen = f"- layout with the fastest plan: within 5% of the fastest measured in {good} of {len(found)} cases"
    return f"{chosen}; worst: {ratio:.2f}x ({name})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--machine", default="cpu", help="a profile that `finetune plan --calibrate` wrote")
    parser.add_argument("--only", default="")
    parser.add_argument("--bytes", action="store_true", help="compare only bytes: seconds need a quiet machine")
    parser.add_argument("--fit", action="store_true", help="plan the step times in plan.json with fitted constants")
    asked = parser.parse_args()
    cases = [case for case in CASES if asked.only in case.name]
    for case in cases if asked.measure else ():
        measure(case, asked.measure)
    path = REPO / "docs" / "results" / "plan.json"
    if asked.fit:
        found = json.loads(path.read_text())
        fit(found)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print("\n".join(_summary([Row(**row) for row in found["rows"]], found["held_out"])))
    if asked.compare:
        machine = find_machine(asked.machine)
        fresh = [row for case in cases if (row := compare(case, asked.compare, machine)) is not None]
        found = json.loads(path.read_text()) if path.is_file() else {"rows": []}
        old = {row["name"]: row for row in found["rows"]}
        if asked.bytes:
            fresh = [replace(row, seconds=tuple(old[row.name]["seconds"])) for row in fresh]
            again = f"bytes of {len(fresh)} rows again on {time.strftime('%Y-%m-%d')}"
            found["date"] = f"{found['date'].split(', ')[0]}, {again}"
        elif asked.only:
            found["date"] += f", {len(fresh)} rows of {asked.only} on {time.strftime('%Y-%m-%d')}"
        else:
            found |= {"machine": machine.name, "versions": in_words(versions()), "date": time.strftime("%Y-%m-%d")}
        found["rows"] = list((old | {row.name: asdict(row) for row in fresh}).values())
        path.write_text(json.dumps(found, indent=1) + "\n")
        write_png(path.with_suffix(".png"), [picture(found)])
        print("\n".join(_summary([Row(**row) for row in found["rows"]])))


if __name__ == "__main__":
    main()
