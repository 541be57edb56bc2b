"""An encoder with a decoder in training: the model as its flags ask, a trainer that writes the texts of whole sets at
each evaluation, what they are judged by, and what a run leaves to read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PredictionOutput

from finetune.data.columns import Labels
from finetune.data.seq2seq import PAIRS, SOURCE, TARGET, PairData
from finetune.data.tables import ROW
from finetune.errors import RequestError
from finetune.generation.batches import batches_of, rounds_of
from finetune.models.adapters import check_adapter, kept_as, with_adapter
from finetune.models.seq2seq import PairCollator, Seq2SeqSource, build_seq2seq, find_seq2seq_source, read_as
from finetune.models.source import positions_of
from finetune.run.facts import NO_LIMIT
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.recipes.seq2seq import GeneratedTextArguments, PairArguments, Seq2SeqModelArguments
from finetune.training.chapters import Data, Outcome
from finetune.training.merging import merged
from finetune.training.metric_modules import Metric, load_metrics
from finetune.training.metrics import LOSS, settle_best_metric
from finetune.training.model_card import Card, write_card
from finetune.training.results import named, pictures_of, sentences
from finetune.training.run_folder import write_text
from finetune.training.start import Session
from finetune.training.trainer import FinetuneTrainer

USUAL_METRICS = ("exact_match", "rouge")
SAMPLES = {"predictions": ["one text", "another one"], "references": ["one text", "another"]}
SHOWN_ROWS, SHOWN_CHARACTERS = 8, 160  # of the model card
USE = """from {package} import {auto}
from transformers import AutoTokenizer

