"""Planned and measured memory and step times of runs on one NVIDIA GPU. Writes docs/results/plan_gpu.json and its page.

    python benchmarks/plan_gpu.py --measure runs/plan_gpu                        # on the GPU; three to ten minutes
    python benchmarks/plan_gpu.py --compare runs/plan_gpu --machine H200         # plans the same runs, anywhere

Each configuration is a process of its
own. Several start side by side, but use the GPU one after the other (gpu_turns/sitecustomize.py). One that is in the
folder already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from plan import fitted, held_out
from releases import in_words, versions

from finetune.errors import RequestError
from finetune.host.hardware import gpu_names
from finetune.measure.start import measure
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of, with_lora
from finetune.plan.named import find_model_config
from finetune.plan.search import laid_out, shipped
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import Lora
from finetune.run.facts import CHUNK_TOKENS

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
GIB = 2**30
STEPS = 8  # timed
GUESS = 700e12, 3e12, 25e-6  # where a fit begins
INTRODUCTION = """# Planned and measured on one GPU

`python benchmarks/plan_gpu.py --measure runs/plan_gpu` on the GPU, then
`python benchmarks/plan_gpu.py --compare runs/plan_gpu --machine {machine}`.

Each run is a process of its own on one {gpu} ({versions}; {date}), with random weights and synthetic tokens: a real
run of the Trainer or of DeepSpeed. A name has the model, samples x tokens, the precision and the layout; `none` is
the Trainer alone, which keeps bf16 runs' weights in fp32 under autocast. Peaks are those of CUDA's allocator
(`torch.cuda.max_memory_allocated`) over the timed steps; step times are medians of eight steps, each from a
synchronized start. Every run was measured once. Runs started side by side, but used the GPU one after the other.

All plans here are those of today, after these runs had found three errors of the planner, so they are not held out.
Three runs are held out: GPT-lite with checkpointing, gptlite-small and moe-small; they were read only afterwards.
GPT-2's activation has a power, which autocast computes in fp32 on a GPU, but not on a CPU (-15%, and -23% with a
chunked loss); a rank alone under ZeRO-3 does not copy the weights that it gathers (+6%); and `--calibrate` measured
memory with tensors so small that launches took longer.

What this does not show: several GPUs, other chips, flash-attn, offload, compiled models, encoder-decoders and
pictures. The machine's processor is slow to launch kernels, so many of these steps wait for it, which
the shipped profile does not expect. What is still too low in small runs are rests of up to 1 MiB that the allocator
leaves in a block; plans do not count them.

Step times have a floor of noise: two runs of GPT-2 with the same launches, on 1,024 tokens, took 40 and 56 ms. GPT-2
at 16 x 1,024 tokens takes 30 ms longer than gptlite-small, the same model without dropout, where plans differ by 2 ms;
with eager attention it is not slow. So fused attention with dropout is probably the slow part. The fit makes up for it
by a low bandwidth, so gptlite-small and eager attention are planned too slow.
"""
CLASSES = "sequence_classification"
# Models that are not known by name.
SHAPES: dict[str, dict[str, Any]] = {
    "moe-small": {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 8,
                  "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 1536,
                  "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048},
    "vit-base": {"model_type": "vit", "image_size": 224, "num_channels": 3, "num_labels": 1000},
}  # fmt: skip
HEADS = {"bert": CLASSES, "roberta": CLASSES, "distilbert": CLASSES, "t5": "seq2seq_lm", "vit": "image_classification"}


@dataclass(frozen=True)
class Case:
    """A configuration. `more`: fields of the planner's Job."""

    model: str
    micro_batch: int
    tokens: int = 0
    layout: str = "none"
    precision: str = "bf16"
    lora: Lora | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.model, f"{self.micro_batch}x{self.tokens}", self.precision, self.layout]
        words += [f"lora{self.lora.rank}"] if self.lora else []
        return "-".join([*words, *(f"{key}={value}" for key, value in self.more.items())])

    @property
    def job(self) -> Job:
        config = SHAPES.get(self.model) or find_model_config(self.model)
        attention = self.more.get("attention", "sdpa")
        model = model_of(config, self.model, HEADS.get(config["model_type"], "causal_lm"), attention)
        if self.lora:
            model = with_lora(model, self.lora)
        job = Job(
            model, world_size=1, ranks_per_node=1, micro_batch=self.micro_batch, tokens=self.tokens or 1,
            precision=self.precision, **self.more,
        )  # fmt: skip
        return laid_out(job, self.layout)


