"""How well the built-in names are told by the name alone: every word gets the tag that it has most often in training.

python benchmarks/token_cls_baseline.py
"""

from __future__ import annotations

from collections import Counter, defaultdict

from seqeval.metrics import classification_report

from finetune.data.python_names import name_rows


def main() -> None:
    rows = name_rows()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in zip(*rows["train"].values(), strict=True):
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    guess = [
        [counts[word].most_common(1)[0][0] if word in counts else "O" for word in words]
        for words in rows["validation"]["tokens"]
    ]
    for split, columns in rows.items():
        print(f"{split}: {len(columns['tokens']):,} sentences, {sum(map(len, columns['tokens'])):,} words")
    print(classification_report(rows["validation"]["tags"], guess, digits=3, zero_division=0))


if __name__ == "__main__":
    main()
