"""Training an encoder-decoder model: the model, a trainer that generates the texts of a whole split at each evaluation,
their metrics, and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PredictionOutput

from finetune.data.packing import mask_of, padded
from finetune.data.seq2seq import PAIRS, SOURCE, TARGET, PairData
from finetune.data.tables import ROW
from finetune.errors import RequestError, plain
from finetune.generation.batches import batches_of
from finetune.generation.judging import USUAL_METRICS, TextMetrics, over_ranks, table_of, write_rows
from finetune.models.adapters import check_adapter, kept_as, with_adapter
from finetune.models.seq2seq import PairCollator, Seq2SeqSource, build_seq2seq, find_seq2seq_source
from finetune.models.source import positions_of
from finetune.run.facts import NO_LIMIT
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.recipes.seq2seq import GeneratedTextArguments, PairArguments, Seq2SeqModelArguments
from finetune.training.chapters import Data, Outcome
from finetune.training.merging import merged
from finetune.training.metrics import LOSS, settle_best_metric
from finetune.training.model_card import Card, write_card
from finetune.training.results import pictures_of, sentences
from finetune.training.start import Session
from finetune.training.trainer import FinetuneTrainer

OWN_FIGURES = {LOSS: False, "perplexity": False, "token_accuracy": True}
USE = """from {package} import {auto}
from transformers import AutoTokenizer

model = {auto}.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
made = model.generate(**tokenizer("{prefix}Some text.", return_tensors="pt"), max_new_tokens={most})
print(tokenizer.decode(made[0], skip_special_tokens=True))"""


def pair_source(session: Session) -> Seq2SeqSource:
    """The model before its weights are loaded. Raises RequestError for flags that do not fit it."""
    if session.shards_weights and not is_deepspeed_zero3_enabled():
        # accelerate 1.15 (utils/fsdp_utils.py, fsdp2_prepare_model) puts the embeddings into a group of their own, and
        # the encoder's and decoder's, which are the same weight, into the root: torch refuses that.
        raise RequestError(
            f"{session.run.said('fsdp')}: accelerate's FSDP cannot shard embeddings that an encoder and a decoder "
            "share. Use --deepspeed zero3, which shards the same."
        )
    source = find_seq2seq_source(session[Seq2SeqModelArguments], session[PairArguments])
    session.say(*check_adapter(session.run, source.adapter))
    if source.prefix and session[PairArguments].source_prefix is None:
        said = f"note: {json.dumps(plain(source.prefix), ensure_ascii=False)} is put before each source"
        session.say(f"{said}, as in the model's training; --source_prefix sets another.")
    return source


def pair_model(session: Session, source: Seq2SeqSource, data: PairData) -> tuple[Any, Data]:
    """The model with its adapter, and the data with a collator that shifts targets as the model does."""
    source.keep_prefix(data.tokenizer)
    kept = kept_as(session.run, source.adapter, session.training.bf16)
    base = build_seq2seq(session[Seq2SeqModelArguments], source, data.tokenizer, kept)
    base.accepts_loss_kwargs = False  # the recipe's own loss does the division
    model = with_adapter(base, session[AdapterArguments], source.adapter, session.run.task.adapter)
    return model, Data(data.splits, PairCollator(data.tokenizer, base), data.processor, data.lengths)


def pair_figures(evaluated: Any) -> dict[str, float]:
    """Metrics from per-row sums (N, 3): loss in nats, correct predictions, tokens (models.chunked_loss)."""
    nats, right, count = np.asarray(evaluated.predictions, dtype=np.float64).sum(axis=0)
    loss = nats / count
    perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
    return {LOSS: float(loss), "perplexity": perplexity, "token_accuracy": float(right / count)}


def metrics_of_texts(session: Session) -> TextMetrics:
    """The metrics of --metrics, or the usual ones; also sets the Trainer's best metric. Raises RequestError."""
    asked = session[GeneratedTextArguments]
    names = (asked.metrics or USUAL_METRICS) if asked.predict_with_generate else ()
    metrics = TextMetrics(names, PAIRS.task, OWN_FIGURES, pair_figures)
    settle_best_metric(session.training, metrics, session.run.given)
    return metrics


