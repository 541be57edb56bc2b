"""Extractive question answering: the model and its loss, answers from token scores, and the report of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import log_softmax, softmax
from transformers import AutoModelForQuestionAnswering, DistilBertForQuestionAnswering

from finetune.data.columns import Labels
from finetune.data.question_answering import CONTEXT, FIRST, ID, LAST, NULL, QUESTION, SPANS, TEXTS, QuestionData
from finetune.data.tables import ROW
from finetune.errors import RequestError
from finetune.metrics.squad import normalized
from finetune.models.adapters import heads_of, kept_as, with_adapter
from finetune.models.classifier import Source, fit_to, scratch_config
from finetune.models.source import IN_FP32, Kept, load_weights
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments
from finetune.run.recipes.question_answering import AnswerArguments, QuestionDataArguments, span_shape
from finetune.training.merging import merged
from finetune.training.metric_modules import LoadedMetrics, load_metrics
from finetune.training.metrics import LOSS, settle_best_metric
from finetune.training.model_card import Card, write_card
from finetune.training.results import pictures_of, rows_table, sentences
from finetune.training.run_folder import write_text
from finetune.training.start import Session
from finetune.training.thresholds import save_thresholds
from finetune.training.trainer import FinetuneTrainer

SAMPLES = {"predictions": ["one text", ""], "references": [["one text", "another"], []]}
LABELS_A_WINDOW = 3  # the answer's first token, its last token, and the window's number of tokens
SHOWN_ROWS = 8  # in the model card
USE = """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForQuestionAnswering.from_pretrained("path/to/this/folder")
question, context = "What is asked?", "A text that says it."
read = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
offsets, is_context = read.pop("offset_mapping")[0], torch.tensor([side == 1 for side in read.sequence_ids(0)])
scores = model(**read)
pairs = (scores.start_logits[0][:, None] + scores.end_logits[0]).masked_fill(~(is_context[:, None] & is_context), -1e9)
first, last = divmod(int(pairs.triu().masked_fill(pairs.new_ones(pairs.shape).tril(-1) > 0, -1e9).argmax()), len(pairs))
print(context[offsets[first][0] : offsets[last][1]])"""


def span_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, label_smoothing: float = 0.0
) -> torch.Tensor:
    """A `compute_loss_func`: cross entropy of the answer's first and last token, averaged over the global batch's
    windows. `labels` (B, 3) are first token, last token and number of tokens. A model's own loss includes padding."""
    sizes = labels[:, 2]
    total = outputs["start_logits"].new_zeros((), dtype=torch.float32)
    for name, places in (("start_logits", labels[:, 0]), ("end_logits", labels[:, 1])):
        scores = outputs[name].float()  # (B, T)
        own = torch.arange(scores.shape[1], device=scores.device) < sizes[:, None]
        chances = scores.masked_fill(~own, -math.inf).log_softmax(-1)
        right = chances.gather(1, places[:, None])[:, 0]
        even = chances.masked_fill(~own, 0.0).sum(-1) / sizes
        total = total - ((1 - label_smoothing) * right + label_smoothing * even).sum()
    items = labels.numel() if num_items_in_batch is None else num_items_in_batch
    return total * LABELS_A_WINDOW / (2 * items)


def both_scores(logits: Any, labels: torch.Tensor | None) -> torch.Tensor:
    """The Trainer's `preprocess_logits_for_metrics`: stack each token's two scores into one tensor (B, T, 2)."""
    return torch.stack([one.float() for one in logits[:2]], dim=-1)


def span_model(session: Session, source: Source, data: QuestionData) -> Any:
    """The model with its adapter. Build it after `start`, so that ZeRO-3 shards it. Raises RequestError."""
    kept = kept_as(session.run, source.adapter, session.training.bf16)
    model = _built(session, source, data, kept)
    model.accepts_loss_kwargs = False  # the recipe's loss does its own division
    return with_adapter(model, session[AdapterArguments], source.adapter, session.run.task.adapter)


def _built(session: Session, source: Source, data: QuestionData, kept: Kept = IN_FP32) -> Any:
    arguments, config, kind = session[ModelArguments], source.config, AutoModelForQuestionAnswering
    trained = [name for name in getattr(config, "architectures", None) or () if name.endswith("ForQuestionAnswering")]
    if not session.training.do_train and not trained:
        raise RequestError(
            "--do_train False evaluates a trained model, but --model_name_or_path "
            f"{'is not given' if config is None else 'names no model that answers questions'}. Give one that was "
            "trained on such data."
        )
    if config is None:
        share = span_shape(session.run.value)["qa_dropout"]
        return DistilBertForQuestionAnswering(scratch_config(arguments, source, data.tokenizer, {"qa_dropout": share}))
    if session.training.do_train and hasattr(config, "thresholds"):
        del config.thresholds  # they belong to the weights before training
    config.num_labels = 2
    fit_to(data.tokenizer, config)
    if kept.in_4bit:
        with torch.device("meta"):
            kept = replace(kept, whole=tuple(heads_of(kind.from_config(config))))
    makes_head = session.training.do_train or source.adapter is not None  # an adapter brings its own head
    return load_weights(kind, str(source.pretrained), config, arguments, kept, has_new_head=makes_head)


