"""Tiny models of random weights for the tests of generating: what they write varies, and never means anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen3Config,
)

from finetune.cli import parser
from finetune.data.tokenizer import train_text_tokenizer
from finetune.generation.answering import Answerer
from finetune.generation.sampling import Decoding
from finetune.models.gptlite import GPTLiteConfig

VOCABULARY, POSITIONS = 257, 96  # the bytes, and the end of text
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.4,  # so that a token depends on all before it
}
WIDE = {**SHAPE, "intermediate_size": 64}
GROUPED = {**WIDE, "num_key_value_heads": 2}
CONFIGS: dict[str, Any] = {
    "gptlite": lambda: GPTLiteConfig(**SHAPE),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=POSITIONS, initializer_range=0.4
    ),
    "llama": lambda: LlamaConfig(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=8),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, tie_word_embeddings=False
    ),
    "phi": lambda: PhiConfig(**WIDE),
    "gpt_neox": lambda: GPTNeoXConfig(**WIDE),
}


def tokenizer() -> Any:
    return train_text_tokenizer("byte", [], 0, POSITIONS, with_end=True)


def model_of(kind: str, seed: int = 1) -> Any:
    """One that never ends by itself: its answers are as long as they may be."""
    config = CONFIGS[kind]()
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def saved(folder: Path, kind: str = "llama", seed: int = 1, template: str | None = None, end: bool = False) -> Path:
    """A model folder."""
    model, own = model_of(kind, seed), tokenizer()
    own.chat_template = template
    model.generation_config.eos_token_id = own.eos_token_id if end else None
    if not end:
        own.eos_token = None
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def answerer(
    kind: str = "gptlite", decoding: Decoding | None = None, stop: tuple[str, ...] = (), **ends: Any
) -> Answerer:
    model = model_of(kind)
    model.generation_config.pad_token_id = ends.get("pad", 0)
    model.generation_config.eos_token_id = ends.get("ends")
    found = frozenset(ends.get("ends") or ())
    return Answerer(model, tokenizer(), decoding or Decoding(), stop, torch.device("cpu"), found)


def asked(*words: Any, command: str = "generate") -> argparse.Namespace:
    """What the command line says; of `generate` with files that a test may not need."""
    files = ("--prompts", "prompts.txt", "--output", "answers.jsonl") if command == "generate" else ()
    return parser().parse_args([command, "model", *files, *map(str, words)])
