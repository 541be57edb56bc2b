"""A baseline for the built-in names: every word gets its most frequent tag in training.

python benchmarks/token_cls_baseline.py
"""

from __future__ import annotations

from collections import Counter, defaultdict

from seqeval.metrics import classification_report, f1_score

from finetune.data.python_names import name_rows


def guessed() -> tuple[list[list[str]], list[list[str]]]:
    """The true held-out tags, and those that the names alone predict."""
    rows = name_rows()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in zip(*rows["train"].values(), strict=True):
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    held_out = rows["validation"]
    return held_out["tags"], [
        [counts[word].most_common(1)[0][0] if word in counts else "O" for word in words] for words in held_out["tokens"]
    ]


def by_name_alone() -> float:
    return float(f1_score(*guessed()))


if __name__ == "__main__":
    print(classification_report(*guessed(), digits=3, zero_division=0))
