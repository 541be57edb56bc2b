"""Encoders: BERT, RoBERTa, DistilBERT."""

from __future__ import annotations

from finetune.plan.families.parts import CLASSES, TAGS
from finetune.plan.forward.attention import Heads, attend, kind_of, split_heads
from finetune.plan.forward.losses import label_loss, token_loss
from finetune.plan.forward.parts import Setting, activation, stack
from finetune.plan.values import Value


def bert(setting: Setting) -> Value:
    """models/bert/modeling_bert.py."""
    tape, rows, hidden = setting.tape, setting.batch.positions, setting.sizes("hidden_size")
    x = _bert_body(setting, "bert", setting.batch.tokens)
    with tape.segment("head"):
        tape.keep(x)
        if setting.head == CLASSES:
            pooled = _first_token(setting, x, hidden)
            pooled = tape.linear(pooled, "bert.pooler.dense", setting.batch.rows, hidden, hidden)
            pooled = tape.unary("tanh", pooled, saves_output=True)
            pooled = tape.dropout(pooled, _class_dropout(setting))
            return label_loss(
                setting, tape.linear(pooled, "classifier", setting.batch.rows, hidden, setting.sizes.labels)
            )
        if setting.head == TAGS:
            return _tags(setting, x, hidden, _class_dropout(setting))
        act = setting.sizes.word("hidden_act", "gelu")
        x = tape.linear(x, "cls.predictions.transform.dense", rows, hidden, hidden)
        x = tape.layer_norm(activation(tape, act, x), "cls.predictions.transform.LayerNorm", rows)
        return _masked(setting, x, "cls.predictions.decoder", "bert.embeddings.word_embeddings", "cls.predictions.bias")


def roberta(setting: Setting) -> Value:
    """models/roberta/modeling_roberta.py. Positions are counted in each row, without padding."""
    tape, rows, hidden = setting.tape, setting.batch.positions, setting.sizes("hidden_size")
    x = _bert_body(setting, "roberta", rows)
    with tape.segment("head"):
        tape.keep(x)
        if setting.head == CLASSES:
            dropout = _class_dropout(setting)
            pooled = tape.dropout(_first_token(setting, x, hidden), dropout)
            pooled = tape.linear(pooled, "classifier.dense", setting.batch.rows, hidden, hidden)
            pooled = tape.dropout(tape.unary("tanh", pooled, saves_output=True), dropout)
            logits = tape.linear(pooled, "classifier.out_proj", setting.batch.rows, hidden, setting.sizes.labels)
            return label_loss(setting, logits)
        if setting.head == TAGS:
            return _tags(setting, x, hidden, _class_dropout(setting))
        x = tape.linear(x, "lm_head.dense", rows, hidden, hidden)
        x = tape.layer_norm(activation(tape, "gelu", x), "lm_head.layer_norm", rows)
        return _masked(setting, x, "lm_head.decoder", "roberta.embeddings.word_embeddings", "lm_head.bias")


def distilbert(setting: Setting) -> Value:
    """models/distilbert/modeling_distilbert.py."""
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    rows, hidden, name = batch.positions, sizes("dim"), "distilbert.embeddings"
    with tape.segment("embeddings"):
        words = tape.embedding(rows, f"{name}.word_embeddings", hidden)
        x = tape.add(words, tape.embedding(batch.tokens, f"{name}.position_embeddings", hidden))
        x = tape.dropout(tape.layer_norm(x, f"{name}.LayerNorm", rows), sizes.share("dropout", 0.1))
        tape.hold(words)
    layers, embedded = range(sizes("n_layers")), x
    x = stack(setting, x, layers, lambda i: f"distilbert.transformer.layer.{i}",
              lambda i, x: _distil_block(setting, f"distilbert.transformer.layer.{i}", x))  # fmt: skip
    with tape.segment("head"):
        tape.hold(embedded)
        tape.keep(x)
        if setting.head == CLASSES:
            pooled = tape.linear(_first_token(setting, x, hidden), "pre_classifier", batch.rows, hidden, hidden)
            pooled = tape.unary("relu", pooled, saves_output=True)
            pooled = tape.dropout(pooled, sizes.share("seq_classif_dropout", 0.2))
            return label_loss(setting, tape.linear(pooled, "classifier", batch.rows, hidden, sizes.labels))
        if setting.head == TAGS:
            return _tags(setting, x, hidden, sizes.share("dropout", 0.1))
        x = tape.linear(x, "vocab_transform", rows, hidden, hidden)
        x = tape.layer_norm(activation(tape, sizes.word("activation", "gelu"), x), "vocab_layer_norm", rows)
        return _masked(setting, x, "vocab_projector", f"{name}.word_embeddings", "vocab_projector.bias")


def _tags(setting: Setting, x: Value, hidden: int, dropout: float) -> Value:
    """A label for each token."""
    x = setting.tape.dropout(x, dropout)
    logits = setting.tape.linear(x, "classifier", setting.batch.positions, hidden, setting.sizes.labels)
    return token_loss(setting, logits)


