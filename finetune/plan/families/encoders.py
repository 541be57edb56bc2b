"""Encoders: BERT, RoBERTa, DistilBERT."""

from __future__ import annotations

from collections.abc import Callable

from finetune.plan.families.parts import (
    CLASSES,
    MASKED,
    TAGS,
    Buffers,
    Family,
    Named,
    Sizes,
    linear,
    norm,
    nothing,
)

# BERT, RoBERTa: the same encoder, other heads.


def _bert_before(prefix: str) -> Callable[[Sizes], Named]:
    def build(sizes: Sizes) -> Named:
        hidden, name = sizes("hidden_size"), f"{prefix}.embeddings"
        yield f"{name}.word_embeddings.weight", (sizes("vocab_size"), hidden)
        yield f"{name}.position_embeddings.weight", (sizes("max_position_embeddings"), hidden)
        yield f"{name}.token_type_embeddings.weight", (sizes("type_vocab_size", default=2), hidden)
        yield from norm(f"{name}.LayerNorm", hidden)

    return build


def _bert_block(prefix: str) -> Callable[[Sizes, int], Named]:
    def build(sizes: Sizes, index: int) -> Named:
        hidden, inner, name = sizes("hidden_size"), sizes("intermediate_size"), f"{prefix}.encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from linear(f"{name}.attention.self.{part}", hidden, hidden)
        yield from linear(f"{name}.attention.output.dense", hidden, hidden)
        yield from norm(f"{name}.attention.output.LayerNorm", hidden)
        yield from linear(f"{name}.intermediate.dense", hidden, inner)
        yield from linear(f"{name}.output.dense", inner, hidden)
        yield from norm(f"{name}.output.LayerNorm", hidden)

    return build


def _places(*names: str) -> Callable[[Sizes], Buffers]:
    """Numbers of positions, and zeros for the types of tokens."""
    return lambda sizes: iter([(name, (1, sizes("max_position_embeddings")), 8) for name in names])


def _classes(dense: str, out: str, hidden: str = "hidden_size") -> Callable[[Sizes], Named]:
    def build(sizes: Sizes) -> Named:
        yield from linear(dense, sizes(hidden), sizes(hidden))
        yield from linear(out, sizes(hidden), sizes.labels)

    return build


def _tags(hidden: str = "hidden_size") -> Callable[[Sizes], Named]:
    """A label for each token, without a pooler."""
    return lambda sizes: linear("classifier", sizes(hidden), sizes.labels)


def _masked(bias: str, transform: str, its_norm: str, decoder: str) -> Callable[[Sizes], Named]:
    def build(sizes: Sizes) -> Named:
        hidden = sizes("hidden_size")
        yield bias, (sizes("vocab_size"),)
        yield from linear(transform, hidden, hidden)
        yield from norm(its_norm, hidden)
        if not sizes.is_on("tie_word_embeddings", True):
            yield from linear(decoder, hidden, sizes("vocab_size"))

    return build


# DistilBERT


def _distilbert_before(sizes: Sizes) -> Named:
    name = "distilbert.embeddings"
    yield f"{name}.word_embeddings.weight", (sizes("vocab_size"), sizes("dim"))
    yield f"{name}.position_embeddings.weight", (sizes("max_position_embeddings"), sizes("dim"))
    yield from norm(f"{name}.LayerNorm", sizes("dim"))


def _distilbert_block(sizes: Sizes, index: int) -> Named:
    hidden, inner, name = sizes("dim"), sizes("hidden_dim"), f"distilbert.transformer.layer.{index}"
    for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
        yield from linear(f"{name}.attention.{part}", hidden, hidden)
    yield from norm(f"{name}.sa_layer_norm", hidden)
    yield from linear(f"{name}.ffn.lin1", hidden, inner)
    yield from linear(f"{name}.ffn.lin2", inner, hidden)
    yield from norm(f"{name}.output_layer_norm", hidden)


def _distilbert_masked(sizes: Sizes) -> Named:
    yield from linear("vocab_transform", sizes("dim"), sizes("dim"))
    yield from norm("vocab_layer_norm", sizes("dim"))
    if not sizes.is_on("tie_word_embeddings", True):
        yield "vocab_projector.weight", (sizes("vocab_size"), sizes("dim"))
    yield "vocab_projector.bias", (sizes("vocab_size"),)


ENCODERS = {
    "bert": Family(
        before=_bert_before("bert"),
        block=_bert_block("bert"),
        after=nothing,
        heads={
            CLASSES: _classes("bert.pooler.dense", "classifier"),
            TAGS: _tags(),
            MASKED: _masked(
                "cls.predictions.bias",
                "cls.predictions.transform.dense",
                "cls.predictions.transform.LayerNorm",
                "cls.predictions.decoder",
            ),
        },
        default_head=MASKED,
        buffers=_places("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
    ),
    "roberta": Family(
        before=_bert_before("roberta"),
        block=_bert_block("roberta"),
        after=nothing,
        heads={
            CLASSES: _classes("classifier.dense", "classifier.out_proj"),
            TAGS: _tags(),
            MASKED: _masked("lm_head.bias", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
        },
        default_head=MASKED,
        buffers=_places("roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids"),
    ),
    "distilbert": Family(
        before=_distilbert_before,
        block=_distilbert_block,
        after=nothing,
        heads={
            CLASSES: _classes("pre_classifier", "classifier", "dim"),
            TAGS: _tags("dim"),
            MASKED: _distilbert_masked,
        },
        default_head=MASKED,
        buffers=_places("distilbert.embeddings.position_ids"),
        layers=lambda sizes: sizes("n_layers"),
        hidden=lambda sizes: sizes("dim"),
    ),
}
