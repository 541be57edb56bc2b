r"""SIGKILL, and a change before the next launch: is the change refused, or does the run end with the same weights?

    python benchmarks/faults_changed.py                # 60 kills and more, about forty minutes on two cores
    python benchmarks/faults_changed.py --runs zero2   # some of the runs
    python benchmarks/faults_changed.py --runs zero2 zero3 --to plain --chains 1   # one process after the first kill

Chains are as in faults.py: launched, killed at a random moment, launched again. Before each launch that resumes from a
checkpoint, one change is drawn: of the data file or a flag that must be refused (REFUSED), of a flag that is applied
(APPLIED) or has no effect on training (GOES_ON), or of the layout (MOVES): another world size, ZeRO stage or number of
pipelines. A launch with a change that must be refused has to end with one error that names it, and to leave the
checkpoints as they were; then the change is reverted. In the end, the weights are compared bit for bit with those of
runs that were not killed and that took over from one another at the same steps, with the same layouts and applied
flags. Writes docs/results/faults_changed.jsonl, a row for each kill, change and chain, and the page.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from durability_runs import PIPE, REPO, RUNS, SEQ, different_weights, own_rows, rows_of
from faults import FLAGS, Chain, newest_durable
from killing import Launch
from releases import in_words, versions

from finetune.data.builtin import manual_topics
from finetune.data.digests import of_text
from finetune.training.checkpoints.manifest import checkpoints_in

OUT = REPO / "docs" / "results" / "faults_changed.jsonl"
MOVES = {"zero2": ("ddp", "plain", "zero3"), "zero3": ("zero2", "plain"), "pipeline": ("pipeline_2x2",)}
FIRST_TO = 100  # the number of the first chain that begins with a given change of layout
EVERYWHERE = {"seed": 9, "optim": "sgd"}
REFUSED: dict[str, dict[str, Any]] = {
    SEQ: {**EVERYWHERE, "max_train_samples": 64, "max_seq_length": 16, "dropout": 0.2, "group_by_length": False},
    PIPE: {**EVERYWHERE, "max_train_samples": 2, "block_size": 16, "tokenizer": "byte"},
}
APPLIED = {"learning_rate": 5e-4, "weight_decay": 0.1, "adam_beta1": 0.8, "max_grad_norm": 0.5}
GOES_ON: dict[str, dict[str, Any]] = {
    "logging and saving": {"logging_steps": 3, "save_steps": 4, "save_total_limit": 3},
    "evaluation": {"eval_strategy": "no", "early_stopping_patience": None},
    "another path to the data": {},
}
# A pipeline's partition by measured costs may differ from run to run.
MORE_FLAGS = {PIPE: {"partition_method": "parameters"}}
MADE_HOW = """Eight of the chains drew layout changes less often than the others. One pipeline chain was run again: it
had refused different text with a message that did not name `--resume`; now the message does. In chains numbered 100
and above (`--to plain`), the first change is to one process, and the others are drawn. Two such zero3 chains were
killed before their first checkpoint until the last launch, so that the one process had nothing left to train. The seed
of the third (71) was chosen to avoid this: it was killed at step 3, and one process trained on from there."""
Rows = list[list[str]]


def other_words(rows: Rows) -> Rows:
    return [[row[0] + " indeed", *row[1:]] for row in rows]


def other_order(rows: Rows) -> Rows:
    return rows[::-1]


def more_rows(rows: Rows) -> Rows:
    return rows + [[f"{row[0]} again", *row[1:]] for row in rows[:8]]


DATA: dict[str, Callable[[Rows], Rows]] = {
    "a word more in each row": other_words,
    "rows in another order": other_order,
    "more rows": more_rows,
}


@dataclass(frozen=True)
class Life:
    """The layout and flags that ran from `step` to the next life's step."""

    layout: str
    applied: tuple[tuple[str, Any], ...]
    step: int

    def command(self, folder: Path, data: Path, **more: Any) -> list[str]:
        run = RUNS[self.layout]
        words = {**FLAGS, **MORE_FLAGS.get(run.recipe, {}), **dict(self.applied), "train_file": data, **more}
        return run.command(folder, **words)


