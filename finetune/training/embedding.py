"""Contrastive training of embeddings: a trainer whose loss compares a step's texts over all ranks and micro-batches
(finetune.training.contrast), and which saves what sentence-transformers needs; the model without a head, and the report
of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.data.columns import WIDTHS
from finetune.data.embedding import IDS, KEYS, EmbeddingData
from finetune.data.embedding_rows import JUDGED, PAIRS, SCORED
from finetune.errors import RequestError
from finetune.models.adapters import MERGED_FOLDER, check_adapter, kept_as, with_adapter
from finetune.models.encoder import EncoderSource, build_encoder, find_encoder_source, pooled
from finetune.models.sentence_folder import copy_sentence_model, write_sentence_model
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments
from finetune.run.recipes.embedding import EmbeddingArguments, EmbeddingDataArguments
from finetune.training.contrast import Contrast, contrast
from finetune.training.evaluation import AtTrainBegin
from finetune.training.merging import merged
from finetune.training.mining import WithNegatives, mine
from finetune.training.model_card import Card, write_card
from finetune.training.results import pictures_of, rows_table, sentences
from finetune.training.resuming import kept_random_states, rng_state, set_rng_state
from finetune.training.retrieval import embedding_metrics
from finetune.training.start import Session
from finetune.training.trainer import FinetuneTrainer

PLACE = "place"  # the index of a micro-batch in its step


@dataclass(frozen=True)
class Part:
    """For a micro-batch of B rows: the losses (B,), and the gradient (B, C, D) of the sum of all losses of its step.
    `random` are the random states that dropout used, None if the vectors need not be computed again."""

    losses: Tensor
    gradient: Tensor
    random: dict[str, Any] | None = None


class EmbeddingTrainer(FinetuneTrainer):
    """Call `compare_by` before training or evaluating."""

    source: EncoderSource
    contrast: Contrast
    samples: list[dict[str, Any]]  # the micro-batches of the current step
    parts: list[Part]  # one for each of them, once computed
    train_dataset: Any

    def compare_by(self, session: Session, source: EncoderSource, of: Contrast) -> None:
        """Set how texts become vectors and how these are compared. Raises RequestError for flags that do not fit the
        data or the model."""
        self.source, self.contrast, self.label_names = source, of, ["labels"]
        self.compute_metrics = embedding_metrics(of, self.global_batch_size)
        if session.training.do_train and self.global_batch_size < 2:
            raise RequestError(
                f"{session.run.said('per_device_train_batch_size')}, in a global batch of 1: it has no other rows to "
                "compare with. Raise it, or --gradient_accumulation_steps."
            )
        count = session[EmbeddingArguments].mined_negatives
        if not count or self.train_dataset is None:
            return
        if of.kind != PAIRS:
            raise RequestError(
                f"--mined_negatives {count}: the data are {of.kind}, and only pairs have negatives. Drop it."
            )
        self.train_dataset = WithNegatives(self.train_dataset, count)
        self.add_callback(AtTrainBegin(self.mine))

    def vectors(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Vectors (B, C, D) in fp32 of B rows of C texts. The i-th texts of all rows are padded to the same length."""
        count, sides = len(inputs[KEYS]), []
        for i, width in enumerate(inputs[WIDTHS]):
            ids, mask = (inputs[name][i * count : (i + 1) * count, :width] for name in ("input_ids", "attention_mask"))
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            sides.append(pooled(hidden, mask, self.source.pooling))
        return torch.stack(sides, dim=1)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Like the Trainer's. Numbers the micro-batches: the loss needs all of a step, and the current one's place."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        for place, sample in enumerate(samples):
            sample[PLACE] = place
        self.samples, self.parts = samples, []
        return samples, items

    def _look_ahead(self, model: Any) -> list[Part]:
        """Compute the vectors of all micro-batches of a step without a graph. Call it only once the first of them is
        processed: the Trainer restores a resumed run's random states just before (transformers 5.23, _run_epoch)."""
        made, drawn = [], []
        for sample in self.samples:
            inputs = self._prepare_inputs(sample)
            drawn.append(rng_state())
            with torch.no_grad():
                made.append(self.vectors(model, inputs))
        found = self._contrasted(made, self.samples)
        return [replace(part, random=states) for part, states in zip(found, drawn, strict=True)]

    def _contrasted(self, made: list[Tensor], samples: list[dict[str, Any]]) -> list[Part]:
        """Losses and gradients of each micro-batch of this rank, compared with all of all ranks. All ranks must call
        it."""
        device, sizes = self.args.device, [len(some) for some in made]
        told = [torch.cat([sample[name].to(device) for sample in samples]) for name in (KEYS, JUDGED)]
        vectors, keys, judged = (self.accelerator.gather(one) for one in (torch.cat(made), *told))
        with torch.autocast(device.type, enabled=False):
            losses, gradient = contrast(vectors, keys, judged.view(torch.float32), self.contrast)
        begin = self.args.process_index * sum(sizes)
        own_rows = slice(begin, begin + sum(sizes))
        return list(map(Part, losses[own_rows].split(sizes), gradient[own_rows].split(sizes)))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training, backpropagates the known gradient of the rows' vectors. An evaluation's loss is over all of its
        rows, so the metrics compute it."""
        if PLACE not in inputs:
            vectors = self.vectors(model, inputs)
            outputs = {"logits": vectors.flatten(1), KEYS: inputs[KEYS], JUDGED: inputs[JUDGED]}
            return (vectors.new_zeros(()), outputs) if return_outputs else vectors.new_zeros(())

        def compared(**given: Any) -> dict[str, Tensor]:
            if not self.parts and len(self.samples) > 1:
                self.parts = self._look_ahead(model)
            part = self.parts[given[PLACE]] if self.parts else None
            with replayed(part.random if part else None):
                vectors = self.vectors(model, given)
            if part is None:
                self.parts = [part] = self._contrasted([vectors.detach()], [given])
            share = (vectors * part.gradient).sum()
            # The value is each row's loss; the gradient is this micro-batch's share of the gradient of all losses.
            return {"logits": (part.losses + (share - share.detach()) / len(vectors)).unsqueeze(1)}

        return super().compute_loss(compared, inputs, return_outputs, num_items_in_batch)

    def write_beside(self, folder: Path) -> None:
        """Write the files that sentence-transformers needs."""
        size, source = self.model.config.get_text_config().hidden_size, self.source
        longest, usual = source.max_seq_length, source.default_prompt
        write_sentence_model(folder, source.pooling, size, longest, source.prompts, usual)

    def mine(self) -> None:
        """Mine negatives for all training rows once, with the model before its first step. All ranks must call it."""
        rows = self.train_dataset
        assert isinstance(rows, WithNegatives)
        rows.found = mine(self, rows, self.embedded)

    def embedded(self, texts: list[list[int]]) -> Tensor:
        """Vectors (texts, D), without a gradient, of texts given as token ids. All ranks must call it with the same
        texts."""

        def compute(inputs: dict[str, Any]) -> Tensor:
            with self.compute_loss_context_manager():
                return self.vectors(self.model_wrapped, inputs)[:, 0]

        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = self.computed(order, lambda i: {IDS: [texts[i]], KEYS: [0]}, compute)
        return torch.empty_like(found).index_copy_(0, torch.tensor(order), found)


@contextlib.contextmanager
def replayed(states: dict[str, Any] | None) -> Iterator[None]:
    """In this block random numbers come from these states; the states outside it do not change."""
    if states is None:
        yield
        return
    with kept_random_states():
        set_rng_state(states)
        yield


USE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
queries, documents = model.encode_query(["One text."]), model.encode_document(["Another.", "A third."])
print(model.similarity(queries, documents))"""
CURVES = {PAIRS: "eval_recall_at_10", SCORED: "eval_spearman"}
LEARNT = {
    PAIRS: "Trained with the cross entropy of each anchor's positive among the texts of the global batch",
    SCORED: "Trained on the order of the scores in the global batch (CoSENT)",
}
OF_LABELS = "Trained on which texts of the global batch have the same label"