@dataclass(frozen=True)
class Answer:
    """The best answers to a question, most likely first, each as (start character, end character, score), and by how
    much "no answer" outscores the best of them."""

    row: int
    id: str
    question: str
    context: str
    spans: tuple[tuple[int, int, float], ...]
    null_difference: float
    truth: tuple[str, ...] | None

    def text(self, threshold: float) -> str:
        """The answer; empty if none is given."""
        if not self.spans or self.null_difference > threshold:
            return ""
        first, last, _ = self.spans[0]
        return self.context[first:last]


def answers_of(windows: Any, scores: npt.NDArray[Any], asked: AnswerArguments) -> list[Answer]:
    """Answers from the scores (N, T, 2) of windows, in the order of the questions' rows."""
    of: dict[int, list[int]] = {}
    for place, row in enumerate(windows[ROW][:]):
        of.setdefault(row, []).append(place)
    found = []
    for row, places in sorted(of.items()):
        parts = [(windows[place], scores[place]) for place in places]
        best: dict[tuple[int, int], float] = {}
        null = min(float(score[window[NULL]].sum()) for window, score in parts)
        for window, score in parts:
            for span, value in _spans(window, score, asked):
                best[span] = max(value, best.get(span, -math.inf))
        ordered = sorted(best.items(), key=lambda one: (-one[1], one[0]))[: asked.n_best_size]
        first, truth = parts[0][0], parts[0][0].get(TEXTS)
        found.append(Answer(
            row, first[ID], first[QUESTION], first[CONTEXT], tuple((*span, value) for span, value in ordered),
            null - ordered[0][1] if ordered else math.inf, None if truth is None else tuple(truth),
        ))  # fmt: skip
    return found


def _spans(
    window: Mapping[str, Any], score: npt.NDArray[Any], asked: AnswerArguments
) -> Iterator[tuple[tuple[int, int], float]]:
    """Start and end characters, and the score, of a window's likeliest spans of at most `max_answer_length` tokens."""
    firsts, lasts = np.asarray(window[FIRST]), np.asarray(window[LAST])
    (places,) = np.nonzero(lasts > firsts)
    score = score[places]
    begins, ends = (places[np.argsort(-score[:, side], kind="stable")[: asked.n_best_size]] for side in (0, 1))
    value = dict(zip(places.tolist(), score.tolist(), strict=True))
    for begin in begins.tolist():
        for end in ends.tolist():
            if begin <= end < begin + asked.max_answer_length:
                yield (int(firsts[begin]), int(lasts[end])), value[begin][0] + value[end][1]


class AnswerMetrics(LoadedMetrics):
    """A `compute_metrics` that returns the exact loss over windows; `of_answers` applies the metrics called `names` to
    the answers' texts."""

    labels: Labels = SPANS

    def __init__(self, names: Sequence[str]) -> None:
        self.metrics = load_metrics(names, None, SAMPLES, "question answering", (LOSS, "null_threshold"))

    def __call__(self, evaluated: Any) -> dict[str, float]:
        scores, labels = np.asarray(evaluated.predictions, dtype=np.float64), np.asarray(evaluated.label_ids)
        own = np.arange(scores.shape[1]) < labels[:, 2:]
        chances = log_softmax(np.where(own[..., None], scores, -np.inf), axis=1)
        rows = np.arange(len(labels))
        return {LOSS: float(-(chances[rows, labels[:, 0], 0] + chances[rows, labels[:, 1], 1]).mean() / 2)}

    def of_answers(self, answers: Sequence[Answer], threshold: float) -> dict[str, float]:
        said, truths = [one.text(threshold) for one in answers], [list(one.truth or ()) for one in answers]
        return self.figures({"predictions": said, "references": truths})


def metrics_of_answers(session: Session) -> AnswerMetrics:
    """The metrics that --metrics names, or SQuAD's; tells the Trainer how to compare models. Raises RequestError."""
    metrics = AnswerMetrics(session[AnswerArguments].metrics or ("squad",))
    settle_best_metric(session.training, metrics, session.run.given)
    return metrics


