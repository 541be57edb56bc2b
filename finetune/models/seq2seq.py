"""Encoders with a decoder: a T5 from scratch at a size that suits the machine, or any pretrained one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from finetune.data.columns import IGNORED
from finetune.data.tokenizer import has_languages, rows_of
from finetune.errors import RequestError, first_line
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
    """Raises RequestError for a language that the tokenizer does not know, and where one is not said: it would take
    another in silence."""
    if not has_languages(tokenizer):
        return
    for flag, attribute, side in (("source_lang", "src_lang", "text"), ("target_lang", "tgt_lang", "text_target")):
        lang = getattr(pairs, flag)
        if lang is None:
            raise RequestError(
                "the model's tokenizer is of many languages. Say which is read and which is written by --source_lang "
                "and --target_lang, as the model writes them, such as en_XX."
            )
        try:
            setattr(tokenizer, attribute, lang)
            is_known = tokenizer.unk_token_id not in tokenizer(**{side: ""})["input_ids"]
        except (KeyError, ValueError):
            is_known = False
        if not is_known:
            raise RequestError(
                f"--{flag} {lang}: the model's tokenizer has no such language. Write it as the model does, such as "
                "en_XX."
            )


def build_seq2seq(arguments: Seq2SeqModelArguments, source: Seq2SeqSource, tokenizer: Any, kept: Kept = IN_FP32) -> Any:
    """The model. Build it after `TrainingArguments`: ZeRO-3 shards a pretrained one then. Raises RequestError where the
    tokenizer has more tokens than it embeds, and where the config does not say what a text begins with."""
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
    if has_languages(tokenizer):
        _write_language(model, tokenizer)
    try:
        shifted(model, torch.full((1, 2), (config.pad_token_id or 0) + 1))  # of tokens, and no padding
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(
            f"{source.description}: its config.json does not say what a written text begins with "
            f"({first_line(error)}). Add decoder_start_token_id and pad_token_id there."
        ) from error
    return model


def _write_language(model: Any, tokenizer: Any) -> None:
    """Tell generation the language as targets do: it is the first token of a text, or, for the first mBART, the last,
    which goes before the first when targets are shifted."""
    ids = tokenizer(text_target="")["input_ids"]
    if ids[0] == tokenizer.eos_token_id:
        model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = ids[-1]
    else:
        model.generation_config.forced_bos_token_id = ids[0]


@dataclass(frozen=True)
class PairCollator:
    """Pads sources and targets each to the longest of a batch; the decoder reads the targets as `model` shifts them."""

    tokenizer: Any
    model: Any  # not an adapter: its base

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Tensors (B, S) and (B, T). A loss of ours takes `labels` from what the model is given, which then could not
        make `decoder_input_ids` by itself."""
        ids, mask = read_as([row["input_ids"] for row in rows], self.tokenizer.pad_token_id)
        labels = padded([row["labels"] for row in rows], IGNORED)
        read = shifted(self.model, labels)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "decoder_input_ids": read}


def shifted(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """(B, T): what the decoder reads to predict `labels`, as `model` makes it. Some have no function for that (M2M100,
    NLLB, Blenderbot in transformers 5.23), and shift by their start token within their forward."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        own: torch.Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)
        return own
    start = labels.new_full((len(labels), 1), model.config.decoder_start_token_id)
    read = torch.cat([start, labels[:, :-1]], dim=1)
    return read.masked_fill(read == IGNORED, model.config.pad_token_id)


def read_as(sources: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, (B, S) each, of what the encoder reads."""
    return padded(sources, pad), padded([[1] * len(one) for one in sources], 0)


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    """(B, longest), filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