class PairTrainer(FinetuneTrainer):
    """Generates the texts of each split that it evaluates, after its loss. `written` has the latest, in row order, by
    the prefix of the split's metrics; the same on all ranks."""

    asked: GeneratedTextArguments
    metrics: TextMetrics
    most_new: int

    def judge_texts(self, session: Session, source: Seq2SeqSource, metrics: TextMetrics) -> None:
        """Set up the evaluation of texts; call it before the trainer is used. Raises RequestError for more tokens than
        the model has positions."""
        self.asked, self.metrics = session[GeneratedTextArguments], metrics
        self.most_new = self.asked.generation_max_length or source.max_target_length
        if self.most_new > (positions := positions_of(source.config)):
            raise RequestError(
                f"--generation_max_length is {self.most_new}, but the model has {positions} positions. Give at most "
                f"{positions}."
            )
        self.written: dict[str, list[str]] = {}

    def more_figures(self, dataset: Any, prefix: str) -> dict[str, float]:
        """Generate the texts; returns their metrics."""
        if not self.asked.predict_with_generate:
            return {}
        texts = self.written[prefix] = self._write(dataset["input_ids"][:])
        return self.metrics.of_texts(texts, dataset[TARGET][:]) if TARGET in dataset.column_names else {}

    def predict_texts(self, dataset: Any) -> PredictionOutput:
        """As `predict_in_input_order`, with `written` in that order, too; no metrics if there are no references."""
        output = self.predict_in_input_order(dataset)
        order = np.argsort(-np.asarray(dataset["length"]), kind="stable")
        if "predict" in self.written:
            self.written["predict"] = [self.written["predict"][place] for place in np.argsort(order)]
        if TARGET in dataset.column_names:
            return output
        known = {f"predict_{name}" for name in self.metrics.greater_is_better}
        return output._replace(metrics={k: v for k, v in (output.metrics or {}).items() if k not in known})

    def _write(self, sources: Sequence[list[int]]) -> list[str]:
        batches = batches_of([len(ids) for ids in sources], NO_LIMIT, self.most_new, self.args.eval_batch_size)
        ids = over_ranks(self, batches, lambda batch: self._generate([sources[number] for number in batch.numbers]))
        return [str(text) for text in self.processing_class.batch_decode(ids, skip_special_tokens=True)]

    def _generate(self, sources: list[list[int]]) -> list[list[int]]:
        """The model's output as token ids, special tokens included."""
        tokenizer, device = self.processing_class, self.args.device
        ids, mask = padded(sources, tokenizer.pad_token_id).to(device), mask_of(sources).to(device)
        beams = {"num_beams": self.asked.num_beams} if self.asked.num_beams else {}
        with torch.no_grad():
            made = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self.most_new, do_sample=False, **beams
            )
        return [list(row) for row in made.tolist()]


def write_pair_report(
    session: Session, data: PairData, source: Seq2SeqSource, trainer: PairTrainer, done: Outcome
) -> list[str]:
    """Write `predictions.jsonl`, the training curve, and README.md with sample texts."""
    folder, account, written = session.folder, data.account, trainer.written
    if "predict" in written:
        write_texts(folder / "predictions.jsonl", data.splits["test"], written["predict"])
    tables = []
    if done.evaluated is not None and "eval" in written:
        held_out = data.splits["validation"]
        columns = {SOURCE: held_out[SOURCE][:], TARGET: held_out[TARGET][:], "written": written["eval"]}
        said = "From the validation split: the source, the reference, and what the model wrote:"
        tables = [(said, table_of(columns))]
    best = "eval_rougeL" if "rougeL" in trainer.metrics.greater_is_better else "eval_token_accuracy"
    adapted = session.run.value("use_peft") and session.training.do_train
    prefix = json.dumps(source.prefix, ensure_ascii=False)[1:-1]
    package, auto = ("peft", "AutoPeftModelForSeq2SeqLM") if adapted else ("transformers", "AutoModelForSeq2SeqLM")
    card = Card(
        task="text to text",
        table=[("split", "pairs", "left out", "sources cut", "targets cut"),
               *((name, n, account.skipped.get(name, 0), *data.cut(name).values())
                 for name, n in account.rows.items())],
        facts=[
            f"Sources have at most {source.max_source_length} tokens, targets {source.max_target_length}.",
            *sentences(data.columns, *account.notes),
        ],
        pictures=pictures_of(folder, best),
        use=USE.format(package=package, auto=auto, prefix=prefix, most=trainer.most_new),
        tables=tables,
    )  # fmt: skip
    write_card(session, source, account, card)

    def base() -> Any:
        return build_seq2seq(session[Seq2SeqModelArguments], source, data.tokenizer)

    return merged(session, source, data, base)


def write_texts(path: Path, test: Any, texts: Sequence[str]) -> None:
    """Write a line for each pair of the `test` split, in input order: its number in the file, the source, the
    prediction, and the target if known."""
    columns = {"index": test[ROW][:], SOURCE: test[SOURCE][:], "prediction": list(texts)}
    write_rows(path, columns | ({TARGET: test[TARGET][:]} if TARGET in test.column_names else {}))
