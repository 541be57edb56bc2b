"""Encoders with a decoder: a T5 from scratch at a size that suits the machine, or any pretrained one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from finetune.data.columns import IGNORED
from finetune.data.tokenizer import rows_of
from finetune.errors import RequestError
from finetune.models.source import (
    IN_FP32,
    Kept,
    from_pretrained,
    load_weights,
    named,
    positions_of,
    refuse_without_weights,
)
from finetune.run.decoders import refuse_one_sided
from finetune.run.facts import NO_LIMIT, tokens_of
from finetune.run.recipes.seq2seq import PairArguments, Seq2SeqModelArguments, t5_shape


@dataclass(frozen=True)
class Seq2SeqSource:
    """A model before its weights. `tokenizer` is None where one is to be trained on the texts."""

    config: Any
    tokenizer: Any | None
    max_source_length: int
    max_target_length: int
    description: str
    hub_id: str | None  # for the model card; None for a folder or a model from scratch
    pretrained: str | None = None  # whose weights are loaded
    adapter: Path | None = None  # a folder that `pretrained` is the base of


def find_seq2seq_source(arguments: Seq2SeqModelArguments, pairs: PairArguments) -> Seq2SeqSource:
    """Look at the model's config and tokenizer, not its weights. Raises RequestError where one cannot be had."""
    name = arguments.model_name_or_path
    model = named(name, arguments.trust_remote_code) if name else None
    if model:
        config = from_pretrained(AutoConfig, model.flag, model.base, arguments)
        refuse_one_sided(config.to_dict().get, f"--{model.flag} {model.base}")
        refuse_without_weights(model.base)
    else:
        config = T5Config(**t5_shape(vars(arguments).get))
    tokenizer = None
    if arguments.tokenizer_name or model:
        flag = "tokenizer_name" if arguments.tokenizer_name else "model_name_or_path"
        tokenizer = from_pretrained(
            AutoTokenizer, flag, arguments.tokenizer_name or (model.tokenizer if model else ""), arguments
        )
        _set_languages(tokenizer, pairs)
    positions, most = positions_of(config), getattr(tokenizer, "model_max_length", NO_LIMIT)
    lengths = (
        tokens_of("max_source_length", pairs.max_source_length, positions, most),
        tokens_of("max_target_length", pairs.max_target_length, positions, most),
    )
    if model is None:
        return Seq2SeqSource(config, tokenizer, *lengths, f"T5 from scratch, size {arguments.model_size}", None)
    place = model.hub_id or str(Path(model.base).expanduser())
    return Seq2SeqSource(config, tokenizer, *lengths, model.words, model.hub_id, place, model.adapter)


def _set_languages(tokenizer: Any, pairs: PairArguments) -> None:
    """Of a tokenizer of many languages, such as mBART's. Raises RequestError for one that it does not know."""
    for attribute, lang in (("src_lang", pairs.source_lang), ("tgt_lang", pairs.target_lang)):
        if not hasattr(tokenizer, attribute) or lang is None:
            continue
        try:
            setattr(tokenizer, attribute, lang)
        except (KeyError, ValueError) as error:
            raise RequestError(
                f"{lang!r} is no language of the model's tokenizer. Write it as the model does, such as en_XX."
            ) from error


def build_seq2seq(
    arguments: Seq2SeqModelArguments, source: Seq2SeqSource, tokenizer: Any, target_lang: str | None = None,
    kept: Kept = IN_FP32,
) -> Any:  # fmt: skip
    """The model. Build it after `TrainingArguments`: ZeRO-3 shards a pretrained one then. Raises RequestError where the
    tokenizer has more tokens than it embeds."""
    config = source.config
    if source.pretrained is None:
        config.vocab_size = rows_of(tokenizer)
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        config.decoder_start_token_id = tokenizer.pad_token_id
        # Not by `from_config`: under ZeRO-3 it draws the weights in another order, and the run would start elsewhere.
        return T5ForConditionalGeneration(config)
    if (rows := rows_of(tokenizer)) > config.vocab_size:
        raise RequestError(
            f"the tokenizer has {rows:,} tokens, but the model embeds {config.vocab_size:,}. Use the model's own "
            "tokenizer."
        )
    is_local = source.hub_id is None
    model = load_weights(AutoModelForSeq2SeqLM, source.pretrained, config, is_local, arguments, kept)
    if target_lang and hasattr(tokenizer, "tgt_lang"):  # the first token that is written says the language
        model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(target_lang)
    return model


@dataclass(frozen=True)
class PairCollator:
    """Pads sources and targets each to the longest of a batch; the decoder reads the targets as `model` shifts them."""

    tokenizer: Any
    model: Any  # not an adapter: its base

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Tensors (B, S) and (B, T). A loss of ours takes `labels` from what the model is given, which then could not
        make `decoder_input_ids` by itself."""
        ids = padded([row["input_ids"] for row in rows], self.tokenizer.pad_token_id)
        mask = padded([[1] * len(row["input_ids"]) for row in rows], 0)
        labels = padded([row["labels"] for row in rows], IGNORED)
        shifted = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "decoder_input_ids": shifted}


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    """(B, longest), filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def pair_loss(label_smoothing: float) -> Any:
    """The Trainer's `compute_loss_func`: the sum over the target tokens of the global batch by their number, in fp32;
    logits (B, T, V), labels (B, T). With smoothing each token's loss is (1 - s) of its own and s of the mean over the
    vocabulary (arXiv 1512.00567, section 7), summed and divided alike."""

    def compute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"].float().flatten(0, 1)
        total = torch.nn.functional.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
        )
        return total / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    return compute
