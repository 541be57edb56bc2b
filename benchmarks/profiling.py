"""Where a step's time goes: GPT-lite `tiny` on two CPU ranks under DDP, ZeRO-2, ZeRO-3 and as a pipeline.

    python benchmarks/profiling.py                      # about three minutes on two CPU cores
    python benchmarks/profiling.py --layouts zero2      # one layout only; keeps the others' figures

Every layout trains on the same 32 blocks per step, with its recipe and --profile 5. Writes docs/results/profiling.md
and .json, and the plot of ZeRO-2, profile.png; the traces stay in --folder.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
CAUSAL, PIPELINE = "recipes/causal_lm.py", "recipes/causal_lm_pipeline.py"
LAYOUTS = {
    "DDP": [CAUSAL],
    "zero2": [CAUSAL, "--deepspeed", "zero2"],
    "zero3": [CAUSAL, "--deepspeed", "zero3"],
    "pipeline of 2": [PIPELINE, "--pipeline_parallel_size", "2"],  # 8 micro-batches of 4
}
COMMON = (
    "--max_steps 12 --profile 5 --profile_first_step 8 --logging_steps 100 --eval_strategy no --save_strategy no "
    "--do_eval False --bf16 False --sample_tokens 0 --overwrite_output_dir True"
)
PICTURED = "zero2"
BUSY = "Other programs were running on these cores: the shares are meaningful, the absolute times are not."
QUIET = 0.5  # a load average below which the machine counts as idle


def profiled(layout: str, folder: Path) -> dict:
    """The summary of one run."""
    place = folder / layout.replace(" ", "_")
    start = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "2"]
    command = [*start, *LAYOUTS[layout], *COMMON.split(), "--output_dir", str(place)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    print(layout, done.stdout[done.stdout.index("profile:") :], sep="\n", flush=True)
    if layout == PICTURED:
        shutil.copy(place / "profile" / "parts.png", OUT / "profile.png")
    return json.loads((place / "profile" / "summary.json").read_text())


def page(results: dict) -> str:
    found = results["layouts"]
    parts = list(next(iter(found.values()))["mean_seconds"])
    lines = [
        "# Where a step's time goes",
        "",
        f"{results['machine']}. Made by `python benchmarks/profiling.py`. Means of 5 traced steps and 2 ranks, in ms.",
        *([BUSY] if results["busy"] else []),
        "",
        f"| layout | {' | '.join(parts)} | step | untraced step | traced / untraced |",
        "|---|" + "---:|" * (len(parts) + 3),
    ]
    for layout, summary in found.items():
        traced, untraced = summary["step_seconds"], summary["untraced_step_seconds"]
        cells = [
            f"{summary['mean_seconds'][part] * 1e3:.1f} ({summary['mean_seconds'][part] / traced:.0%})"
            for part in parts
        ]
        lines.append(
            f"| {layout} | {' | '.join(cells)} | {traced * 1e3:.0f} | {untraced * 1e3:.0f} | {traced / untraced:.2f} |"
        )
    lines += ["", "Transfers of rank 0, in calls and ms per step, whether overlapped with computation or not:", ""]
    lines += ["| layout | transfer | calls | ms |", "|---|---|---:|---:|"]
    for layout, summary in found.items():
        steps = summary["ranks"][0]["steps"]
        for name in sorted({name for step in steps for name in step["transfers"]}):
            of = [step["transfers"].get(name, {"calls": 0, "nanoseconds": 0}) for step in steps]
            calls, took = (sum(one[what] for one in of) / len(of) for what in ("calls", "nanoseconds"))
            lines.append(f"| {layout} | {name} | {calls:.1f} | {took / 1e6:.1f} |")
    lines += ["", f"![Step time of {PICTURED} by part](profile.png)"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "finetune-profiles")
    options = parser.parse_args()
    path = OUT / "profiling.json"
    results = json.loads(path.read_text()) if path.is_file() else {"layouts": {}}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} CPU cores; {versions}"
    results["busy"] = results.get("busy", False) or os.getloadavg()[0] > QUIET
    for layout in options.layouts:
        results["layouts"][layout] = profiled(layout, options.folder)
        path.write_text(json.dumps(results, indent=1) + "\n")
        (OUT / "profiling.md").write_text(page(results))


if __name__ == "__main__":
    main()