def _masked(setting: Setting, x: Value, decoder: str, words: str, bias: str) -> Value:
    tape, sizes = setting.tape, setting.sizes
    vocabulary, hidden = sizes("vocab_size"), sizes("hidden_size", "dim")
    tied = sizes.is_on("tie_word_embeddings", True)
    logits = tape.linear(x, decoder, setting.batch.positions, hidden, vocabulary,
                         weight=f"{words}.weight" if tied else None, bias_name=bias if tied else None)  # fmt: skip
    return token_loss(setting, logits)


def _class_dropout(setting: Setting) -> float:
    sizes = setting.sizes
    return sizes.share("classifier_dropout", sizes.share("hidden_dropout_prob", 0.1))


def _first_token(setting: Setting, x: Value, hidden: int) -> Value:
    return setting.tape.alias(x, setting.batch.rows * hidden, "first token")


def _bert_body(setting: Setting, prefix: str, positions: int) -> Value:
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    rows, hidden, name = batch.positions, sizes("hidden_size"), f"{prefix}.embeddings"
    with tape.segment("embeddings"):
        words = tape.embedding(rows, f"{name}.word_embeddings", hidden)
        types = tape.embedding(rows, f"{name}.token_type_embeddings", hidden)
        x = tape.add(words, types)
        place = tape.embedding(positions, f"{name}.position_embeddings", hidden)
        x = tape.add(x, place)
        x = tape.layer_norm(x, f"{name}.LayerNorm", rows)
        x = tape.dropout(x, sizes.share("hidden_dropout_prob", 0.1))
        tape.hold(words, types, place)
    layers = range(sizes("num_hidden_layers"))
    last = stack(setting, x, layers, lambda i: f"{prefix}.encoder.layer.{i}",
                 lambda i, x: _bert_block(setting, f"{prefix}.encoder.layer.{i}", x))  # fmt: skip
    with tape.segment("encoder's end"):
        tape.hold(x)
    return last


def _encoder_heads(setting: Setting, hidden: int, count: int, dropout: float) -> Heads:
    batch = setting.batch
    return Heads(batch.rows, batch.tokens, count, hidden // count, count, batch.tokens, dropout, causal=False,
                 fp32_softmax=False)  # fmt: skip


def _bert_block(setting: Setting, name: str, x: Value) -> Value:
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    hidden, inner, dropout = sizes("hidden_size"), sizes("intermediate_size"), sizes.share("hidden_dropout_prob", 0.1)
    heads = _encoder_heads(
        setting, hidden, sizes("num_attention_heads"), sizes.share("attention_probs_dropout_prob", 0.1)
    )
    kind = kind_of(tape, heads)
    query, key, value = (
        split_heads(tape, tape.linear(x, f"{name}.attention.self.{part}", rows, hidden, hidden), kind)
        for part in ("query", "key", "value")
    )
    mixed = attend(setting, heads, query, key, value)
    out = tape.dropout(tape.linear(mixed, f"{name}.attention.output.dense", rows, hidden, hidden), dropout)
    x = tape.layer_norm(tape.add(out, x), f"{name}.attention.output.LayerNorm", rows)
    tape.hold(out)
    tape.keep(x)
    up = tape.linear(x, f"{name}.intermediate.dense", rows, hidden, inner)
    bent = activation(tape, sizes.word("hidden_act", "gelu"), up)
    tape.keep(bent)
    down = tape.dropout(tape.linear(bent, f"{name}.output.dense", rows, inner, hidden), dropout)
    x = tape.layer_norm(tape.add(down, x), f"{name}.output.LayerNorm", rows)
    tape.hold(down)
    return x


def _distil_block(setting: Setting, name: str, x: Value) -> Value:
    """No dropout behind attention's projection."""
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    hidden, inner = sizes("dim"), sizes("hidden_dim")
    heads = _encoder_heads(setting, hidden, sizes("n_heads"), sizes.share("attention_dropout", 0.1))
    kind = kind_of(tape, heads)
    query, key, value = (
        split_heads(tape, tape.linear(x, f"{name}.attention.{part}_lin", rows, hidden, hidden), kind) for part in "qkv"
    )
    mixed = attend(setting, heads, query, key, value)
    out = tape.linear(mixed, f"{name}.attention.out_lin", rows, hidden, hidden)
    x = tape.layer_norm(tape.add(out, x), f"{name}.sa_layer_norm", rows)
    tape.hold(out)
    tape.keep(x)
    up = tape.linear(x, f"{name}.ffn.lin1", rows, hidden, inner)
    bent = activation(tape, sizes.word("activation", "gelu"), up)
    down = tape.dropout(tape.linear(bent, f"{name}.ffn.lin2", rows, inner, hidden), sizes.share("dropout", 0.1))
    x = tape.layer_norm(tape.add(down, x), f"{name}.output_layer_norm", rows)
    tape.hold(down)
    return x