CHUNKED, EVERY_LAYER = {"loss_chunk_tokens": CHUNK_TOKENS["cuda"]}, {"checkpoint_interval": 1}
LORA = Lora(16, ("q_proj", "k_proj", "v_proj", "o_proj"))
IN_BF16 = {"dtype": "bfloat16", **CHUNKED}
CASES = (
    *(Case("gpt2", 16, 1024, layout) for layout in ("none", "zero0", "zero1", "zero2", "zero3")),
    Case("gpt2", 16, 1024, more=CHUNKED),
    Case("gpt2", 16, 1024, more=EVERY_LAYER),
    Case("gpt2", 8, 1024, more={"attention": "eager"}),
    Case("gpt2", 8, 1024, precision="fp32"),
    Case("gpt2", 1, 1024),
    Case("gpt2", 4, 256),
    Case("gpt2", 4, 1024, more={"accumulation": 4}),
    Case("Qwen2.5-0.5B", 4, 2048),
    Case("Qwen2.5-0.5B", 4, 2048, more=CHUNKED),
    Case("Qwen2.5-0.5B", 4, 2048, "zero3", more=CHUNKED),
    Case("Llama-3.2-1B", 4, 2048, more=CHUNKED),
    Case("Llama-3.2-1B", 4, 2048, "zero2", more=CHUNKED),
    Case("Llama-3.2-1B", 4, 2048, "zero3", more=CHUNKED),
    Case("Llama-3.2-1B", 2, 8192, more={**CHUNKED, **EVERY_LAYER}),
    Case("Llama-3.2-1B", 4, 2048, lora=LORA, more=IN_BF16),
    Case("Llama-3.2-1B", 1, 512),
    Case("Llama-3.1-8B", 1, 2048, lora=LORA, more=IN_BF16),
    Case("Llama-3.1-8B", 4, 2048, lora=LORA, more={**IN_BF16, **EVERY_LAYER}),
    Case("Qwen3-1.7B", 2, 4096, lora=LORA, more={**IN_BF16, **EVERY_LAYER}),
    Case("gemma-3-270m", 4, 2048, more=CHUNKED),
    Case("SmolLM2-360M", 8, 2048),
    Case("SmolLM2-360M", 8, 2048, "zero1"),
    Case("bert-base-uncased", 32, 128),
    Case("bert-base-uncased", 32, 128, precision="fp32"),
    Case("bert-large-uncased", 16, 512),
    Case("distilbert-base-uncased", 64, 256),
    Case("distilbert-base-uncased", 16, 128, "zero2"),
    Case("roberta-base", 32, 256, precision="fp16"),
    Case("gptlite-post", 64, 256),
    Case("gptlite-post", 64, 256, "zero1"),
    Case("gptlite-post", 64, 256, "zero3"),
    Case("gptlite-post", 64, 256, more=EVERY_LAYER),
    Case("gptlite-small", 16, 1024),
    Case("t5-base", 8, 512),
    Case("moe-small", 8, 1024),
    Case("vit-base", 64),
)