model = {auto}.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
made = model.generate(**tokenizer("{prefix}Some text.", return_tensors="pt"), max_new_tokens={most})
print(tokenizer.decode(made[0], skip_special_tokens=True))"""


def pair_source(session: Session) -> Seq2SeqSource:
    """Which model, before its weights. Raises RequestError for flags that do not go with it."""
    if session.shards_weights and not is_deepspeed_zero3_enabled():
        # accelerate 1.15 (utils/fsdp_utils.py, fsdp2_prepare_model) gives the embeddings to a group of their own, and
        # the encoder's and the decoder's, which are the same weight, to the root: torch refuses that.
        raise RequestError(
            f"{session.run.said('fsdp')}: FSDP by accelerate cannot shard embeddings that an encoder and a decoder "
            "share. Use --deepspeed zero3, which shards the same."
        )
    source = find_seq2seq_source(session[Seq2SeqModelArguments], session[PairArguments])
    check_adapter(session.run, source.adapter, session.shards_weights)
    return source


def pair_model(session: Session, source: Seq2SeqSource, data: PairData) -> tuple[Any, Data]:
    """The model with its adapter, and the data with a collator that shifts targets as the model does."""
    kept = kept_as(session.run, source.adapter, session.training.bf16)
    base = build_seq2seq(session[Seq2SeqModelArguments], source, data.tokenizer, kept)
    base.accepts_loss_kwargs = False  # the recipe's loss divides by itself
    model = with_adapter(base, session[AdapterArguments], source.adapter, session.run.recipe.task)
    return model, Data(data.splits, PairCollator(data.tokenizer, base), data.processor, data.lengths)


class PairMetrics:
    """A `compute_metrics` over the rows' figures (N, 3): loss in nats, right guesses, tokens (models.chunked_loss); and
    `of_texts`, what the metrics called `names` say of written texts."""

    labels: Labels = PAIRS

    def __init__(self, names: Sequence[str]) -> None:
        own = (LOSS, "perplexity", "token_accuracy")
        self.metrics: tuple[Metric, ...] = load_metrics(names, None, SAMPLES, "text to text", own)

    def __call__(self, evaluated: Any) -> dict[str, float]:
        nats, right, count = np.asarray(evaluated.predictions, dtype=np.float64).sum(axis=0)
        loss = nats / count
        perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
        return {LOSS: float(loss), "perplexity": perplexity, "token_accuracy": float(right / count)}

    def of_texts(self, written: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
        """The figures, the same on each rank, and how long the written texts are."""
        inputs = {"predictions": list(written), "references": list(truth)}
        return {name: value for metric in self.metrics for name, value in metric.compute(inputs).items()}

    @property
    def greater_is_better(self) -> dict[str, bool]:
        """Every figure of an evaluation, and whether the greater of two is the better one."""
        own = {LOSS: False, "perplexity": False, "token_accuracy": True}
        return own | {figure: better for metric in self.metrics for figure, better in metric.figures.items()}


def metrics_of_texts(session: Session) -> PairMetrics:
    """Those that --metrics names, or the usual; the Trainer is told of the best. Raises RequestError."""
    asked = session[GeneratedTextArguments]
    metrics = PairMetrics((asked.metrics or USUAL_METRICS) if asked.predict_with_generate else ())
    settle_best_metric(session.training, metrics, session.run.given)
    return metrics


class PairTrainer(FinetuneTrainer):
    """Writes the texts of each set that it evaluates, once it has its loss. `written` has those of the last, in the
    order of their rows, by the prefix of its figures; the same on all ranks."""

    asked: GeneratedTextArguments
    metrics: PairMetrics
    most_new: int

    def judge_texts(self, session: Session, source: Seq2SeqSource, metrics: PairMetrics) -> None:
        """Call it before the trainer is used. Raises RequestError for more tokens than the model can write."""
        self.asked, self.metrics = session[GeneratedTextArguments], metrics
        self.most_new = self.asked.generation_max_length or source.max_target_length
        if self.most_new > (positions := positions_of(source.config)):
            raise RequestError(
                f"--generation_max_length is {self.most_new}, but the model has {positions} positions. Give at most "
                f"{positions}."
            )
        self.written: dict[str, list[str]] = {}

    def more_figures(self, dataset: Any, prefix: str) -> dict[str, float]:
        """What the written texts are judged by."""
        if not self.asked.predict_with_generate:
            return {}
        texts = self.written[prefix] = self._write(dataset["input_ids"][:])
        return self.metrics.of_texts(texts, dataset[TARGET][:]) if TARGET in dataset.column_names else {}

    def predict_texts(self, dataset: Any) -> PredictionOutput:
        """As `predict_in_input_order`, `written` too; without figures where the true texts are not known."""
        output = self.predict_in_input_order(dataset)
        order = np.argsort(-np.asarray(dataset["length"]), kind="stable")
        if "predict" in self.written:
            self.written["predict"] = [self.written["predict"][place] for place in np.argsort(order)]
        if TARGET in dataset.column_names:
            return output
        known = {f"predict_{name}" for name in self.metrics.greater_is_better}
        return output._replace(metrics={k: v for k, v in (output.metrics or {}).items() if k not in known})

    def _write(self, sources: Sequence[list[int]]) -> list[str]:
        """All ranks must call it. Batches are the same whatever the number of ranks, and so is what is written. Where
        weights are shared, a rank without a batch does another's once more, and transformers keeps ranks that have done
        until the last has (`synced_gpus`)."""
        rank, ranks = self.args.process_index, self.args.world_size
        batches = batches_of([len(ids) for ids in sources], NO_LIMIT, self.most_new, self.args.eval_batch_size)
        own: list[tuple[int, list[int]]] = []
        for some in rounds_of(batches, ranks):
            self.progress()
            mine = some[rank] if rank < len(some) else some[0] if self.shards_weights else None
            rows = self._generate([sources[number] for number in mine.numbers]) if mine else []
            own += zip(mine.numbers, rows, strict=True) if mine and rank < len(some) else []
        every: list[Any] = [own]
        if ranks > 1:
            every = [None] * ranks
            distributed.all_gather_object(every, own)
        rows_of = dict(row for some in every for row in some)
        ids = [rows_of[number] for number in range(len(sources))]
        return [str(text) for text in self.processing_class.batch_decode(ids, skip_special_tokens=True)]

    def _generate(self, sources: list[list[int]]) -> list[list[int]]:
        """What the model writes, in tokens, with what it puts before and behind."""
        tokenizer, device = self.processing_class, self.args.device
        ids, mask = (one.to(device) for one in read_as(sources, tokenizer.pad_token_id))
        beams = {"num_beams": self.asked.num_beams} if self.asked.num_beams else {}
        with torch.no_grad():
            made = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self.most_new, do_sample=False, **beams
            )
        return [list(row) for row in made.tolist()]


def write_pair_report(
    session: Session, data: PairData, source: Seq2SeqSource, trainer: PairTrainer, done: Outcome
) -> list[str]:
    """`predictions.jsonl`, the picture of the training and README.md with some of what was written."""
    folder, account, written = session.folder, data.account, trainer.written
    if "predict" in written:
        write_texts(folder / "predictions.jsonl", data.splits["test"], written["predict"])
    tables = []
    if done.evaluated is not None and "eval" in written:
        tables = [("Of the validation split, what was read, what is right and what the model wrote:",
                   _table(data.splits["validation"], written["eval"]))]  # fmt: skip
    best = "eval_rougeL" if "rougeL" in trainer.metrics.greater_is_better else "eval_token_accuracy"
    adapted = session.run.value("use_peft") and session.training.do_train
    prefix = json.dumps(session[PairArguments].source_prefix or "", ensure_ascii=False)[1:-1]
    package, auto = ("peft", "AutoPeftModelForSeq2SeqLM") if adapted else ("transformers", "AutoModelForSeq2SeqLM")
    card = Card(
        task="text to text",
        pipeline_tag="text2text-generation",
        **named(session, source, account),
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
    write_card(folder, card)

    def base() -> Any:
        return build_seq2seq(session[Seq2SeqModelArguments], source, data.tokenizer)

    return merged(session, source, data, base)


def write_texts(path: Path, test: Any, texts: Sequence[str]) -> None:
    """A line of JSON for each pair of the `test` split, in input order: its number in the file, what was read, what was
    written, and the true text where it is known."""
    columns = {"index": test[ROW][:], SOURCE: test[SOURCE][:], "prediction": list(texts)}
    columns |= {TARGET: test[TARGET][:]} if TARGET in test.column_names else {}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _table(table: Any, texts: Sequence[str]) -> list[Sequence[str]]:
    """Rows that lie evenly in the split, which is sorted by length."""
    places = np.unique(np.linspace(0, len(texts) - 1, SHOWN_ROWS).astype(int))
    rows = [(table[int(i)][SOURCE], table[int(i)][TARGET], texts[i]) for i in places]
    return [(SOURCE, TARGET, "written"), *([_short(text) for text in row] for row in rows)]


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= SHOWN_CHARACTERS else f"{one[: SHOWN_CHARACTERS - 3]}..."
