"""Evaluates a model that any peer of benchmarks/tasks.py has trained, on held-out rows.

python benchmarks/judged.py preference FOLDER validation.jsonl START        # START: the model before training
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

TOKENS, TARGET_TOKENS = 64, 32  # limits as in training: of texts to embed and of sources, and of targets


def embedding(folder: str, rows: Sequence[dict[str, str]]) -> float:
    """Mean reciprocal rank of each anchor's positive."""
    from sentence_transformers import SentenceTransformer

    from finetune.data.embedding import key
    from finetune.training.retrieval import figures

    model = SentenceTransformer(folder)
    model.max_seq_length = TOKENS
    texts = [[row[name] for row in rows] for name in ("anchor", "positive")]
    vectors = torch.stack([model.encode(some, convert_to_tensor=True).float().cpu() for some in texts], 1)
    keys = torch.tensor([list(map(key, pair)) for pair in zip(*texts, strict=True)])
    return figures(vectors, keys, torch.zeros(len(rows)), "pairs")["mrr_at_10"]


def seq2seq(folder: str, rows: Sequence[dict[str, str]]) -> float:
    """Mean loss per target token."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for row in rows:
        source = tokenizer(row["source"], truncation=True, max_length=2 * TOKENS, return_tensors="pt")
        target = tokenizer(row["target"], truncation=True, max_length=TARGET_TOKENS, return_tensors="pt").input_ids
        with torch.no_grad():
            total += float(model(**source, labels=target).loss) * target.numel()
        count += target.numel()
    return total / count


def preference(folder: str, rows: Sequence[dict[str, str]], start: str) -> float:
    """Share of pairs whose chosen answer gained more log probability in training than the rejected one."""
    gained = [_log_probabilities(one, rows) for one in (folder, start)]
    margins = (gained[0] - gained[1]) @ torch.tensor([1.0, -1.0])
    return float((margins > 0).float().mean())


def _log_probabilities(folder: str, rows: Sequence[dict[str, str]]) -> torch.Tensor:
    """Log probabilities of both answers, of shape (rows, 2)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for row in rows:
        prompt = len(tokenizer(row["prompt"]).input_ids)
        for side in ("chosen", "rejected"):
            ids = tokenizer(row["prompt"] + row[side] + tokenizer.eos_token, return_tensors="pt").input_ids
            with torch.no_grad():
                logs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            found.append(float(logs[prompt - 1 :].sum()))
    return torch.tensor(found).reshape(-1, 2)


def image_cls(folder: str, rows: Sequence[dict[str, str]]) -> float:
    """Accuracy; a row has a picture's `path` and `label`."""
    from transformers import pipeline

    classify = pipeline("image-classification", folder)
    found = [classify(row["path"], top_k=1)[0]["label"] == row["label"] for row in rows]
    return sum(found) / len(found)


JUDGES: dict[str, Callable[..., float]] = {
    "embedding": embedding,
    "seq2seq": seq2seq,
    "preference": preference,
    "image_cls": image_cls,
}

if __name__ == "__main__":
    task, folder, path, *more = sys.argv[1:]
    held_out: list[Any] = [json.loads(line) for line in Path(path).read_text().splitlines()]
    print(JUDGES[task](folder, held_out, *more))
