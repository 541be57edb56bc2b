"""What a run prints at its end on a terminal: the files in its folder, and the next commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from finetune.privacy import shown
from finetune.run.files import DELETING, IDENTITY, LAST_WRITTEN, LOCK, RUN_RECORD, SUPERSEDED
from finetune.run.run import Run
from finetune.run.task import TEXT_GENERATION

FILES = (  # in display order; the first matching pattern counts
    (LAST_WRITTEN, "model card: results, pictures, how to use the model"),
    ("report.html", "report page"),
    ("*model*.safetensors*", "weights"),
    ("merged", "base model and adapter in one"),
    ("*token*", "tokenizer"),
    ("chat_template*", "chat template"),
    ("ds_config.json", 'DeepSpeed config, every "auto" filled'),
    ("*config.json", "config to load it with"),
    ("*.py", "code of the model"),
    ("labels.json", "labels of the classifier"),
    ("thresholds.json", "probability from which each label is given"),
    ("checkpoint-*", "checkpoint, for --resume auto"),
    ("latest", "name of the newest checkpoint"),
    ("predictions*", "predictions for the test split"),
    ("*_results.json", "final metrics"),
    ("metrics.jsonl", "every log, one per line"),
    ("training_curve.png", "loss and metric over steps"),
    ("confusion_matrix.*", "true against predicted labels"),
    ("per_*", "precision, recall and F1 of each label or type"),
    ("schedule.*", "a step of the pipeline, planned and measured"),
    ("profile", "where the time of a step went"),
    ("comms.*", "communication, by DeepSpeed's count"),
    ("flops.txt", "FLOPs, by DeepSpeed's count"),
    ("monitor", "DeepSpeed's own log"),
    ("runs", "TensorBoard's log"),
    (RUN_RECORD, "flags, for --config to run it again"),
    ("environment.json", "command, machine and versions"),
    (IDENTITY, "which run this is"),
    ("train*", "state and arguments of the Trainer"),
    ("_nan", "batches of steps that were not finite"),
    (f"{SUPERSEDED}*", "checkpoint from an abandoned branch of the run"),
)
NOT_SHOWN = (LOCK, f"{DELETING}*")


def print_summary(console: Console, folder: Path, run: Run) -> None:
    """The run folder as a tree, and the next commands."""
    tree = Tree(Text(shown(f"{folder}/"), style="bold"))
    rows = list(rows_of(folder))
    longest = max((len(name) for name, _ in rows), default=0)
    width = longest if longest < console.width / 2 else 0
    for name, phrase in rows:
        tree.add(Text.assemble(f"{name:{width}}  ", (phrase, "dim"), no_wrap=True, overflow="ellipsis"))
    console.print(tree, soft_wrap=False)
    for command in next_commands(folder, run):
        console.print(Text.assemble("next: ", (shown(command), "bold")))


def rows_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and descriptions. Files whose names differ only in numbers share a row, and so do files that no recipe
    writes."""
    names = [f"{path.name}{'/' * path.is_dir()}" for path in folder.iterdir()]
    left = sorted(name for name in names if not _is(name, *NOT_SHOWN))
    for pattern, phrase in FILES:
        alike: dict[str, list[str]] = {}
        for name in (name for name in left if _is(name, pattern)):
            alike.setdefault(re.sub(r"\d+", "0", name), []).append(name)
        yield from ((_folded(some), phrase) for some in alike.values())
        left = [name for name in left if not _is(name, pattern)]
    if left:
        yield shown(left[0]) if len(left) == 1 else f"{len(left):,} others", "not of the recipe"


def next_commands(folder: Path, run: Run) -> list[str]:
    place = shlex.quote(str(folder))
    generate = f"finetune generate {place} --prompts prompts.jsonl --output answers.jsonl"
    writes = run.task == TEXT_GENERATION
    return [f"finetune report {place}", *([generate] if writes else [])]


def _is(name: str, *patterns: str) -> bool:
    return any(fnmatch(name.rstrip("/"), pattern) for pattern in patterns)


def _folded(names: list[str]) -> str:
    ordered = sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return shown(names[0] if len(names) == 1 else f"{ordered[0]} .. {ordered[-1]} ({len(names):,})")
