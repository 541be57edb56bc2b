"""What makes room for long texts, on GPUs: bytes and speed beside the plan's, and the longest block that fits.

    python benchmarks/long_context_gpu.py --machine gpu_machine.json       # a profile by `finetune plan --calibrate`
    python benchmarks/long_context_gpu.py --small                          # a tiny model; also works without a GPU

On one GPU: each rung of the ladder at one length, and the longest block as planned and as it ran, for the rungs whose
longest block is short enough to try. On several: sequence parallelism and expert parallelism compared with ZeRO alone
at the same tokens. Each run is a process of its own (`finetune.measure`), on synthetic tokens. Writes
docs/results/long_context_gpu.json and .md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from releases import in_words, versions

from finetune.errors import RequestError
from finetune.host.hardware import gpu_names
from finetune.measure.start import measure
from finetune.plan.answers import most_that_fits
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.search import laid_out, shipped
from finetune.plan.seconds import plan_seconds

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
MODEL, MIXTURE, MIXTURE_LAYERS = "Llama-3.2-1B", "Qwen3-30B-A3B", 6
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip
TINY_MIXTURE = {**TINY, "model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 8, "head_dim": 16,
                "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [],
                "decoder_sparse_step": 1}  # fmt: skip
BLOCK, STEP, MOST, SHORT_ENOUGH = 32_768, 1024, 131_072, 65_536  # tokens
CHUNK, TILES, STEPS = 2048, 8, 3
# Each rung adds to those before it. The plan's longest block is tried if a step of it takes seconds, not minutes.
LADDER: dict[str, dict[str, Any]] = {
    "loss of all logits": {"loss_chunk_tokens": 0},
    "loss in chunks": {"loss_chunk_tokens": CHUNK},
    "activation checkpoints": {"checkpoint_interval": 1},
    "MLPs in tiles": {"tiled_mlp_num_shards": TILES},
    "checkpoints in host memory": {"checkpoints_on_host": True},
}
TRIED = (1.0, 0.95, 0.9, 0.8, 0.6)  # of the planned longest block, until one runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="H200", help="a GPU's name, or its profile (default: H200)")
    parser.add_argument("--small", action="store_true", help="a tiny model and short blocks, to try this script")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: docs/results)")
    asked = parser.parse_args()
    gpus = gpu_names()
    machine = find_machine(asked.machine if gpus else "cpu")
    found: dict[str, Any] = {"gpus": gpus, "versions": versions(), "block": 512 if asked.small else BLOCK}
    found["machine"] = asked.machine
    config = {**TINY, "model_type": "llama"} if asked.small else find_model_config(MODEL)
    found["model"] = "a tiny Llama" if asked.small else MODEL
    for name, rows in {"ladder": ladder(config, found["block"], machine), "groups": groups(asked.small, gpus)}.items():
        found[name] = []
        for row in rows:
            print(row, flush=True)
            found[name].append(row)
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "long_context_gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (asked.out / "long_context_gpu.md").write_text(page(found))


def a_job(config: Mapping[str, Any], layout: str, ranks: int, device: str, tokens: int, **values: Any) -> Job:
    job = Job(model_of(dict(config)), precision="fp32" if device == "cpu" else "bf16", device=device, tokens=tokens)
    return replace(laid_out(job, layout), world_size=ranks, ranks_per_node=ranks, **values)


def run(job: Job, layout: str) -> dict[str, Any]:
    """What a run of it takes, or why it ended."""
    with tempfile.TemporaryDirectory() as folder:
        got = measure(job, shipped(layout), Path(folder), STEPS)
    if isinstance(got, str):
        return {"ended": got[-300:]}
    return {"bytes": max(got.peak_bytes), "seconds": got.step_seconds, "tokens": job.global_batch * job.tokens}


def ladder(config: Mapping[str, Any], block: int, machine: Machine) -> Iterator[dict[str, Any]]:
    """One rank under ZeRO-2."""
    job = a_job(config, "zero2", 1, machine.device, block)
    for name, values in LADDER.items():
        job = replace(job, **values)
        planned, seconds = plan_memory(job, machine), plan_seconds(job, machine)
        row = {"rung": name, "planned_bytes": planned.step_peak.bytes, "planned_seconds": seconds.total}
        row |= {"flops": seconds.model_flops, "peak_flops": seconds.peak_flops, **run(job, "zero2")}
        yield row | longest(job, machine, block)


def longest(job: Job, machine: Machine, block: int) -> dict[str, Any]:
    sizes = range(STEP, min(MOST, 4 * block) + 1, STEP)
    try:
        answer = most_that_fits("longest", "", sizes, lambda size: replace(job, tokens=size), machine, None)
    except RequestError as error:
        return {"longest_refused": str(error)}
    found = {"longest_planned": answer.found, "is_all": answer.next is None}
    if answer.next is None or int(answer.found) > SHORT_ENOUGH:
        return found
    for share in TRIED:
        tokens = int(int(answer.found) * share)
        if "bytes" in run(replace(job, tokens=tokens), "zero2"):
            return {**found, "longest_ran": tokens}
    return {**found, "longest_ran": 0}


def groups(small: bool, gpus: list[str]) -> Iterator[dict[str, Any]]:
    """All GPUs, or two CPU ranks to try this script; nothing on one GPU."""
    if len(gpus) == 1 or not (small or gpus):
        return
    ranks, device, block = len(gpus) or 2, "cuda" if gpus else "cpu", 256 if small else BLOCK // 2
    dense = {**TINY, "model_type": "llama"} if small else find_model_config(MODEL)
    mixture = TINY_MIXTURE if small else {**find_model_config(MIXTURE), "num_hidden_layers": MIXTURE_LAYERS}
    usual = {"loss_chunk_tokens": CHUNK, "checkpoint_interval": 1}
    shared = {"sequence_parallel_size": ranks, "micro_batch": ranks}
    layouts = (
        ("ZeRO-3 alone", dense, "zero3", {}),
        (f"ZeRO-3, {ranks} ranks share each text", dense, "zero3", shared),
        ("ZeRO-3 alone, mixture", mixture, "zero3", {}),
        ("ZeRO-2 alone, mixture", mixture, "zero2", {}),
        (f"ZeRO-2, experts on {ranks} ranks", mixture, "zero2", {"expert_parallel_size": ranks}),
    )
    for name, config, layout, values in layouts:
        yield {"layout": name, **run(a_job(config, layout, ranks, device, block, **usual, **values), layout)}


def page(found: Mapping[str, Any]) -> str:
    """docs/results/long_context_gpu.md"""
    where = ", ".join(found["gpus"]) or "a CPU"
    lines = [
        "# Long texts on a GPU: bytes, speed, and the longest block",
        "",
        f"Made by `python benchmarks/long_context_gpu.py`, on {where}; {in_words(found['versions'])}.",
        f"{found['model']} under ZeRO-2 on one rank, Adam, one block of {found['block']:,} tokens per step. Each row",
        "has what those above it have. Plans are for the profile that the benchmark was given; the longest block is",
        f"searched up to {min(MOST, 4 * found['block']):,} tokens, and tried up to {SHORT_ENOUGH:,}.",
        "",
        "| with | peak, GiB | planned | tokens/s | planned | MFU | longest block, planned | that ran |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["ladder"]:
        lines.append(f"| {row['rung']} | {' | '.join(_cells(row, found['block']))} |")
    if found["groups"]:
        lines += ["", f"{len(found['gpus']) or 2} ranks, the same number of tokens per step in each layout:", ""]
        lines += ["| layout | tokens/s | peak, GiB |", "|---|---:|---:|"]
        for row in found["groups"]:
            ran = f"{row['tokens'] / row['seconds']:,.0f} | {row['bytes'] / 2**30:.1f}" if "bytes" in row else None
            lines.append(f"| {row['layout']} | {ran or row['ended'] + ' | -'} |")
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any], block: int) -> Iterator[str]:
    ran = "bytes" in row
    yield f"{row['bytes'] / 2**30:.1f}" if ran else str(row["ended"])
    yield f"{row['planned_bytes'] / 2**30:.1f}"
    yield f"{block / row['seconds']:,.0f}" if ran else "-"
    yield f"{block / row['planned_seconds']:,.0f}"
    yield f"{row['flops'] / row['seconds'] / row['peak_flops']:.0%}" if ran else "-"
    if "longest_planned" not in row:
        yield from ("none", "-")
        return
    yield f"{row['longest_planned']:,}{' or more' * row['is_all']}"
    yield f"{row['longest_ran']:,}" if "longest_ran" in row else "-"


if __name__ == "__main__":
    main()