def written(path: Path, rows: Rows, header: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def data_of(recipe: str, home: Path) -> tuple[list[str], Rows]:
    """Column names, and rows."""
    if recipe == PIPE:
        return ["text"], [[topic] for topic in manual_topics()[:12]]
    header, *rows = csv.reader(own_rows(home).read_text().splitlines())
    return header, rows


def nobody_killed(lives: tuple[Life, ...], data: Path, home: Path, saves: int | None = None) -> Path:
    """The folder of a run that went through the `lives` to its end, trained once; it has a checkpoint at `saves`."""
    folder = home / "uncut" / of_text([str(data), saves, *map(str, lives)])
    if not (folder / "README.md").is_file():
        *before, life = lives
        more: dict[str, Any] = {"save_total_limit": FLAGS["max_steps"], "save_steps": saves or FLAGS["max_steps"]}
        if before:
            earlier = nobody_killed(tuple(before), data, home, life.step)
            more["resume"] = earlier / f"checkpoint-{life.step}"
        launch = Launch(life.command(folder, data, **more), folder, home / "cache", RUNS[life.layout].ranks)
        if launch.wait() != 0:
            raise SystemExit(f"{lives}: {launch.output[-3000:]}")
    return folder


class ChangedChain(Chain):
    def __init__(self, name: str, number: int, seed: int, home: Path, to: str | None = None) -> None:
        super().__init__(name, number, seed, home)
        self.to = to  # the first layout to change to
        self.home.joinpath("uncut").mkdir(exist_ok=True)
        self.header, self.texts = data_of(self.run.recipe, home)
        self.whole = written(home / f"{self.run.recipe}.csv", self.texts, self.header)
        self.data = written(home / "data" / f"{name}-{number}.csv", self.texts, self.header)
        self.layout, self.applied, self.kept = name, dict[str, Any](), dict[str, Any]()
        self.lives: list[Life] = []
        self.changes: list[dict[str, Any]] = []

    def launch(self) -> Launch:
        if newest_durable(self.folder) is not None:
            self.change()
        return self.begin({})

    def begin(self, more: dict[str, Any]) -> Launch:
        self.durable = newest_durable(self.folder)
        words = {**self.kept, **more, "resume": "allow" if self.durable is None else "auto"}
        command = Life(self.layout, tuple(self.applied.items()), 0).command(self.folder, self.data, **words)
        return Launch(command, self.folder, self.home / "cache", self.run.ranks)

    def change(self) -> None:
        """Draw and apply a change before a launch that resumes."""
        row: dict[str, Any] = {"run": self.name, "chain": self.number, "at": newest_durable(self.folder)}
        kinds = ("data refused", "flag refused", "applied", "goes on", "layout", "layout")
        row["kind"] = "layout" if self.to else self.generator.choice(kinds)
        if row["kind"] == "data refused":
            row["change"] = self.generator.choice(sorted(DATA))
            written(self.data, DATA[row["change"]](self.texts), self.header)
            row |= self.tried({}, "rows|tokenizer|model")
            written(self.data, self.texts, self.header)
        elif row["kind"] == "flag refused":
            refused = REFUSED[self.run.recipe]
            flag = self.generator.choice(sorted(refused))
            row |= {
                "change": f"--{flag} {refused[flag]}",
                **self.tried({flag: refused[flag]}, f"--{flag}|rows|tokenizer|model"),
            }
        elif row["kind"] == "applied":
            flag = self.generator.choice(sorted(APPLIED))
            self.applied[flag] = APPLIED[flag]
            row["change"] = f"--{flag} {APPLIED[flag]}"
        elif row["kind"] == "goes on":
            row["change"] = self.generator.choice(sorted(GOES_ON))
            self.kept = GOES_ON[row["change"]]
            if not self.kept:
                self.data = self.data.rename(self.data.with_name(f"moved-{self.data.name}"))
        else:
            others = [other for other in (self.name, *MOVES[self.name]) if other != self.layout]
            other = self.to or self.generator.choice(others)
            row["change"] = f"{self.layout} to {other}"
            self.layout, self.run, self.to = other, RUNS[other], None
        self.changes.append(row)

    def tried(self, change: dict[str, Any], names: str) -> dict[str, Any]:
        """Try a launch that must end with one error that names the change."""
        before = self.listing()
        launch = self.begin(change)
        status = launch.wait()
        errors = re.findall(r"^(?:\[rank \d+\] )?error: (.*)", launch.output, re.MULTILINE)
        # torchrun ends with 1 whatever its ranks end with; a second error would be a second rank that speaks.
        refused = status in (1, 2) and len(errors) == 1 and bool(re.match(f"--resume: .*({names})", errors[0]))
        kept = before == self.listing()
        row = {"refused": refused, "status": status, "words": errors[:2], "checkpoints_kept": kept}
        return row if refused and kept else {**row, "output": launch.output[-1500:]}

    def listing(self) -> list[tuple[str, int, int]]:
        files = [path for folder in checkpoints_in(self.folder) for path in sorted(folder.rglob("*"))]
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]

    def hear(self, launch: Launch) -> None:
        super().hear(launch)
        step = 0 if self.durable is None else launch.went_on_from()
        if step is not None:  # earlier steps after this one belong to an abandoned branch
            earlier = [life for life in self.lives if life.step < step]
            now = Life(self.layout, tuple(sorted(self.applied.items())), step)
            is_new = not earlier or (earlier[-1].layout, earlier[-1].applied) != (now.layout, now.applied)
            self.lives = [*earlier, now] if is_new else earlier

    def told(self) -> list[dict[str, Any]]:
        """Not every step is logged here, so the first logged step does not show where a launch resumed."""
        for row in self.struck:
            row["resumed"] = row.get("from") == (row["durable"] or 0)
            if row["resumed"]:
                row.pop("output", None)
        return super().told()

    def closing(self, launch: Launch, status: int | None) -> dict[str, Any]:
        ended = status == 0 or "nothing is left to do" in launch.output
        row: dict[str, Any] = {"run": self.name, "chain": self.number, "kills": len(self.struck), "ended": ended}
        row |= {"lives": [[life.layout, dict(life.applied), life.step] for life in self.lives], "versions": versions()}
        if not ended:
            return {**row, "weights_apart": ["it did not end"], "output": launch.output[-1500:]}
        row["weights_apart"] = different_weights(self.folder, nobody_killed(tuple(self.lives), self.whole, self.home))
        return row


