"""For recipes/embedding.py: a model without a head, how its vectors are compared, and the report of a run."""

from __future__ import annotations

from typing import Any

from finetune.data.embedding import EmbeddingData
from finetune.data.embedding_rows import PAIRS, SCORED
from finetune.errors import RequestError
from finetune.models.adapters import MERGED_FOLDER, check_adapter, kept_as, with_adapter
from finetune.models.encoder import EncoderSource, build_encoder, find_encoder_source
from finetune.models.sentence_folder import copy_sentence_model
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments
from finetune.run.recipes.embedding import EmbeddingArguments, EmbeddingDataArguments
from finetune.training.contrast import Contrast
from finetune.training.figures import more_is_better
from finetune.training.merging import merged
from finetune.training.model_card import Card, write_card
from finetune.training.results import named, pictures_of, rows_table, sentences
from finetune.training.start import Session

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
    asked, training, run = session[EmbeddingDataArguments], session.training, session.run
    prompts = {"query": asked.query_prompt, "document": asked.document_prompt}
    source = find_encoder_source(
        session[ModelArguments], session[EmbeddingArguments].pooling, asked.max_seq_length, prompts
    )
    check_adapter(run, source.model.adapter, session.shards_weights)
    if training.metric_for_best_model and "greater_is_better" not in run.given:
        training.greater_is_better = more_is_better(training.metric_for_best_model) is not False
    return source


def contrast_of(session: Session, kind: str) -> Contrast:
    """The loss that the flags ask for."""
    asked = session[EmbeddingArguments]
    return Contrast(kind, asked.temperature, tuple(sorted(set(asked.matryoshka_dims or ()), reverse=True)))


def embedding_model(session: Session, source: EncoderSource, data: EmbeddingData) -> Any:
    """The model with its adapter. Raises RequestError for --matryoshka_dims larger than its vectors."""
    kept = kept_as(session.run, source.model.adapter, session.training.bf16)
    model = build_encoder(session[ModelArguments], source.model, data.tokenizer, kept)
    size, dims = model.config.hidden_size, session[EmbeddingArguments].matryoshka_dims or ()
    if wrong := [dim for dim in dims if dim > size]:
        raise RequestError(
            f"--matryoshka_dims {wrong[0]}: the model's vectors have {size} numbers. Give {size} or less."
        )
    model.accepts_loss_kwargs = False  # the trainer's loss does its own division
    return with_adapter(model, session[AdapterArguments], source.model.adapter, session.run.task.adapter)


def write_embedding_report(session: Session, data: EmbeddingData, source: EncoderSource) -> list[str]:
    """Write `training_curve.png`, README.md and, with --merge_adapter, the merged model."""
    account, kind = data.account, data.labels.task
    card = Card(
        task="sentence embeddings",
        pipeline_tag="sentence-similarity",
        **named(session, source, account),
        table=rows_table("rows", account),
        facts=sentences(
            data.columns, *account.notes, LEARNT.get(kind, OF_LABELS), f"Vectors are pooled by {source.pooling}"
        ),
        pictures=pictures_of(session.folder, CURVES.get(kind, "eval_recall_at_1")),
        use=USE,
        library="sentence-transformers",
    )
    write_card(session.folder, card)
    said = merged(session, source, data, lambda: build_encoder(session[ModelArguments], source.model, data.tokenizer))
    if said:
        copy_sentence_model(session.folder, session.folder / MERGED_FOLDER)
    return said
