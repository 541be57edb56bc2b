"""Training bf16 weights without fp32 master weights: with Kahan summation, and in pure bf16, where small updates are
lost to rounding. Writes docs/results/bf16_weights.json and bf16_weights.md.

    python benchmarks/bf16_weights.py               # about two and a half minutes of one core
    python benchmarks/bf16_weights.py --repeats 5

A GPT-lite is trained from scratch on Python's manual, in fp32, and saved. Each variant continues from there with a
learning rate typical of fine-tuning, on the same samples. A round is one seed for their order.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from peers import REPO, Peers, flagged
from releases import in_words, versions
from spread import spread

OUT = REPO / "docs" / "results" / "bf16_weights.json"
RECIPE = "recipes/causal_lm.py"
ARMS = {
    "AdamW, fp32 masters": {"bf16": True},
    "AdamW, pure bf16": {"dtype": "pure_bfloat16"},
    "StableAdamW, fp32 masters": {"bf16": True, "optim": "stable_adamw"},
    "StableAdamW, bf16 with Kahan summation": {"dtype": "bfloat16", "optim": "stable_adamw"},
}
STEPS, RATE = 100, 1e-4
BASE = {"max_steps": 100, "bf16": False, "do_eval": False, "eval_strategy": "no", "save_strategy": "no"}
ON = {
    "max_steps": STEPS,
    "eval_on_start": True,
    "eval_strategy": "steps",
    "eval_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": STEPS,
    "per_device_train_batch_size": 8,
    "block_size": 64,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_eval_samples": 20,
    "sample_tokens": 0,
}


def measure(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        peers, base = Peers(Path(scratch), {}, on_gpu=False), Path(scratch) / "base"
        peers.run(RECIPE, *flagged({"output_dir": base, "sample_tokens": 0, **BASE}))
        rounds = [
            {name: _figures(peers, base, {**ON, **arm, "seed": 42, "data_seed": seed}) for name, arm in ARMS.items()}
            for seed in range(repeats)
        ]
    return {"rounds": rounds, "steps": STEPS, "rate": RATE, "versions": versions()}


def _figures(peers: Peers, base: Path, flags: dict[str, Any]) -> dict[str, Any]:
    folder = peers.folder()
    peers.run(RECIPE, *flagged({"output_dir": folder, "model_name_or_path": base, **flags}))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    weights = (folder / "model.safetensors").stat().st_size
    states = (folder / f"checkpoint-{STEPS}" / "optimizer.pt").stat().st_size
    return {"eval_loss": losses, "weights_bytes": weights, "states_bytes": states}


def page(found: dict[str, Any]) -> str:
    rounds, steps = found["rounds"], sorted(map(int, next(iter(found["rounds"][0].values()))["eval_loss"]))
    lines = [
        "# Training with bf16 weights",
        "",
        f"A GPT-lite, trained from scratch on Python's manual, is trained for {found['steps']} more steps with a "
        f"learning rate of {found['rate']:g}.",
        "The gain is the decrease in held-out loss over these steps. The share compares it with the gain of the same",
        "optimizer with fp32 master weights in the same round, on the same samples in the same order. All four",
        f"variants compute in bf16. {len(rounds)} rounds: medians, with the range in parentheses. Sizes are those of",
        "the files in a checkpoint.",
        "",
        "| weights and optimizer | held-out loss | gain, nats | share of the gain with fp32 masters | weights, KB "
        "| optimizer states, KB |",
        "|---|---|---|---|---|---|",
    ]
    names = list(ARMS)
    for number, name in enumerate(names):
        arms = [one[name] for one in rounds]
        masters = [one[names[number - number % 2]] for one in rounds]
        gains, full = ([_gain(arm, steps) for arm in some] for some in (arms, masters))
        last = [arm["eval_loss"][str(steps[-1])] for arm in arms]
        share = "" if number % 2 == 0 else spread([one / other for one, other in zip(gains, full, strict=True)], 3)
        sizes = [f"{arms[0][key] / 1000:,.0f}" for key in ("weights_bytes", "states_bytes")]
        lines.append(f"| {' | '.join([name, spread(last, 4), spread(gains, 4), share, *sizes])} |")
    lines += [
        "",
        "What this does not show: larger models, other learning rates, and speed.",
        "",
        f"Made by `python benchmarks/bf16_weights.py`. {in_words(found['versions'])}",
        "",
    ]
    return "\n".join(lines)


def _gain(arm: dict[str, Any], steps: list[int]) -> float:
    losses = arm["eval_loss"]
    return float(losses[str(steps[0])] - losses[str(steps[-1])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    OUT.write_text(json.dumps(measure(asked.repeats), indent=1) + "\n")
    OUT.with_suffix(".md").write_text(page(json.loads(OUT.read_text())))
