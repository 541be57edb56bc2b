r"""SIGKILL, and something is changed before the next launch: is the run refused, or the same in the end?

    python benchmarks/faults_changed.py                # 60 kills and more, about forty minutes on two cores
    python benchmarks/faults_changed.py --runs zero2   # some of them

A chain is as in faults.py: launched, killed at a random moment, launched again. Before a launch that has a checkpoint
to go on from, one change is drawn. What has to be refused (REFUSED) is launched with that change first: it must end
with status 2, and leave the run folder's checkpoints as they were. What goes on is kept: logging, saving and
evaluation at other steps, or another world size, ZeRO stage or number of pipelines (MOVES). In the end the weights are
compared with those of a run that nobody killed: bit for bit, or after a move as far apart as sums in another order
come (TO_ROUNDING). Writes docs/results/faults_changed.jsonl, a row for each kill, change and chain, and the page.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from durability_runs import PIPE, REPO, RUNS, SEQ, farthest, rows_of
from faults import Chain, flags_of, newest_durable, uncut_run
from killing import Launch
from releases import in_words

from finetune.training.checkpoints.manifest import checkpoints_in

OUT = REPO / "docs" / "results" / "faults_changed.jsonl"
TO_ROUNDING = 2e-3  # of a weight: what sums in another order differ by, Adam magnifies over 60 steps
MOVES = {"zero2": ("ddp", "plain", "zero3"), "zero3": ("zero2", "plain"), "pipeline": ("pipeline_2x2",)}
EVERYWHERE = {"seed": 9, "optim": "sgd", "average_tokens_across_devices": False}
REFUSED: dict[str, dict[str, Any]] = {
    SEQ: {**EVERYWHERE, "max_train_samples": 64, "max_seq_length": 16, "dropout": 0.2, "group_by_length": False},
    PIPE: {"seed": 9, "max_train_samples": 2, "block_size": 16, "config_overrides": "num_hidden_layers=4"},
}
GOES_ON: dict[str, dict[str, Any]] = {
    "logging and saving": {"logging_steps": 3, "save_steps": 4, "save_total_limit": 3},
    "evaluation": {"eval_strategy": "no", "early_stopping_patience": None},
}


class ChangedChain(Chain):
    def __init__(self, name: str, number: int, seed: int, home: Path) -> None:
        super().__init__(name, number, seed, home)
        self.layouts, self.kept, self.changes = [name], dict[str, Any](), list[dict[str, Any]]()

    def launch(self) -> Launch:
        if newest_durable(self.folder) is not None:
            self.change()
        return self.begin({})

    def begin(self, more: dict[str, Any]) -> Launch:
        self.durable = newest_durable(self.folder)
        words = {**flags_of(self.name), **self.kept, **more, "resume": "allow" if self.durable is None else "auto"}
        command = self.run.command(self.folder, **words)
        return Launch(command, self.folder, self.home / "cache", self.run.ranks)

    def change(self) -> None:
        """Before a launch that goes on: what must be refused half of the time."""
        row: dict[str, Any] = {"run": self.name, "chain": self.number, "at": newest_durable(self.folder)}
        if self.generator.random() < 0.5:
            refused = REFUSED[self.run.recipe]
            flag = self.generator.choice(sorted(refused))
            row |= {"change": f"--{flag} {refused[flag]}", **self.tried({flag: refused[flag]})}
        elif (kind := self.generator.choice([*GOES_ON, "layout"])) == "layout":
            others = [other for other in (self.name, *MOVES[self.name]) if other != self.layouts[-1]]
            self.layouts.append(self.generator.choice(others))
            self.run = RUNS[self.layouts[-1]]
            row["change"] = f"{self.layouts[-2]} to {self.layouts[-1]}"
        else:
            self.kept, row["change"] = GOES_ON[kind], kind
        self.changes.append(row)

    def tried(self, change: dict[str, Any]) -> dict[str, Any]:
        before = self.listing()
        launch = self.begin(change)
        status = launch.wait()
        errors = re.findall(r"^(?:\[rank \d+\] )?error: (.*)", launch.output, re.MULTILINE)
        # torchrun ends with 1 whatever its ranks end with; a second error would be a second rank that speaks.
        refused = status in (1, 2) and len(errors) == 1 and errors[0].startswith("--resume: ")
        kept = before == self.listing()
        row = {"refused": refused, "status": status, "words": errors[:2], "checkpoints_kept": kept}
        return row if refused and kept else {**row, "output": launch.output[-1500:]}

    def listing(self) -> list[tuple[str, int, int]]:
        files = [path for folder in checkpoints_in(self.folder) for path in sorted(folder.rglob("*"))]
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]

    def closing(self, launch: Launch, status: int | None) -> dict[str, Any]:
        row = super().closing(launch, status)
        apart = farthest(self.folder, uncut_run(self.name, self.home)) if row["ended"] else float("inf")
        row |= {"layouts": self.layouts, "apart": apart}
        row["same"] = apart <= TO_ROUNDING if len(self.layouts) > 1 else not row["weights_apart"]
        return row


def page(rows: list[dict[str, Any]]) -> str:
    stack = in_words(rows[-1]["versions"])
    lines = [
        "# Killed, changed, and launched again",
        "",
        f"`python benchmarks/faults_changed.py`, {stack}, two cores. A run of 60 steps is killed by",
        "SIGKILL at random moments, half of them in saves, and something is changed before it is launched again. What",
        "decides the run's course must be refused, with its checkpoints left as they were. All else goes on, and ends",
        "with the weights of a run that nobody touched: bit for bit, or after a change of layout within",
        f"{TO_ROUNDING:g} of each weight.",
        "",
        "| run | kills | resumed | changes refused | not refused | layouts changed | chains the same in the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == name]
        kills, chains = [row for row in mine if "kill" in row], [row for row in mine if "kills" in row]
        tried = [row for row in mine if "refused" in row]
        good = sum(row["refused"] and row["checkpoints_kept"] for row in tried)
        moved = sum(" to " in row.get("change", "") for row in mine)
        resumed = sum(row.get("resumed", False) for row in kills)
        ends = f"{sum(row['same'] for row in chains)} of {len(chains)}"
        lines.append(f"| {name} | {len(kills)} | {resumed} | {good} | {len(tried) - good} | {moved} | {ends} |")
    counts = Counter(row["change"] for row in rows if "change" in row)
    moved_apart = [row["apart"] for row in rows if "kills" in row and len(row["layouts"]) > 1]
    lines += ["", "Changes: " + ", ".join(f"{change} ({number})" for change, number in sorted(counts.items())) + "."]
    if moved_apart:
        lines += ["", f"Farthest weight after a change of layout: {max(moved_apart):.1e}."]
    return "\n".join(
        [*lines, "", "What it does not show: GPUs, several nodes, and data that change under one name.", ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(MOVES), choices=list(MOVES))
    parser.add_argument("--chains", type=int, default=4, help="of each run")
    parser.add_argument("--kills", type=int, default=6, help="in each chain")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    done = {(row["run"], row["chain"]) for row in rows_of(options.out) if "kills" in row}
    with tempfile.TemporaryDirectory() as home:
        for name, number in [(name, number) for number in range(options.chains) for name in options.runs]:
            if (name, number) in done:
                continue
            chain = ChangedChain(name, number, options.seed, Path(home))
            *kills, last = chain.rows(options.kills)
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in (*chain.changes, *kills, last))
            odd = [row["change"] for row in chain.changes if "refused" in row and not row["refused"]]
            print(
                f"{name} {number}: {len(kills)} kills, {chain.layouts}, same: {last['same']}, taken: {odd}", flush=True
            )
    options.out.with_suffix(".md").write_text(page(list(rows_of(options.out))))


if __name__ == "__main__":
    main()
