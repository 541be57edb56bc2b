"""Encoder-decoder models: a T5 from scratch at a size that suits the machine, or any pretrained one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from finetune.data.columns import IGNORED
from finetune.data.packing import mask_of, padded
from finetune.data.tokenizer import has_languages, pad_with_end, refuse_more_tokens, rows_of
from finetune.errors import RequestError, first_line
from finetune.models.source import IN_FP32, Kept, TextSource, find_text_source, load_weights, positions_of
from finetune.run.decoders import refuse_one_sided
from finetune.run.facts import NO_LIMIT, tokens_of
from finetune.run.recipes.seq2seq import PairArguments, Seq2SeqModelArguments, t5_shape

PREFIX = "source_prefix"  # in tokenizer_config.json, also of an adapter: what a run put before each source


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSource(TextSource):
    """Lengths are in tokens. `prefix` stands before each source."""

    max_source_length: int
    max_target_length: int
    prefix: str

    def keep_prefix(self, tokenizer: Any) -> None:
        """It is saved with the tokenizer, if there is one."""
        tokenizer.init_kwargs.pop(PREFIX, None)
        tokenizer.init_kwargs |= {PREFIX: self.prefix} if self.prefix else {}


def find_seq2seq_source(arguments: Seq2SeqModelArguments, pairs: PairArguments) -> Seq2SeqSource:
    """Load the model's config and tokenizer, not its weights. Raises RequestError if either cannot be loaded."""
    config = None if arguments.model_name_or_path else T5Config(**t5_shape(vars(arguments).get))
    scratch = TextSource(config=config, description=f"T5 from scratch, size {arguments.model_size}")
    found = find_text_source(arguments, scratch, refuse_one_sided)
    if found.tokenizer is not None:
        pad_with_end(found.tokenizer)
        _set_languages(found.tokenizer, pairs)
    positions, most = positions_of(found.config), getattr(found.tokenizer, "model_max_length", NO_LIMIT)
    source = tokens_of("max_source_length", pairs.max_source_length, positions, most)
    target = tokens_of("max_target_length", pairs.max_target_length, positions, most)
    prefix = _trained_prefix(found.tokenizer) if pairs.source_prefix is None else pairs.source_prefix
    return Seq2SeqSource(**vars(found), max_source_length=source, max_target_length=target, prefix=prefix)


def _trained_prefix(tokenizer: Any | None) -> str:
    """What stood before each source in the model's training by a recipe."""
    found = getattr(tokenizer, "init_kwargs", {}).get(PREFIX)
    return found if isinstance(found, str) else ""


def _set_languages(tokenizer: Any, pairs: PairArguments) -> None:
    """Raises RequestError for a language that the tokenizer does not know, and for a missing one: the tokenizer would
    silently use its default."""
    if not has_languages(tokenizer):
        return
    for flag, attribute, side in (("source_lang", "src_lang", "text"), ("target_lang", "tgt_lang", "text_target")):
        lang = getattr(pairs, flag)
        if lang is None:
            raise RequestError(
                "the model's tokenizer is multilingual. Give the language to read with --source_lang and the one to "
                "write with --target_lang, in the model's notation, such as en_XX."
            )
        try:
            setattr(tokenizer, attribute, lang)
            is_known = tokenizer.unk_token_id not in tokenizer(**{side: ""})["input_ids"]
        except (KeyError, ValueError):
            is_known = False
        if not is_known:
            raise RequestError(
                f"--{flag} {lang}: the model's tokenizer has no such language. Use the model's notation, such as en_XX."
            )


def build_seq2seq(arguments: Seq2SeqModelArguments, source: Seq2SeqSource, tokenizer: Any, kept: Kept = IN_FP32) -> Any:
    """The model. Call it after `TrainingArguments`, so that ZeRO-3 shards a pretrained one. Raises RequestError if the
    tokenizer has more tokens than the model embeds, or if the config has no decoder start token."""
    config = source.config
    if source.pretrained is None:
        config.vocab_size = rows_of(tokenizer)
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        config.decoder_start_token_id = tokenizer.pad_token_id
        # Not `from_config`: under ZeRO-3 it initializes weights in another order, so the run would start elsewhere.
        return T5ForConditionalGeneration(config)
    refuse_more_tokens(tokenizer, config.vocab_size)
    model = load_weights(AutoModelForSeq2SeqLM, source.pretrained, config, arguments, kept)
    if has_languages(tokenizer):
        _write_language(model, tokenizer)
    try:
        shifted(model, torch.full((1, 2), (config.pad_token_id or 0) + 1))  # two tokens other than padding
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(
            f"{source.description}: its config.json does not say which token starts a generated text "
            f"({first_line(error)}). Add decoder_start_token_id and pad_token_id there."
        ) from error
    return model


def _write_language(model: Any, tokenizer: Any) -> None:
    """Set the language to generate as targets have it: the first token of a text or, for the original mBART, the last,
    which moves to the front when targets are shifted."""
    ids = tokenizer(text_target="")["input_ids"]
    if ids[0] == tokenizer.eos_token_id:
        model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = ids[-1]
    else:
        model.generation_config.forced_bos_token_id = ids[0]


@dataclass(frozen=True)
class PairCollator:
    """Pads sources and targets to the longest of each in a batch; `model` shifts targets for the decoder's input."""

    tokenizer: Any
    model: Any  # the base model, not an adapter's wrapper

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Tensors (B, S) and (B, T). Our losses remove `labels` from the model's inputs, so the model could not derive
        `decoder_input_ids` itself."""
        sources, labels = [row["input_ids"] for row in rows], padded((row["labels"] for row in rows), IGNORED)
        ids, mask = padded(sources, self.tokenizer.pad_token_id), mask_of(sources)
        read = shifted(self.model, labels)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "decoder_input_ids": read}


def shifted(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """(B, T): the decoder's input for predicting `labels`, as `model` derives it. Some models have no function for that
    (M2M100, NLLB, Blenderbot in transformers 5.23) and shift by their start token in their forward."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        own: torch.Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)
        return own
    start = labels.new_full((len(labels), 1), model.config.decoder_start_token_id)
    read = torch.cat([start, labels[:, :-1]], dim=1)
    return read.masked_fill(read == IGNORED, model.config.pad_token_id)