class AnswerTrainer(FinetuneTrainer):
    """Answers the questions of each set that it evaluates. `found` maps a metric prefix to the latest answers;
    "no answer" is given where it outscores the best answer by more than `threshold`."""

    def judge_answers(self, session: Session, source: Source, metrics: AnswerMetrics) -> None:
        """Call it before the trainer is used."""
        self.asked, self.judges = session[AnswerArguments], metrics
        asked, given = session[QuestionDataArguments].version_2_with_negative, self.asked.null_score_diff_threshold
        if given is None and not session.training.do_train:
            given = _carried(source.config)
        self.takes_none = asked or given is not None
        if self.takes_none and not asked:
            session.say(f"note: the model was trained to give no answer if there is none (threshold {given:.4g})")
        self.chooses = self.takes_none and given is None
        self.threshold = math.inf if not self.takes_none else 0.0 if given is None else given
        self.found: dict[str, list[Answer]] = {}

    def more_figures(self, dataset: Any, prefix: str) -> dict[str, float]:
        """The metrics of the answers."""
        answers = self.found[prefix] = answers_of(dataset, np.asarray(self.looped.predictions), self.asked)
        if any(one.truth is None for one in answers):
            return {}
        if self.chooses and prefix == "eval":
            self.threshold = best_threshold(answers)
        chosen = {"null_threshold": self.threshold} if self.takes_none else {}
        return {**self.judges.of_answers(answers, self.threshold), **chosen}


def _carried(config: Any) -> float | None:
    """The threshold in a trained model's config; the config is untrusted, so its type is checked."""
    found: Any = getattr(config, "thresholds", None)
    is_one = isinstance(found, list) and len(found) == 1 and isinstance(found[0], int | float)
    return float(found[0]) if is_one else None


def best_threshold(answers: Sequence[Answer]) -> float:
    """The threshold at which most questions are answered exactly, as SQuAD's metric counts it, or rightly left without
    an answer. It lies halfway between two questions; among several equally good ones, the nearest to 0."""
    ordered = sorted(answers, key=lambda one: one.null_difference)
    # Questions below the threshold, the first k of them, get an answer.
    right = [float(normalized(one.text(math.inf)) in map(normalized, one.truth or ())) for one in ordered]
    rightly_none = [float(not one.truth) for one in ordered]
    gains = np.cumsum([0.0, *np.subtract(right, rightly_none)])
    ends = np.clip([one.null_difference for one in ordered], -1e6, 1e6)
    cuts = np.concatenate([[ends[0] - 1], (ends[1:] + ends[:-1]) / 2, [ends[-1] + 1]])
    gains[1:-1][cuts[1:-1] >= ends[1:]] = -np.inf  # no threshold lies between two that are equal
    best = np.flatnonzero(gains >= gains.max() - 1e-9)
    return float(cuts[best[np.argmin(np.abs(cuts[best]))]])


def write_answer_report(session: Session, data: QuestionData, source: Source, trainer: AnswerTrainer) -> list[str]:
    """Write `predictions.jsonl`, the training curve, and README.md with some of the answers."""
    folder, account, threshold = session.folder, data.account, trainer.threshold
    if "predict" in trainer.found:
        write_answers(folder / "predictions.jsonl", trainer.found["predict"], threshold)
    if trainer.takes_none and session.training.do_train:
        save_thresholds(folder, [threshold])
    held_out, tables = trainer.found.get("eval", []), []
    if held_out:
        shown = held_out[:: max(1, len(held_out) // SHOWN_ROWS)][:SHOWN_ROWS]
        rows = [(one.question, " | ".join(one.truth or ()), one.text(threshold)) for one in shown]
        tables = [("Some held-out questions, with the right answers and the model's:",
                   [("question", "answers", "the model's"), *rows])]  # fmt: skip
    stride = f"Longer contexts are read in windows of {account.max_seq_length} tokens"
    none = f"A question gets no answer if that scores higher by more than {threshold:.4g}" if trainer.takes_none else ""
    card = Card(
        task="question answering",
        table=rows_table("windows", account),
        facts=sentences(data.columns, *account.notes, stride, none),
        pictures=pictures_of(folder, "eval_f1"),
        use=USE,
        tables=tables,
    )
    write_card(session, source, account, card)
    return merged(session, source, data, lambda: _built(session, source, data))


def write_answers(path: Path, answers: Sequence[Answer], threshold: float) -> None:
    """Write one line of JSON per question, in input order: the answer, its probability among the best answers, these
    answers with their positions in the context, and the true answers where known."""
    lines = []
    for one in answers:
        values = [value for *_, value in one.spans]
        has_null = math.isfinite(threshold) and math.isfinite(one.null_difference)
        chances = softmax([*values, *([values[0] + one.null_difference] if has_null else [])]).tolist()
        best = [{"text": one.context[first:last], "score": round(chance, 6), "start": first, "end": last}
                for (first, last, _), chance in zip(one.spans, chances, strict=False)]  # fmt: skip
        text = one.text(threshold)
        chance = 0.0 if not best else best[0]["score"] if text else round(chances[-1], 6)
        row = {ID: one.id, "index": one.row, QUESTION: one.question, "answer": text, "score": chance, "n_best": best}
        row |= {"null_score_diff": round(one.null_difference, 6)} if has_null else {}
        row |= {} if one.truth is None else {"answers": list(one.truth)}
        lines.append(json.dumps(row, ensure_ascii=False))
    write_text(path, "".join(line + "\n" for line in lines))
