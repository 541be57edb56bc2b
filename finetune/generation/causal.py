"""Answers to held-out prompts at each evaluation of a causal language model in training, and how they are judged.

A prompt is what precedes the last answer of a held-out document, token for token as in training, and the model's answer
is judged against the document's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.causal_lm import CorpusData
from finetune.data.columns import TEXT
from finetune.data.mixture import Joined
from finetune.data.packing import PackedDataset
from finetune.errors import RequestError
from finetune.generation.answering import counted, most_new_of, settled_answerer
from finetune.generation.batches import batches_of
from finetune.generation.encode import fit
from finetune.generation.judging import USUAL_METRICS, TextMetrics, over_ranks, table_of, write_rows
from finetune.models.causal import CausalSource
from finetune.models.source import positions_of
from finetune.run.flags.language import GeneratedAnswerArguments
from finetune.training.experts import RoutedMixin
from finetune.training.figures import more_is_better
from finetune.training.metrics import language_metrics, settle_best_metric
from finetune.training.start import Session
from finetune.training.trainer import FinetuneTrainer

GREEDY = argparse.Namespace(temperature=0.0, top_p=None, seed=0, stop=None)
OWN_FIGURES = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "token_accuracy")
PREDICTIONS = "predictions.jsonl"


class AnsweringTrainer(RoutedMixin, FinetuneTrainer):
    """Answers the held-out prompts after computing their loss. `written` has the last evaluation's answers, in the
    order of the documents, the same on all ranks."""

    metrics: TextMetrics | None = None
    written: Sequence[str] = ()

    @staticmethod
    def metrics_for(session: Session, data: CorpusData) -> Callable[[Any], dict[str, float]]:
        """A language model's metrics, and those of --metrics if answers are generated. Raises RequestError for a metric
        that cannot be loaded, and for data without answers."""
        rates, asked = data.account.rates, session[GeneratedAnswerArguments]
        of_rows = language_metrics(*rates)
        if not asked.predict_with_generate:
            return of_rows
        if data.account.kind == TEXT:
            raise RequestError(
                f"{session.run.said('predict_with_generate')}: the data is plain text, which has no answers. "
                "Give conversations, or rows of prompts and completions; --sample_prompt continues a text."
            )
        own = {name: more_is_better(name) is True for name in (*OWN_FIGURES, *(f"{name}_loss" for name in rates[2]))}
        metrics = TextMetrics(asked.metrics or USUAL_METRICS, "text_to_text", own, of_rows)
        settle_best_metric(session.training, metrics, session.run.given)
        return metrics

    def judge_answers(self, session: Session, source: CausalSource, data: CorpusData, metrics: Any) -> None:
        """Set up the evaluation of answers; call it before the trainer is used. Raises RequestError for more tokens
        than the model has positions."""
        if not isinstance(metrics, TextMetrics):
            return
        config = source.config.get_text_config()
        self.positions, given = positions_of(config), session[GeneratedAnswerArguments].generation_max_new_tokens
        if given and given >= self.positions:
            raise RequestError(
                f"--generation_max_new_tokens is {given}, but the model has {self.positions} positions, the prompt's "
                f"included. Give at most {self.positions - 1}."
            )
        self.metrics, self.embedded = metrics, self.model.get_input_embeddings().num_embeddings
        self.most_new, self.exchanges = most_new_of(given, self.positions), exchanges_of(data.splits["validation"])
        if not self.exchanges.prompts:
            raise RequestError(
                f"{session.run.said('predict_with_generate')}: no held-out document has both a question and an answer. "
                "Give others in --validation_file, or drop it."
            )
        self.targets = self._texts(self.exchanges.answers)
        self.shown_prompts = self._texts(self.exchanges.prompts)
        cut = fit(self.exchanges.prompts, (), self.positions, self.most_new, truncates=True)
        asked, every = len(self.targets), self.exchanges.documents
        lacking = f", of {every:,} held-out documents; the others have no question or no answer" * (asked < every)
        of_cut = f"; {cut:,} exceed the model's positions and lose their beginning" if cut else ""
        session.say(
            f"evaluation: {counted(asked, 'prompt')} answered greedily, with at most {self.most_new:,} tokens"
            f"{lacking}{of_cut}"
        )

    def more_figures(self, dataset: Any, prefix: str) -> dict[str, float]:
        """Answer all prompts; returns the metrics of the answers."""
        if self.metrics is None:
            return {}
        prompts = self.exchanges.prompts
        batches = batches_of([len(ids) for ids in prompts], self.positions, self.most_new, self.args.eval_batch_size)
        with settings_kept(self.model):
            answerer = settled_answerer(
                GREEDY, self.model, self.processing_class, self.embedded, self.args.device, self.needs_all_ranks
            )
            rows = over_ranks(
                self, batches, lambda batch: answerer.answer([prompts[number] for number in batch.numbers], batch)
            )
        self.written = [row["text"] for row in rows]
        return self.metrics.of_texts(self.written, self.targets)

    def write_answers(self, session: Session) -> list[tuple[str, Sequence[Sequence[str]]]]:
        """Write predictions.jsonl to the run folder; returns a table of some for the model card. Only on rank 0."""
        if not self.written:
            return []
        columns = {"prompt": self.shown_prompts, "target": self.targets, "prediction": self.written}
        write_rows(session.folder / PREDICTIONS, {"index": self.exchanges.numbers, **columns})
        said = "From the held-out documents: the prompt, the reference answer, and the model's last answer:"
        return [(said, table_of({"asked": self.shown_prompts, "right": self.targets, "written": self.written}))]

    def _texts(self, ids: Sequence[list[int]]) -> list[str]:
        return [str(text) for text in self.processing_class.batch_decode(ids, skip_special_tokens=True)]


@contextmanager
def settings_kept(model: Any) -> Iterator[None]:
    """Restores a model's generation configs afterwards, since they are saved with it; also that of the model inside an
    adapter, which peft 0.21 replaces with the adapter's (peft_model.py, PeftModelForCausalLM.generate)."""
    name = "generation_config"
    before = {one: vars(one).get(name) for one in model.modules()}
    try:
        yield
    finally:
        for one, config in before.items():
            if config is not None:
                vars(one)[name] = config
            else:
                vars(one).pop(name, None)


@dataclass(frozen=True)
class Exchanges:
    """For each document: its number in the split, the tokens before its last answer, and the answer's tokens."""

    numbers: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]
    documents: int  # documents in the split, including those without a prompt or answer


def exchanges_of(split: PackedDataset | Joined) -> Exchanges:
    """The last trained turn of each conversation, or a row's completion, including its end token; the prompt is
    everything before it, including the header. Skips documents without a prompt or answer. The split must record which
    tokens are trained on."""
    numbers, prompts, answers, first = [], [], [], 0
    for part in split.parts if isinstance(split, Joined) else (split,):
        tokens = part.tokens
        for number, (start, end) in enumerate(pairwise(tokens.starts.tolist()), first):
            begin, finish = _last_run(tokens.learnt[start:end] if tokens.learnt is not None else np.zeros(0, bool))
            if begin:
                numbers.append(number)
                prompts.append(tokens.ids[start : start + begin].tolist())
                answers.append(tokens.ids[start + begin : start + finish].tolist())
        first += len(tokens.starts) - 1
    return Exchanges(numbers, prompts, answers, first)


def _last_run(learnt: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Start and end of the last contiguous run of trained tokens; 0, 0 if there is none."""
    places = np.flatnonzero(learnt)
    if not len(places):
        return 0, 0
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1] if len(breaks) else places[0]), int(places[-1]) + 1
