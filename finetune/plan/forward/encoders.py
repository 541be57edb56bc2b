"""Encoders: BERT, RoBERTa, DistilBERT (models/bert/modeling_bert.py and similar)."""

from __future__ import annotations

from finetune.plan.families.encoders import STYLES, Encoder
from finetune.plan.families.parts import CLASSES, SPANS, TAGS, VECTORS
from finetune.plan.forward.attention import Heads, attend, kind_of, split_heads
from finetune.plan.forward.losses import label_loss, span_loss, vector_loss
from finetune.plan.forward.parts import Setting, activation, stack
from finetune.plan.values import Value


def encoder(setting: Setting) -> Value:
    tape, sizes, batch, style = setting.tape, setting.sizes, setting.batch, STYLES[setting.family]
    is_distilled = setting.family == "distilbert"
    with tape.segment("embeddings"):
        words = tape.embedding(f"{style.embeddings}.word_embeddings", batch.positions)
        x, held = words, [words]
        if not is_distilled:
            held.append(tape.embedding(f"{style.embeddings}.token_type_embeddings", batch.positions))
            x = tape.add(x, held[-1])
        # RoBERTa numbers positions per row, skipping padding.
        rows = batch.positions if setting.family == "roberta" else batch.tokens
        place = tape.embedding(f"{style.embeddings}.position_embeddings", rows)
        x = tape.layer_norm(tape.add(x, place), f"{style.embeddings}.LayerNorm")
        x = embedded = tape.dropout(x, sizes.share(style.dropout, 0.1))
        tape.hold(*held, *([] if is_distilled else [place]))
    x = stack(setting, x, range(sizes(style.layers)), lambda i: f"{style.layer}.{i}",
              lambda i, x: _block(setting, style, f"{style.layer}.{i}", x))  # fmt: skip
    with tape.segment("head"):
        tape.hold(embedded)
        tape.keep(x)
        return _head(setting, style, x)


def _block(setting: Setting, style: Encoder, name: str, x: Value) -> Value:
    tape, sizes, batch, count = setting.tape, setting.sizes, setting.batch, setting.sizes(style.heads)
    is_distilled, dropout = setting.family == "distilbert", sizes.share(style.dropout, 0.1)
    heads = Heads(batch, count, sizes(style.hidden) // count, count, sizes.share(style.attention_dropout, 0.1),
                  causal=False, fp32_softmax=False)  # fmt: skip
    kind = kind_of(tape, heads)
    query, key, value = (split_heads(tape, tape.linear(x, f"{name}.{part}"), kind) for part in style.queries)
    out = tape.linear(attend(setting, heads, query, key, value), f"{name}.{style.mixed}")
    out = out if is_distilled else tape.dropout(out, dropout)
    x = tape.layer_norm(tape.add(out, x), f"{name}.{style.mixed_norm}")
    tape.hold(out)
    tape.keep(x)
    bent = activation(tape, sizes.word(style.act, "gelu"), tape.linear(x, f"{name}.{style.up}"))
    if not is_distilled:
        tape.keep(bent)
    down = tape.dropout(tape.linear(bent, f"{name}.{style.down}"), dropout)
    x = tape.layer_norm(tape.add(down, x), f"{name}.{style.down_norm}")
    tape.hold(down)
    return x


def _head(setting: Setting, style: Encoder, x: Value) -> Value:
    tape, sizes, batch = setting.tape, setting.sizes, setting.batch
    is_distilled, is_roberta = setting.family == "distilbert", setting.family == "roberta"
    dropout = sizes.share(style.dropout, 0.1)
    if not is_distilled:
        dropout = sizes.share("classifier_dropout", dropout)
    elif setting.head == CLASSES:
        dropout = sizes.share("seq_classif_dropout", 0.2)
    if setting.head == VECTORS:
        return vector_loss(setting, x)
    if setting.head == CLASSES:
        pooled = tape.alias(x, batch.rows * sizes(style.hidden), "first token")
        pooled = tape.linear(tape.dropout(pooled, dropout) if is_roberta else pooled, style.pooler)
        pooled = tape.dropout(tape.unary("relu" if is_distilled else "tanh", pooled), dropout)
        return label_loss(setting, tape.linear(pooled, style.classifier))
    if setting.head == TAGS:
        return label_loss(setting, tape.linear(tape.dropout(x, dropout), "classifier"), batch.positions)
    if setting.head == SPANS:
        x = tape.dropout(x, sizes.share("qa_dropout", 0.1)) if is_distilled else x
        return span_loss(setting, tape.linear(x, "qa_outputs"))
    act = "gelu" if is_roberta else sizes.word(style.act, "gelu")
    x = tape.layer_norm(activation(tape, act, tape.linear(x, style.transform)), style.transform_norm)
    logits = tape.linear(x, style.decoder, f"{style.embeddings}.word_embeddings.weight", style.tied_bias)
    return label_loss(setting, logits, batch.positions)
