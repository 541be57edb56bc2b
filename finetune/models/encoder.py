"""Text embedding models, from last hidden states: any pretrained encoder or decoder, or a DistilBERT from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, DistilBertModel

from finetune.errors import RequestError
from finetune.models.classifier import Source, find_source, fit_to, scratch_config
from finetune.models.sentence_folder import SentenceModel, read_sentence_model
from finetune.models.source import IN_FP32, Kept, load_weights
from finetune.run.flags.text import ModelArguments

TWO_PARTS = "--model_name_or_path {}: is an encoder-decoder model. Give an encoder such as a BERT, or a decoder."
PROMPTS = ("query", "document")  # sentence-transformers' words


@dataclass(frozen=True, kw_only=True)
class EncoderSource(Source):
    """Also says how the model embeds: `prompts` has one each for "query" and "document"."""

    pooling: str
    prompts: Mapping[str, str]
    default_prompt: str | None = None


def find_encoder_source(
    arguments: ModelArguments, pooling: str | None, max_seq_length: int | None, prompts: Mapping[str, str | None]
) -> EncoderSource:
    """Load the model's config, tokenizer and pooling, not its weights; None means the model's own setting. Raises
    RequestError."""
    name = arguments.model_name_or_path
    source = find_source(arguments, max_seq_length)
    told = read_sentence_model(name, arguments.model_revision, pooling) if name else SentenceModel(pooling)
    if max_seq_length is None and told.max_seq_length:
        source = find_source(arguments, min(told.max_seq_length, source.max_seq_length))
    config = source.config
    if getattr(config, "is_encoder_decoder", False):
        raise RequestError(TWO_PARTS.format(name))
    found = {kind: told.prompts.get(kind, "") if (said := prompts[kind]) is None else said for kind in PROMPTS}
    found = {**told.prompts, **found}  # keeps the model's prompts for other tasks
    pooling = told.pooling or ("last" if _is_causal(config) else "mean")
    return EncoderSource(**vars(source), pooling=pooling, prompts=found, default_prompt=told.default_prompt)


def _is_causal(config: Any | None) -> bool:
    names = getattr(config, "architectures", None) or ()
    return any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)


def build_encoder(arguments: ModelArguments, source: Source, tokenizer: Any, kept: Kept = IN_FP32) -> Any:
    """The model without a head. Call it after `TrainingArguments`, so that ZeRO-3 shards it. Raises RequestError."""
    if source.config is None:
        # Not `from_config`: under ZeRO-3 it initializes weights in another order, so the run would start elsewhere.
        return DistilBertModel(scratch_config(arguments, source, tokenizer, {}))
    config = source.config
    fit_to(tokenizer, config)
    if hasattr(text := config.get_text_config(), "use_cache"):
        text.use_cache = False  # nothing is generated, and a decoder would keep the keys and values of all layers
    model = load_weights(AutoModel, str(source.pretrained), config, arguments, kept)
    has_part = (getattr(model, part, None) is not None for part in ("encoder", "decoder"))
    if all(has_part):  # a T5 encoder, say, which AutoModel opens as a whole T5; an OPT has only a decoder
        raise RequestError(TWO_PARTS.format(source.pretrained))
    if isinstance(pooler := getattr(model, "pooler", None), nn.Module):
        pooler.requires_grad_(False)  # a BERT-style pooler; nothing here reads its output
    return model


def pooled(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """Hidden states (B, T, H) of right-padded texts with `mask` (B, T) to one fp32 vector per text (B, H)."""
    if how == "cls":
        return hidden[:, 0].float()
    if how == "last":
        last = mask.sum(1) - 1
        return hidden[torch.arange(len(hidden), device=hidden.device), last].float()
    weight = mask.unsqueeze(-1).float()
    return (hidden.float() * weight).sum(1) / weight.sum(1)
