"""The initial weights of a GPT-lite: each layer has its own seed, so a pipeline stage initializes only its own layers,
and the weights are the same with any number of stages and without a pipeline."""

from __future__ import annotations

from finetune.models.gptlite import GPTLiteForCausalLM, GPTLiteForSequenceClassification
from finetune.models.pipeline import draw_layer


def draw_weights(model: GPTLiteForCausalLM | GPTLiteForSequenceClassification, seed: int) -> None:
    """Initialize all of a model's weights."""
    core = model.transformer
    layers = [core.embeddings.tokens, core.embeddings.positions, *core.blocks, core.norm]
    if isinstance(model, GPTLiteForSequenceClassification):
        layers.append(model.score)
    elif not model.config.tie_word_embeddings:
        layers.append(model.lm_head)
    for place, layer in enumerate(layers):
        draw_layer(layer, model._init_weights, seed, place)
