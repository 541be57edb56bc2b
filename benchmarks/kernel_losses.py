"""Does recipes/causal_lm.py compute the same with each attention implementation and with Liger's kernels? Trains a
Llama with 4 layers and 256 dimensions in fp32 on the same chats and batches, each variant in its own process, and
compares losses and gradient norms with those of eager attention.

    python benchmarks/kernel_losses.py                                # a GPU: docs/results/kernel_losses_gpu.json, .md
    python benchmarks/kernel_losses.py --only sdpa --out here.json    # this one only; also works without a GPU

The recipe refuses what a machine cannot run; the page then has its error message. TF32 is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers import WARMUP_STEPS, Peers, flagged
from post_training import NAMES, make_chats, make_model
from releases import in_words, this_machine, versions

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "kernel_losses_gpu.json"
BASE, STEPS, BATCH, BLOCK = "eager", 20, 4, 512
RUNS: dict[str, dict[str, Any]] = {
    BASE: {"attn_implementation": "eager"},
    "sdpa": {"attn_implementation": "sdpa"},
    "flex_attention": {"attn_implementation": "flex_attention"},
    "Liger": {"attn_implementation": "sdpa", "use_liger_kernel": True},
}


def train(peers: Peers, scratch: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Loss, gradient norm and seconds of each step; or the refusal."""
    folder = peers.folder()
    given = {"model_name_or_path": scratch / "model", "train_file": scratch / "chats.jsonl", "output_dir": folder}
    given |= {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "block_size": BLOCK, "bf16": False, **flags}
    given |= {"logging_steps": 1, "do_eval": False, "eval_strategy": "no", "save_strategy": "no", "sample_tokens": 0}
    if peers.on_gpu:
        given["tf32"] = False
    try:
        peers.run("recipes/causal_lm.py", *flagged({**given, "validation_split_percentage": 1}))
    except SystemExit as error:
        refusals = [line for line in str(error).splitlines() if line.startswith("error: ")]
        if not refusals:
            raise  # a crash is no refusal: the part has failed
        return {"refused": refusals[0]}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    return {key: [row[key] for row in rows] for key in ("loss", "grad_norm", "step_seconds")}


def apart(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float:
    """The largest relative difference at any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(one[key], other[key], strict=True))


def page(found: Mapping[str, Any]) -> str:
    """docs/results/kernel_losses_gpu.md"""
    base = found["runs"][BASE]
    lines = [
        "# Attention implementations and Liger's kernels: losses compared",
        "",
        "Made by `python benchmarks/kernel_losses.py`.",
    ]
    lines += [f"{NAMES['small']}, fp32, {STEPS} steps of {BATCH} x {BLOCK} tokens;", f"{found['setting']}."]
    lines += ["Differences are relative to eager attention, the largest of all steps. The median step time is over the",
              f"steps after the first {WARMUP_STEPS}, of one run.", "",
              "| run | difference in loss | difference in gradient norm | median step, ms |",
              "|---|---|---|---|"]  # fmt: skip
    for name, run in found["runs"].items():
        if "refused" in run:
            lines.append(f"| {name} | {run['refused']} | - | - |")
            continue
        cells = [f"{apart(run, base, key):.1e}" for key in ("loss", "grad_norm")] if name != BASE else ["-", "-"]
        milliseconds = 1e3 * statistics.median(run["step_seconds"][WARMUP_STEPS:])
        lines.append(f"| {name} | {' | '.join(cells)} | {milliseconds:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS), help=f"in addition to {BASE}")
    parser.add_argument("--out", type=Path, default=OUT, help="file")
    options = parser.parse_args()
    import torch

    on_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {"setting": f"{this_machine()}; {in_words(versions())}", "runs": {}}
    with tempfile.TemporaryDirectory() as place:
        scratch, peers = Path(place), Peers(Path(place), {}, on_gpu)
        make_model(scratch / "model")
        make_chats(scratch / "chats.jsonl")
        for name in [name for name in RUNS if name in (BASE, *options.only)]:
            found["runs"][name] = train(peers, scratch, RUNS[name])
            print(name, found["runs"][name], flush=True)
            if name == BASE and "refused" in found["runs"][name]:
                raise SystemExit(f"{name} did not run: {found['runs'][name]['refused']}")
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
