"""Changes every flag of a recipe on resume, one at a time: every effect must be reported or refused.

    python benchmarks/resume_flags.py                        # every run below, about two hours on two cores
    python benchmarks/resume_flags.py plain pipeline         # some of the runs
    python benchmarks/resume_flags.py plain --flags seed     # and some of the flags

A run of four steps is cut after the second and resumes to its end, once unchanged and once with each flag changed. A
case is `silent` if it exits with 0 and different weights, and no `resume:` line names the change. There must be no
silent case. Writes docs/results/resume_flags.jsonl, one line per case, and resume_flags.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from durability_runs import EVERY, LANGUAGE, LM, RUNS, Run, environment, farthest, rows_of
from releases import in_words, versions

from finetune.run.choose import recipes
from finetune.run.flag import Flag
from finetune.run.on_resume import TABLE, named

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

from warm_ranks import WarmRanks  # noqa: E402  (the ranks of the tests, which have imported the stack already)

OUT = REPO / "docs" / "results"
STEPS, CUT = 4, 2
BASE = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": CUT, "logging_steps": 1}
SECONDS = 180.0
TO_ROUNDING = (
    1e-4  # of a weight: another batch size per device changes the order of summation, and Adam's first steps amplify it
)
BASE_MODEL = "base"  # an adapter's base model, trained first
OF_BASE = {"model_name_or_path": BASE_MODEL, "config_overrides": None}
OWN = {name: RUNS[name] for name in ("plain", "pipeline", "zero2", "zero3", "image_cls", "causal_lm", "ddp_powersgd")}
OWN |= {
    "token_cls": Run("token_cls", 1, {"max_train_samples": 80, "max_seq_length": 24, "dropout": 0.1}),
    "causal_lm_lora": Run(LM, 1, {**LANGUAGE, **OF_BASE, "use_peft": True, "lora_r": 4, "lora_dropout": 0.1}),
    "causal_lm_packed": Run(LM, 1, {**LANGUAGE, "packing": "bfd", "document_mask": True}),
    "causal_lm_streaming": RUNS["causal_lm_streaming"],
    "seq2seq": Run("seq2seq", 1, {"max_train_samples": 80, "max_source_length": 24, "max_target_length": 12}),
    "preference": Run("preference", 1, {"max_train_samples": 80}),
    "embedding": Run("embedding", 1, {"max_train_samples": 96, "max_seq_length": 24, "mined_negatives": 1}),
}
# Flags that are not tried: they name this run, its cut, or something that this machine lacks.
LEFT_OUT = {
    "output_dir": "the run itself", "resume": "the cut", "resume_changed": "accepts what would be refused",
    "overwrite_output_dir": "deletes the run", "config": "a file of flags", "push_to_hub": "needs a hub",
    "load_in_4bit": "needs bitsandbytes' kernels", "nvme_path": "needs its own disk",
}  # fmt: skip
# Values for flags for which the rule below finds no other valid value.
VALUES: dict[str, list[Any]] = {
    "max_steps": [6],
    "save_steps": [1],
    "model_type": ["bert", "alexnet", "llama"],
    "model_name_or_path": ["nowhere"],
    "tokenizer": ["byte", "char"],
    "config_overrides": ["num_hidden_layers=1"],
    "metrics": ["f1"],
    "metric_for_best_model": ["eval_loss", "eval_accuracy"],
    "optim": ["adamw_torch", "sgd", "adafactor"],
    "lr_scheduler_kwargs": ['{"num_cycles": 2}'],
    "deepspeed_config": ["ds_configs/zero1.json"],
    "deepspeed": ["zero1", "zero2", "zero3"],
    "fsdp": [True],
    "train_sampling_strategy": ["sequential", "group_by_length"],
    "lora_target_modules": ["q_lin", "proj"],
    "disable_check": ["DS301"],
    "report_to": ["tensorboard"],
    "log_level": ["info"],
    "log_level_replica": ["info"],
    "label_names": ["labels"],
    "seed": [7],
    "learning_rate": [1e-4],
    "gradient_accumulation_steps": [1, 4],
}


def values_of(flag: Flag, now: Any) -> list[Any]:
    """Values other than `now` that a user might give."""
    if flag.name in VALUES:
        return [value for value in VALUES[flag.name] if value != now]
    if flag.choices:
        return [choice for choice in flag.choices if choice != now][:3]
    if flag.kind == "bool":
        return [not now]
    if flag.kind in ("int", "float"):
        found = [(now or 0) * 2 or 1.0, (now or 0) / 2] if flag.kind == "float" else [(now or 0) + 1, (now or 0) * 4]
        return [
            value for value in dict.fromkeys(found) if value != now and (flag.range is None or flag.range.holds(value))
        ][:2]
    return ["other"]


def cases(run: Run, base: dict[str, Any], only: list[str]) -> Iterator[tuple[str, Any]]:
    for name, flag in recipes()[run.recipe].flags.items():
        if (name in only) if only else name not in LEFT_OUT:
            for value in values_of(flag, base.get(name, flag.default)):
                yield name, value


class Campaign:
    """One run, cut once; each case resumes from a copy."""

    def __init__(self, name: str, home: Path, ranks: WarmRanks) -> None:
        self.name, self.run, self.home, self.ranks = name, OWN[name], home / name, ranks
        self.env = environment(home / "cache")
        if self.run.flags.get("model_name_or_path") == BASE_MODEL:
            self.run, base = OWN["causal_lm"], self.home / BASE_MODEL
            status, output = self.launch(base, {})
            assert status == 0, output[-3000:]
            self.run = replace(OWN[name], flags=OWN[name].flags | {"model_name_or_path": base})
        self.cut = self.home / "cut"
        status, output = self.launch(self.cut, {})
        assert status == 0, output[-3000:]
        for path in (self.cut / f"checkpoint-{STEPS}", self.cut / "README.md"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.whole = self.home / "whole"
        shutil.copytree(self.cut, self.whole)
        status, output = self.launch(self.whole, {"resume": "auto"})
        assert status == 0, output[-3000:]

    def launch(self, folder: Path, more: dict[str, Any]) -> tuple[int, str]:
        command = self.run.command(folder, **(BASE | more))
        at = next(i for i, word in enumerate(command) if word.endswith(".py"))
        return self.ranks.run(command[:at], command[at:], self.run.ranks, self.env, SECONDS)

    def case(self, flag: str, value: Any) -> dict[str, Any]:
        folder = self.home / "case"
        shutil.copytree(self.cut, folder)
        row = {"run": self.name, "flag": flag, "value": value, "versions": versions()}
        try:
            status, output = self.launch(folder, {"resume": "auto", flag: value})
            return row | self.judged(folder, flag, status, output.replace(str(self.home), "HOME"))
        except subprocess.TimeoutExpired as error:
            return row | {"verdict": "hangs", "words": f"after {error.timeout:.0f} s"}
        finally:
            shutil.rmtree(folder)

    def judged(self, folder: Path, flag: str, status: int, output: str) -> dict[str, Any]:
        errors = re.findall(r"^(?:\[rank \d+\] )?error: (.*)", output, re.MULTILINE)
        said = [line for line in output.splitlines() if line.startswith("resume: ") and "going on from" not in line]
        if (
            errors and "Traceback" not in output and status in (1, 2)
        ):  # torchrun exits with 1 whatever its ranks exit with
            return {"verdict": "refused", "words": errors[0][:300]}
        if status:
            return {"verdict": "failed", "words": (errors or output.splitlines()[-1:])[0][:300]}
        apart = farthest(folder, self.whole)
        if any(f"--{flag} " in line or " rows" in line for line in said):
            return {"verdict": "said", "apart": apart, "words": said[0][:300]}
        if apart == 0:
            return {"verdict": "exact", "apart": 0.0, "words": ""}
        return {"verdict": "to rounding" if apart <= TO_ROUNDING else "silent", "apart": apart, "words": ""}


def page(rows: list[dict[str, Any]]) -> str:
    kinds = ("refused", "said", "exact", "to rounding", "failed", "hangs", "silent")
    lines = [
        "# Changing every flag on resume",
        "",
        f"`python benchmarks/resume_flags.py`, {in_words(rows[-1]['versions'])}, two cores.",
        "A run of four steps resumes from its second with one flag changed. It then ends in one of these ways:",
        "",
        "- *refused*: it ends with an error message, without a traceback.",
        "- *said*: it runs, and a `resume:` line names the change.",
        "- *exact*: no line, and the same weights to the bit.",
        f"- *to rounding*: no line, and weights that differ by at most {TO_ROUNDING:g}, as sums in another order do.",
        "- *failed*: an exit status other than 0 and 2. *hangs*: no end within the time limit.",
        "- *silent*: exit status 0, other weights, and no line that names the change. There must be none of these.",
        "",
        f"| run | cases | {' | '.join(kinds)} |",
        f"|---|---{'|---' * len(kinds)}|",
    ]
    for run in dict.fromkeys(row["run"] for row in rows):
        counts = Counter(row["verdict"] for row in rows if row["run"] == run)
        lines.append(f"| {run} | {sum(counts.values())} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    odd = [row for row in rows if row["verdict"] in ("silent", "failed", "hangs")]
    if odd:
        lines += ["", "| run | flag | verdict | message |", "|---|---|---|---|"]
        for row in odd:
            words = row["words"].replace("|", "\\|")
            lines.append(f"| {row['run']} | `--{row['flag']} {row['value']}` | {row['verdict']} | {words} |")
    lines += [
        "",
        "Failed cases were fixed and run again.",
        "",
        "What this does not show: two flags changed at once, GPUs, a hub, and flags that were not tried:",
        f"{', '.join(f'`{name}` ({why})' for name, why in LEFT_OUT.items())}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"some of {', '.join(OWN)} (default: all)")
    parser.add_argument("--flags", nargs="*", default=[])
    parser.add_argument("--class", dest="kind", choices=[of for _, _, of in TABLE], help="only flags of this class")
    parser.add_argument("--out", type=Path, default=OUT / "resume_flags.jsonl")
    options = parser.parse_args()
    ranks = WarmRanks()
    done = {(row["run"], row["flag"], str(row["value"])) for row in rows_of(options.out)}
    with tempfile.TemporaryDirectory() as home, options.out.open("a") as out:
        for name in options.runs or OWN:
            campaign = Campaign(name, Path(home), ranks)
            only = options.flags or sorted(named(recipes()[campaign.run.recipe].flags, (options.kind,)))
            for flag, value in cases(campaign.run, EVERY | campaign.run.flags | BASE, only):
                if (name, flag, str(value)) in done:
                    continue
                row = campaign.case(flag, value)
                print(f"{row['run']:20} {row['verdict']:12} --{flag} {value}  {row['words'][:150]}", flush=True)
                out.write(json.dumps(row) + "\n")
                out.flush()
    ranks.close()
    options.out.with_suffix(".md").write_text(page(list(rows_of(options.out))))


if __name__ == "__main__":
    main()
