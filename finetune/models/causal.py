"""Causal language models: a GPT-lite from scratch at a size that suits the machine, or any pretrained one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.activations import ACT2FN

from finetune.data.tokenizer import refuse_more_tokens, rows_of
from finetune.errors import RequestError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.gptlite_weights import draw_weights
from finetune.models.source import IN_FP32, Kept, TextSource, find_text_source, load_weights, positions_of
from finetune.run.decoders import refuse_encoder
from finetune.run.facts import tokens_of
from finetune.run.flags.language import CausalModelArguments
from finetune.run.sizes import MOE_TYPE, causal_shape


@dataclass(frozen=True, kw_only=True)
class CausalSource(TextSource):
    """`block_size` is in tokens."""

    block_size: int


def find_causal_source(arguments: CausalModelArguments, block_size: int | None) -> CausalSource:
    """Load the model's config and tokenizer, not its weights. Raises RequestError if either cannot be loaded."""
    config = None if arguments.model_name_or_path else scratch_config(arguments)
    kind = "mixture of experts" if getattr(config, "model_type", None) == MOE_TYPE else "GPT-lite"
    scratch = TextSource(config=config, description=f"{kind} from scratch, size {arguments.model_size}")
    found = find_text_source(arguments, scratch, refuse_encoder)
    otherwise = f", or more with --config_overrides max_position_embeddings={block_size}."
    most = positions_of(found.config)
    length = tokens_of("block_size", block_size, most, otherwise="." if found.pretrained else otherwise)
    return CausalSource(**vars(found), block_size=length)


def scratch_config(arguments: CausalModelArguments) -> GPTLiteConfig | Qwen3MoeConfig:
    """The config for --model_size with --config_overrides. Raises RequestError for what the model does not support."""
    shape = causal_shape(arguments.model_size, arguments.config_overrides)
    if shape.pop("model_type") == MOE_TYPE:
        return Qwen3MoeConfig(**shape)
    config = GPTLiteConfig(**shape)
    if config.hidden_act not in ACT2FN:
        raise RequestError(
            f"--config_overrides hidden_act={config.hidden_act}: there is no such activation in transformers."
        )
    return config


def build_causal_lm(
    arguments: CausalModelArguments, source: CausalSource, tokenizer: Any, seed: int, kept: Kept = IN_FP32
) -> Any:
    """The model: pretrained weights stored as `kept` says, or new ones initialized from `seed`. Call it after
    `TrainingArguments`, so that ZeRO-3 shards it. Raises RequestError if the tokenizer has more tokens than a
    pretrained model embeds, unless --resize_embeddings."""
    config = settled_config(arguments, source, tokenizer)
    if source.pretrained is None:
        return _from_scratch(config, seed)
    embedded = config.get_text_config().vocab_size
    chosen: dict[str, Any] = {}
    if arguments.attn_implementation:
        chosen["attn_implementation"] = arguments.attn_implementation
    model = load_weights(AutoModelForCausalLM, source.pretrained, source.config, arguments, kept, **chosen)
    if (rows := rows_of(tokenizer)) > embedded:
        model.resize_token_embeddings(rows)
    return model


def _from_scratch(config: Any, seed: int) -> Any:
    """A new model with weights from `seed`, whole on each rank: `from_config` would shard it under ZeRO-3, and each
    rank would draw weights of its own."""
    if config.model_type == MOE_TYPE:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Qwen3MoeForCausalLM(config)
    model = GPTLiteForCausalLM(config)
    draw_weights(model, seed)
    return model


def settled_config(arguments: CausalModelArguments, source: CausalSource, tokenizer: Any) -> Any:
    """The model's config, once the tokenizer is known. Raises RequestError if the tokenizer has more tokens than a
    pretrained model embeds, unless --resize_embeddings."""
    config = source.config
    if arguments.attn_implementation:
        config._attn_implementation = arguments.attn_implementation
    if source.pretrained is not None:
        if not arguments.resize_embeddings:
            mend = ", or add rows for the new tokens with --resize_embeddings True"
            refuse_more_tokens(tokenizer, config.get_text_config().vocab_size, mend)
        return config
    config.vocab_size = rows_of(tokenizer)
    config.eos_token_id = config.bos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return config