def embedding_source(session: Session) -> EncoderSource:
    """Find the model, without loading its weights. Raises RequestError for flags that do not fit it."""
    asked, run = session[EmbeddingDataArguments], session.run
    prompts = {"query": asked.query_prompt, "document": asked.document_prompt}
    source = find_encoder_source(
        session[ModelArguments], session[EmbeddingArguments].pooling, asked.max_seq_length, prompts
    )
    session.say(*check_adapter(run, source.adapter))
    return source


def contrast_of(session: Session, kind: str) -> Contrast:
    """The loss that the flags ask for."""
    asked = session[EmbeddingArguments]
    return Contrast(kind, asked.temperature, tuple(sorted(set(asked.matryoshka_dims or ()), reverse=True)))


def embedding_model(session: Session, source: EncoderSource, data: EmbeddingData) -> Any:
    """The model with its adapter. Raises RequestError for --matryoshka_dims larger than its vectors."""
    kept = kept_as(session.run, source.adapter, session.training.bf16)
    model = build_encoder(session[ModelArguments], source, data.tokenizer, kept)
    size, dims = model.config.get_text_config().hidden_size, session[EmbeddingArguments].matryoshka_dims or ()
    if wrong := [dim for dim in dims if dim > size]:
        raise RequestError(
            f"--matryoshka_dims {wrong[0]}: the model's vectors have {size} numbers. Give {size} or less."
        )
    model.accepts_loss_kwargs = False  # the trainer's loss does its own division
    return with_adapter(model, session[AdapterArguments], source.adapter, session.run.task.adapter)


def write_embedding_report(session: Session, data: EmbeddingData, source: EncoderSource) -> list[str]:
    """Write `training_curve.png`, README.md and, with --merge_adapter, the merged model."""
    account, kind = data.account, data.labels.task
    card = Card(
        task="sentence embeddings",
        pipeline_tag="sentence-similarity",
        table=rows_table("rows", account),
        facts=sentences(
            data.columns, *account.notes, LEARNT.get(kind, OF_LABELS), f"Vectors are pooled by {source.pooling}"
        ),
        pictures=pictures_of(session.folder, CURVES.get(kind, "eval_recall_at_1")),
        use=USE,
        library="sentence-transformers",
    )
    write_card(session, source, account, card)
    said = merged(session, source, data, lambda: build_encoder(session[ModelArguments], source, data.tokenizer))
    if said:
        copy_sentence_model(session.folder, session.folder / MERGED_FOLDER)
    return said