def measure_all(cases: Iterable[Case], folder: Path, workers: int) -> None:
    """Write a JSON file for each case to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["GPU_TURNS"] = str((folder / "turn").resolve())
    sys.path.insert(0, str(Path(__file__).with_name("gpu_turns")))  # children get sys.path as PYTHONPATH
    facts = {"gpu": gpu_names()[0], "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    (folder / "facts.json").write_text(json.dumps(facts))

    def one(case: Case) -> None:
        out = folder / f"{case.name}.json"
        if out.is_file():
            return
        config = None if case.layout == "none" else shipped(case.layout)
        got = measure(case.job, config, folder / case.name, STEPS)
        out.write_text(json.dumps(got if isinstance(got, str) else vars(got)))
        print(
            f"{time.strftime('%X')} {case.name}: {got if isinstance(got, str) else f'{got.step_seconds:.4f} s'}",
            flush=True,
        )

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, cases))


def compare(folder: Path, machine: Machine) -> dict[str, Any]:
    """Plans of what was measured: bytes for `machine`, its profile; seconds by that, and by constants fitted to the
    other four fifths of the runs."""
    found, jobs, absent = [], {}, {}
    for case in CASES:
        path = folder / f"{case.name}.json"
        got = json.loads(path.read_text()) if path.is_file() else None
        if isinstance(got, dict):
            jobs[case.name] = job = case.job
            planned = plan_memory(job, machine).step_peak.bytes
            found.append({
                "name": case.name, "peak": [planned, max(got["peak_bytes"])], "reserved": max(got["reserved_bytes"]),
                "seconds": [plan_seconds(job, machine).total, got["step_seconds"]],
            })  # fmt: skip
        else:
            absent[case.name] = got or "not measured: the time on the GPU was over"
    runs = [(jobs[row["name"]], row["seconds"][1]) for row in found]
    made = partial(with_constants, machine)
    for row, seconds in zip(found, held_out(made, GUESS, runs), strict=True):
        row["held_out"] = seconds
    whole = fitted(made, GUESS, runs)
    facts = json.loads((folder / "facts.json").read_text())
    return {**facts, "machine": machine.name, "constants": constants(whole), "rows": found, "absent": absent}


def constants(machine: Machine) -> list[float]:
    """FLOP/s in bf16, bytes/s, and seconds of a launch."""
    return [machine.peak_flops["bf16"], machine.memory_bandwidth, machine.launch_seconds]


def with_constants(machine: Machine, values: Sequence[float]) -> Machine:
    """`machine` with these `constants`; fp16 has those of bf16, and fp32, of which there are few runs, its own."""
    half, memory, launch = values
    peaks, shares = ({**kinds, "bf16": one, "fp16": one}
                     for kinds, one in ((machine.peak_flops, half), (machine.gemm_efficiency, 1.0)))  # fmt: skip
    return replace(
        machine, name=repr(tuple(values)), peak_flops=peaks, gemm_efficiency=shares,
        memory_bandwidth=memory, memory_efficiency=1.0, launch_seconds=launch, step_factor=1.0,
    )  # fmt: skip


def summary(name: str, errors: Sequence[float]) -> str:
    sizes = [abs(one) for one in errors]
    return (f"- {name}: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}; "
            f"{sum(one < 0 for one in errors)} of {len(errors)} too low")  # fmt: skip


def page(found: dict[str, Any]) -> str:
    rows = found["rows"]
    peaks, shipped_errors, held = (
        [pair[0] / pair[1] - 1 for pair in pairs]
        for pairs in (
            [row["peak"] for row in rows],
            [row["seconds"] for row in rows],
            [(row["held_out"], row["seconds"][1]) for row in rows],
        )
    )
    half, memory, launch = found["constants"]
    large = [error for row, error in zip(rows, peaks, strict=True) if row["peak"][1] >= 10 * GIB]
    lines = [
        INTRODUCTION.format(**{**found, "versions": in_words(found["versions"])}),
        summary(f"Peak of the allocator, {len(rows)} runs", peaks),
        summary(f"The same, {len(large)} runs of 10 GiB or more", large),
        summary(f"Step time by the shipped profile {found['machine']}", shipped_errors),
        summary("Step time by three constants that were fitted to the other runs", held),
        "",
        f"Fitted to all runs, the constants are {half / 1e12:,.0f} TFLOP/s in half precision, {memory / 1e12:.2f} "
        f"TB/s, and {launch * 1e6:.0f} microseconds for a launch. The first is more than the chip has: a fit of so few "
        "constants trades one for another, so they must not be read one by one.",
        "",
        *(f"- {name}: {why}" for name, why in found["absent"].items()),
        "",
        "| run | peak MiB, planned | measured | error | reserved / peak | step ms, shipped profile | fitted | measured "
        "| error, shipped | error, fitted |",
        "|---|" + "---:|" * 9,
    ]
    for row, peak, shipped_error, error in zip(rows, peaks, shipped_errors, held, strict=True):
        planned, measured = (f"{size / 2**20:,.0f}" for size in row["peak"])
        times = (f"{seconds * 1e3:.1f}" for seconds in (row["seconds"][0], row["held_out"], row["seconds"][1]))
        lines.append(f"| {row['name']} | {planned} | {measured} | {peak:+.2%} | "
                     f"{row['reserved'] / row['peak'][1]:.2f} | {' | '.join(times)} | {shipped_error:+.0%} | "
                     f"{error:+.0%} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", type=Path, metavar="FOLDER")
    what.add_argument("--compare", type=Path, metavar="FOLDER")
    parser.add_argument("--machine", default="H200", help="the profile to plan for (default: H200)")
    parser.add_argument("--workers", type=int, default=4, help="processes that start side by side (default: 4)")
    parser.add_argument("--only", default="", help="the cases whose names have this")
    asked = parser.parse_args()
    if asked.measure:
        if not gpu_names():
            raise RequestError("nvidia-smi lists no GPU, but --measure needs one. --compare does not.")
        measure_all([case for case in CASES if asked.only in case.name], asked.measure, asked.workers)
        return
    (OUT / "plan_gpu.json").write_text(json.dumps(compare(asked.compare, find_machine(asked.machine)), indent=1) + "\n")
    subprocess.run([sys.executable, str(Path(__file__).with_name("pages.py")), "plan_gpu"], check=True)


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
