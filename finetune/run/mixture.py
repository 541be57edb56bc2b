"""Several training files, optionally with weights: `--train_file a.jsonl:0.7 b.jsonl:0.3`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from finetune.errors import RequestError

WEIGHT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)")
OF_FILE, COUNT_OF_FILE = "loss_", "learnt_tokens_"  # in logs, before a file's name: its training loss, and the tokens
MOST_LOGGED = 20  # files in each log; train_results.json has all
MOST_FILES = 10_000  # 20,000 take half a minute to check


@dataclass(frozen=True)
class Part:
    """A file, the name of its metrics, and its weight before the weights are normalized to sum to 1; None if all
    samples of all files are used once per epoch."""

    path: str
    name: str
    weight: Fraction | None


def parts_of(given: str | Sequence[str] | None) -> tuple[Part, ...]:
    """The files that --train_file names. Raises RequestError for invalid weights."""
    words = [given] if isinstance(given, str) else list(given or ())
    if len(words) > MOST_FILES:
        raise RequestError(f"--train_file names {len(words):,} files; at most {MOST_FILES:,} are mixed. Merge some.")
    split = [_split(word) for word in words]
    weights = [weight for _, weight in split]
    said = f"--train_file {' '.join(words)}"
    if len({path for path, _ in split}) < len(words):
        raise RequestError(f"{said}: a file is given twice. Give it once, with the sum of its weights.")
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        raise RequestError(f"{said}: some files have a weight, and others do not. Give all of them one, or none.")
    if len(words) == 1 and weights[0] is not None:
        raise RequestError(f"{said}: a weight is a share among several files, but there is only one. Drop it.")
    if wrong := [weight for weight in weights if weight is not None and weight <= 0]:
        raise RequestError(f"{said}: a weight is {float(wrong[0]):g}, but it must be more than 0. Leave the file out.")
    names: list[str] = []
    for path, _ in split:
        stem = re.sub(r"\W+", "_", Path(path).stem) or "file"
        same = sum(name == stem or name.startswith(f"{stem}_") for name in names)
        names.append(f"{stem}_{same + 1}" if stem in names else stem)
    return tuple(Part(path, name, weight) for (path, weight), name in zip(split, names, strict=True))


def path_of(word: str) -> str:
    """The path without its weight."""
    return _split(word)[0]


def _split(word: str) -> tuple[str, Fraction | None]:
    path, colon, weight = word.rpartition(":")
    if not (colon and path and WEIGHT.fullmatch(weight)) or Path(word).expanduser().exists():
        return word, None
    return path, Fraction(weight)
