"""The first weights of a GPT-lite, layer by layer: each layer's are drawn from a seed of its own, so that a pipeline's
stage draws those of its layers alone, and they are the same at any number of stages, and without a pipeline."""

from __future__ import annotations

from finetune.models.gptlite import GPTLiteForCausalLM, GPTLiteForSequenceClassification
from finetune.models.pipeline import draw_layer


def draw_weights(model: GPTLiteForCausalLM | GPTLiteForSequenceClassification, seed: int) -> None:
    """Draw all of a model's weights."""
    core = model.transformer
    layers = [core.embeddings.tokens, core.embeddings.positions, *core.blocks, core.norm]
    if isinstance(model, GPTLiteForSequenceClassification):
        layers.append(model.score)
    elif not model.config.tie_word_embeddings:
        layers.append(model.lm_head)
    for place, layer in enumerate(layers):
        draw_layer(layer, model._init_weights, seed, place)
