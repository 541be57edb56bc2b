"""Token classification: what an evaluation keeps of each token, entities from tags, and the report of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from seqeval.metrics.sequence_labeling import get_entities

from finetune.data.columns import TOKENS, Labels
from finetune.data.tables import ROW
from finetune.data.tag_schemes import OUTSIDE
from finetune.data.word_tokens import WORDS
from finetune.training.merging import merged, use_of
from finetune.training.metrics import TaskMetrics
from finetune.training.model_card import Card, write_card
from finetune.training.results import label_counts, pictures_of, rows_table, sentences, write_confusion, write_per_label
from finetune.training.run_folder import write_text
from finetune.training.start import Session
from finetune.training.thresholds import named_figures

NO_ENTITY = "no entity"
USE = """from transformers import pipeline

find = pipeline("token-classification", "path/to/this/folder")
"""
CALL = """print(find("Some text.", aggregation_strategy="simple"))  # "first" keeps words whole"""


def kept_of_tokens(logits: Any, labels: torch.Tensor | None) -> torch.Tensor:
    """The Trainer's `preprocess_logits_for_metrics`: reduces logits (B, T, tags) to three numbers per token (B, T, 3),
    however many tags there are: the likeliest tag, its probability, and the cross entropy of the label (0 without
    labels, as in a test file without tags)."""
    logits = (logits[0] if isinstance(logits, tuple) else logits).float()
    chances = logits.log_softmax(-1)
    best = chances.max(-1)
    losses = torch.zeros_like(best.values)
    if labels is not None:
        losses = -chances.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return torch.stack([best.indices.float(), best.values.exp(), losses], dim=-1)


def entity_counts(inputs: dict[str, Any], kinds: Sequence[str]) -> npt.NDArray[np.int64]:
    """Confusion matrix of entity types (types + 1, types + 1): rows are true, columns predicted, and the last of each
    means "no entity with exactly these words". `inputs` are those of an entity metric."""
    place = {kind: i for i, kind in enumerate(kinds)}
    counts: npt.NDArray[np.int64] = np.zeros((len(kinds) + 1, len(kinds) + 1), dtype=np.int64)
    for guess, truth in zip(inputs["predictions"], inputs["references"], strict=True):
        guessed, true = ({(a, b): place[kind] for kind, a, b in get_entities(tags)} for tags in (guess, truth))
        for words in guessed.keys() | true.keys():
            counts[true.get(words, -1), guessed.get(words, -1)] += 1
    return counts


def entity_table(counts: npt.NDArray[np.int64], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Precision, recall, F1 and number of entities for each type, from `entity_counts`."""
    right, support, guessed = np.diag(counts)[:-1], counts.sum(axis=1)[:-1], counts.sum(axis=0)[:-1]
    shares = [2 * right / np.maximum(of, 1) for of in (2 * guessed, 2 * support, guessed + support)]
    return named_figures(kinds, *shares, support)


def entities(tags: Sequence[str], scores: Sequence[float], words: Sequence[str]) -> list[dict[str, Any]]:
    """The entities that the tags make: type, words from `start` up to `end` (exclusive), characters in the words joined
    by spaces, and the mean probability of the tags."""
    begins = np.cumsum([0, *(len(word) + 1 for word in words)])
    return [
        {
            "type": kind,
            "start": first,
            "end": last + 1,
            "start_char": int(begins[first]),
            "end_char": int(begins[last + 1]) - 1,
            "text": " ".join(words[first : last + 1]),
            "score": round(float(np.mean(scores[first : last + 1])), 6),
        }
        for kind, first, last in get_entities(list(tags))
    ]


def write_spans(path: Path, test: Any, labels: Labels, predicted: Any) -> None:
    """Write one line of JSON per sentence of the `test` split, in input order: its number in the file, words, tags,
    entities, and the true tags where known. Words that were truncated or have no token are tagged O."""
    ids, scores = predicted.predictions[..., 0].astype(np.int64), predicted.predictions[..., 1]
    lines = []
    for i, (row, words, first) in enumerate(zip(test[ROW][:], test[WORDS][:], test["first"][:], strict=True)):
        tags = [OUTSIDE if place < 0 else labels.names[ids[i, place]] for place in first]
        chances = [0.0 if place < 0 else float(scores[i, place]) for place in first]
        found: dict[str, Any] = {"index": row, "tokens": words, "tags": tags, "spans": entities(tags, chances, words)}
        if predicted.label_ids is not None:
            known = predicted.label_ids[i]
            found["labels"] = [None if place < 0 else labels.names[known[place]] for place in first]
        if cut := sum(place < 0 for place in first):
            found["words_without_prediction"] = cut
        lines.append(json.dumps(found, ensure_ascii=False))
    write_text(path, "".join(line + "\n" for line in lines))


def write_entity_report(
    session: Session, data: Any, source: Any, metrics: TaskMetrics, evaluated: Any | None, predicted: Any | None
) -> list[str]:
    """Write `predictions.jsonl`, pictures and tables of entities by type, and README.md."""
    folder, account = session.folder, data.account
    if predicted is not None:
        write_spans(folder / "predictions.jsonl", data.splits["test"], data.labels, predicted)
    pictures, tables = pictures_of(folder, "eval_f1"), []
    if evaluated is not None:
        kinds = tuple(name[2:] for name in data.labels.names if name.startswith("B-"))
        inputs, _ = metrics.inputs(evaluated)
        counts = entity_counts(inputs, kinds)
        said = "Entities of the validation split; one is correct if its words and its type are:"
        tables = [write_per_label(folder, entity_table(counts, kinds), "per_type", said, pictures)]
        pictures += write_confusion(folder, counts, Labels(TOKENS, (*kinds, NO_ENTITY)))
    card = Card(
        task="token classification",
        table=rows_table("sentences", account),
        facts=[*sentences(data.columns, *account.notes), *label_counts(account.label_counts)],
        pictures=pictures,
        use=use_of(session, "find", USE) + CALL,
        tables=tables,
    )
    write_card(session, source, account, card)
    return merged(session, source, data)
