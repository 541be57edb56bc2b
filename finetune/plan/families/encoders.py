"""Encoders: BERT, RoBERTa, DistilBERT."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.plan.families.parts import (
    CLASSES,
    MASKED,
    SPANS,
    TAGS,
    Buffers,
    Family,
    Named,
    Sizes,
    linear,
    norm,
    nothing,
)


@dataclass(frozen=True)
class Encoder:
    """An encoder's module names and config keys, BERT's by default; everything else is the same for all."""

    layer: str = "bert.encoder.layer"  # followed by the layer's number
    queries: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    mixed: str = "attention.output.dense"
    mixed_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    down_norm: str = "output.LayerNorm"
    pooler: str = "bert.pooler.dense"
    classifier: str = "classifier"
    transform: str = "cls.predictions.transform.dense"
    transform_norm: str = "cls.predictions.transform.LayerNorm"
    decoder: str = "cls.predictions.decoder"
    tied_bias: str = "cls.predictions.bias"  # of the decoder
    buffers: tuple[str, ...] = ("position_ids", "token_type_ids")
    # Keys of the config.
    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    act: str = "hidden_act"
    dropout: str = "hidden_dropout_prob"
    attention_dropout: str = "attention_probs_dropout_prob"

    @property
    def embeddings(self) -> str:
        return f"{self.layer.partition('.')[0]}.embeddings"

    def before(self, sizes: Sizes) -> Named:
        hidden = sizes(self.hidden)
        yield f"{self.embeddings}.word_embeddings.weight", (sizes("vocab_size"), hidden)
        yield f"{self.embeddings}.position_embeddings.weight", (sizes("max_position_embeddings"), hidden)
        if "token_type_ids" in self.buffers:
            yield f"{self.embeddings}.token_type_embeddings.weight", (sizes("type_vocab_size", default=2), hidden)
        yield from norm(f"{self.embeddings}.LayerNorm", hidden)

    def block(self, sizes: Sizes, index: int) -> Named:
        hidden, inner, name = sizes(self.hidden), sizes(self.inner), f"{self.layer}.{index}"
        for part in (*self.queries, self.mixed):
            yield from linear(f"{name}.{part}", hidden, hidden)
        yield from norm(f"{name}.{self.mixed_norm}", hidden)
        yield from linear(f"{name}.{self.up}", hidden, inner)
        yield from linear(f"{name}.{self.down}", inner, hidden)
        yield from norm(f"{name}.{self.down_norm}", hidden)

    def class_head(self, sizes: Sizes) -> Named:
        yield from linear(self.pooler, sizes(self.hidden), sizes(self.hidden))
        yield from linear(self.classifier, sizes(self.hidden), sizes.labels)

    def masked_head(self, sizes: Sizes) -> Named:
        hidden, vocabulary = sizes(self.hidden), sizes("vocab_size")
        tied, is_own = sizes.is_on("tie_word_embeddings", True), self.tied_bias == f"{self.decoder}.bias"
        if not is_own:
            yield self.tied_bias, (vocabulary,)
        yield from linear(self.transform, hidden, hidden)
        yield from norm(self.transform_norm, hidden)
        if not tied:
            yield f"{self.decoder}.weight", (vocabulary, hidden)
        if is_own or not tied:
            yield f"{self.decoder}.bias", (vocabulary,)

    def places(self, sizes: Sizes) -> Buffers:
        """Position ids, and zeros as token type ids."""
        for name in self.buffers:
            yield f"{self.embeddings}.{name}", (1, sizes("max_position_embeddings")), 8

    def family(self) -> Family:
        return Family(
            before=self.before,
            block=self.block,
            after=nothing,
            heads={
                CLASSES: self.class_head,
                TAGS: lambda sizes: linear("classifier", sizes(self.hidden), sizes.labels),
                SPANS: lambda sizes: linear("qa_outputs", sizes(self.hidden), 2),
                MASKED: self.masked_head,
            },
            default_head=MASKED,
            buffers=self.places,
            layers=lambda sizes: sizes(self.layers),
            hidden=lambda sizes: sizes(self.hidden),
        )


STYLES = {
    "bert": Encoder(),
    "roberta": Encoder(
        layer="roberta.encoder.layer",
        pooler="classifier.dense",
        classifier="classifier.out_proj",
        transform="lm_head.dense",
        transform_norm="lm_head.layer_norm",
        decoder="lm_head.decoder",
        tied_bias="lm_head.bias",
    ),
    "distilbert": Encoder(
        layer="distilbert.transformer.layer",
        queries=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        mixed="attention.out_lin",
        mixed_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        down_norm="output_layer_norm",
        pooler="pre_classifier",
        transform="vocab_transform",
        transform_norm="vocab_layer_norm",
        decoder="vocab_projector",
        tied_bias="vocab_projector.bias",
        buffers=("position_ids",),
        hidden="dim",
        inner="hidden_dim",
        heads="n_heads",
        layers="n_layers",
        act="activation",
        dropout="dropout",
        attention_dropout="attention_dropout",
    ),
}
ENCODERS = {kind: style.family() for kind, style in STYLES.items()}