def page(rows: list[dict[str, Any]]) -> str:
    stack = in_words(next(row["versions"] for row in reversed(rows) if "versions" in row))
    lines = [
        "# Kill, change something, resume",
        "",
        f"`python benchmarks/faults_changed.py`, {stack}, two cores.",
        "A run of 60 steps is killed by SIGKILL at random moments, half of them during saves, and something is changed",
        "before the next launch. Another data file, seed or model shape must be refused with an error that names it,",
        "and the checkpoints must stay as they were. With any other change, the run must resume. In the end, the",
        "weights are compared bit for bit with those of runs that were not killed and that took over from one another",
        "at the same steps, with the same layouts and learning rates. A reference that never changes its layout would",
        "not do: at another world size, dropout draws other numbers.",
        "",
        "Columns count kills, resumed runs, and changes: refused as required (data, flags), not refused as required,",
        "applied to the run, without effect on training, and of the layout.",
        "",
        "| run | kills | resumed | refused: data | refused: flags | not refused | applied | no effect "
        "| layout changed | bit-identical chains |",
        f"|---{'|---' * 9}|",
    ]
    for name in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == name]
        kills, chains = [row for row in mine if "kill" in row], [row for row in mine if "kills" in row]
        good = [row["kind"] for row in mine if row.get("refused") and row["checkpoints_kept"]]
        kinds = Counter(row["kind"] for row in mine if "kind" in row)
        figures = [len(kills), sum(row.get("resumed", False) for row in kills)]
        figures += [good.count("data refused"), good.count("flag refused")]
        figures += [sum("refused" in row for row in mine) - len(good)]
        figures += [kinds["applied"], kinds["goes on"], kinds["layout"]]
        equal = sum(not row["weights_apart"] for row in chains)
        lines.append(f"| {name} | {' | '.join(map(str, figures))} | {equal} of {len(chains)} |")
    odd = [row for row in rows if ("refused" in row and not (row["refused"] and row["checkpoints_kept"]))]
    odd += [row for row in rows if row.get("weights_apart") or ("kill" in row and not row.get("resumed"))]
    good = "Every killed run resumed, every change that must be refused was refused without touching the checkpoints, "
    good += "and every chain was bit-identical."
    lines += ["", "Unexpected results:", ""] if odd else ["", good]
    for row in odd:
        what = row.get("change") or row.get("moment") or f"lives {row['lives']}, apart: {row['weights_apart'][:3]}"
        lines.append(f"- {row['run']} chain {row['chain']}: {what}")
    counts = Counter(row["change"] for row in rows if "change" in row)
    lines += [
        "",
        "How often each change was drawn: "
        + ", ".join(f"`{change}` ({number})" for change, number in sorted(counts.items()))
        + ".",
    ]
    lines += ["", MADE_HOW]
    return "\n".join([*lines, "", "What this does not show: GPUs, several nodes, and data from a hub.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(MOVES), choices=list(MOVES))
    parser.add_argument("--chains", type=int, default=4, help="per run")
    parser.add_argument("--kills", type=int, default=6, help="per chain")
    parser.add_argument("--seed", type=int, default=17)
    layouts = sorted({to for moves in MOVES.values() for to in moves})
    parser.add_argument("--to", choices=layouts, help="the layout after the first kill")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    done = {(row["run"], row["chain"]) for row in rows_of(options.out) if "kills" in row}
    with tempfile.TemporaryDirectory() as home:
        first = FIRST_TO if options.to else 0
        numbers = range(first, first + options.chains)
        for name, number in [(name, number) for number in numbers for name in options.runs]:
            if (name, number) in done:
                continue
            chain = ChangedChain(name, number, options.seed, Path(home), options.to)
            *kills, last = chain.rows(options.kills)
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in (*chain.changes, *kills, last))
            shutil.rmtree(chain.folder, ignore_errors=True)
            odd = [row["change"] for row in chain.changes if "refused" in row and not row["refused"]]
            lost = sum(not row.get("resumed") for row in kills)
            ends = last["weights_apart"] or "bit-identical"
            print(f"{name} {number}: {len(kills)} kills, {lost} lost; not refused: {odd}; {ends}", flush=True)
    options.out.with_suffix(".md").write_text(page(list(rows_of(options.out))))


if __name__ == "__main__":
    main()
