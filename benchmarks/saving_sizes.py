r"""Seconds to save and to resume by model size: the toolkit's Trainer compared with the plain one.

    python benchmarks/saving_sizes.py                       # 1 to 100 million parameters; continues where it stopped
    python benchmarks/saving_sizes.py --millions 1 10

A GPT-lite of each size takes four steps, on one rank without DeepSpeed and on two under ZeRO-2, and saves after each. A
save is timed from the end of the step to the callback after the save; the median of the last three counts. Resuming is
timed in a new launch, from the call of `train` to its first step, minus the same time in a fresh run. Verifying every
byte, which only the toolkit does, is timed separately. Writes a row each to docs/results/saving_sizes.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from durability_runs import REPO, checkpoints, environment, launcher, rows_of
from releases import versions

OUT = REPO / "docs" / "results" / "saving_sizes.jsonl"
# hidden size and layers: 12 x layers x hidden^2 weights, and a vocabulary of 1,000
SHAPES = {1: (128, 5), 10: (384, 6), 30: (640, 6), 100: (1024, 8)}
LAYOUTS = {"plain": (1, None), "zero2": (2, "zero2")}
STEPS = 4


def train(options: argparse.Namespace) -> None:
    """Run on every rank of a launch."""
    import torch
    from accelerate import PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
    from finetune.training.loss import settle_loss_scaling
    from finetune.training.trainer import FinetuneTrainer

    state: dict[str, Any] = {}
    if options.deepspeed:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        state = {"accelerator_config": {"use_configured_state": True}}
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=STEPS + (1 if options.resume else 0),
        save_strategy="steps",
        save_steps=1 if not options.resume else 1000,
        save_total_limit=2,
        per_device_train_batch_size=1,
        use_cpu=True,
        deepspeed=str(REPO / "ds_configs" / f"{options.deepspeed}.json") if options.deepspeed else None,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        remove_unused_columns=False,
        **state,
    )
    set_seed(0)
    width, layers = SHAPES[options.size]
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    model = GPTLiteForCausalLM(GPTLiteConfig(vocab_size=1000, max_position_embeddings=32, **shape))
    settle_loss_scaling(model, label_per_token=True)
    row = torch.arange(16)
    rows = [{"input_ids": row, "labels": row + 1, "shift_labels": row + 1}] * 64

    class Clock(TrainerCallback):
        def __init__(self):
            self.saves: list[float] = []
            self.began = self.first = self.ended = 0.0

        def on_step_begin(self, args, state, control, **kwargs):
            self.first = self.first or time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            self.ended = time.perf_counter()

        def on_save(self, args, state, control, **kwargs):
            self.saves.append(time.perf_counter() - self.ended)

    clock = Clock()
    of_stack = FinetuneTrainer if options.stack == "ours" else Trainer
    trainer = of_stack(model=model, args=arguments, train_dataset=rows, callbacks=[clock])
    newest = checkpoints(options.folder)[-1] if options.resume else None
    clock.began = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    if trainer.is_world_process_zero():
        parameters = sum(parameter.numel() for parameter in model.parameters())
        found = {"saves": clock.saves, "to_first_step": clock.first - clock.began, "parameters": parameters}
        options.folder.with_suffix(".json").write_text(json.dumps(found))


def launch(stack: str, size: int, layout: str, folder: Path, resume: bool) -> dict[str, Any]:
    ranks, deepspeed = LAYOUTS[layout]
    words = ["--stack", stack, "--size", str(size), "--folder", str(folder)]
    words += ["--deepspeed", deepspeed] if deepspeed else []
    command = [*launcher(ranks), "benchmarks/saving_sizes.py", *words, *(["--resume"] if resume else [])]
    done = subprocess.run(
        command, cwd=REPO, env=environment(folder.parent), capture_output=True, text=True, check=False, timeout=580
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return dict(json.loads(folder.with_suffix(".json").read_text()))


def measure(stack: str, size: int, layout: str, home: Path) -> dict[str, Any]:
    folder = home / f"{stack}-{size}-{layout}"
    anew = launch(stack, size, layout, folder, resume=False)
    newest = checkpoints(folder)[-1]
    resumed = launch(stack, size, layout, folder, resume=True)
    row = {"stack": stack, "millions": size, "layout": layout, "parameters": anew["parameters"]}
    row["save_seconds"] = round(statistics.median(anew["saves"][1:]), 3)
    row["resume_seconds"] = round(resumed["to_first_step"] - anew["to_first_step"], 3)
    row["bytes"] = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    if stack == "ours":
        from finetune.training.checkpoints.manifest import problems

        began = time.perf_counter()
        assert problems(newest, hashes=True) == []
        row["verify_seconds"] = round((time.perf_counter() - began) / LAYOUTS[layout][0], 3)  # the ranks share it
    return row | {"versions": versions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", nargs="+", type=int, default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--stack", choices=["ours", "stock"], help="used internally for a single launch, like the flags below"
    )
    parser.add_argument("--size", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--deepspeed")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.stack:
        train(options)
        return
    done = {(row["stack"], row["millions"], row["layout"]) for row in rows_of(options.out)}
    for size in options.millions:
        for layout in LAYOUTS:
            for stack in ("ours", "stock"):
                if (stack, size, layout) in done:
                    continue
                with tempfile.TemporaryDirectory() as home:
                    row = measure(stack, size, layout, Path(home))
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
