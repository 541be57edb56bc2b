"""How the next token is chosen, and when an answer ends: for each row as if it were alone in its batch."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

WARPING = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")  # they count a row's tokens, and would count padding
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "bad_words_ids", "sequence_bias",
        "min_new_tokens", "cache_implementation")  # fmt: skip
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Decoding:
    """`temperature` 0 takes the likeliest token. For the others, None or 0 means no restriction."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None

    def __str__(self) -> str:
        names = PENALTIES if not self.temperature else (*WARPING[1:], *PENALTIES)
        said = "".join(f", {name} {value:g}" for name in names if (value := getattr(self, name)))
        if not self.temperature:
            return f"greedy{said}"
        return f"sampled at temperature {self.temperature:g}{said}, seed {self.seed}"

    def processors(self, numbers: Sequence[int], pads: Sequence[int], device: torch.device) -> LogitsProcessorList:
        """For a batch of prompts with these numbers, each after its number of `pads`."""
        found: list[Any] = []
        if self.repetition_penalty:
            found.append(Unpadded(RepetitionPenaltyLogitsProcessor(self.repetition_penalty), pads))
        if self.no_repeat_ngram_size:
            found.append(Unpadded(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size), pads))
        if not self.temperature:
            return LogitsProcessorList(found)
        found += [TemperatureLogitsWarper(self.temperature)]
        found += [TopKLogitsWarper(self.top_k)] if self.top_k else []
        found += [TopPLogitsWarper(self.top_p)] if self.top_p and self.top_p < 1 else []
        found += [MinPLogitsWarper(self.min_p)] if self.min_p else []
        return LogitsProcessorList([*found, Noise(self.seed, numbers, device)])


def settle_decoding(asked: argparse.Namespace, model: Any) -> Decoding:
    """From the flags, else the model's generation_config.json, else greedy. The model's own config becomes greedy,
    since `Noise` does the sampling, and keeps only settings that do not depend on padding."""
    config = model.generation_config
    samples = bool(config.do_sample or asked.top_p) if asked.temperature is None else asked.temperature > 0
    own = {name: getattr(config, name) for name in WARPING} if config.do_sample else {}
    penalties = {name: getattr(config, name) for name in PENALTIES}
    if penalties["repetition_penalty"] == 1:
        penalties["repetition_penalty"] = None
    model.generation_config = GenerationConfig(**{name: getattr(config, name, None) for name in KEPT})
    if not samples:
        return Decoding(**penalties)
    temperature, top_p = asked.temperature or own.get("temperature") or 1.0, asked.top_p or own.get("top_p")
    return Decoding(temperature, own.get("top_k"), top_p, own.get("min_p"), asked.seed, **penalties)


class Unpadded(LogitsProcessor):  # type: ignore[misc]
    """Applies `inner` to each row without its padding, so that a repetition penalty does not count `pads`."""

    def __init__(self, inner: LogitsProcessor, pads: Sequence[int]) -> None:
        self.inner, self.pads = inner, pads

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = zip(self.pads, input_ids, scores, strict=True)
        return torch.cat([self.inner(ids[None, pad:], row[None]) for pad, ids, row in rows])


class Noise(LogitsProcessor):  # type: ignore[misc]
    """Adds Gumbel noise to scores, so that the largest is a sample from their softmax (Maddison et al., arXiv
    1611.00712, section 3.1). `torch.multinomial`, which transformers uses, takes one generator per batch, so a sample
    depends on the other rows. Here each row has its own, seeded by the prompt's number."""

    def __init__(self, seed: int, numbers: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(_seed_of(seed, number)) for number in numbers]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` is (B, vocabulary), in float32."""
        drawn = torch.empty_like(scores)
        for row, generator in zip(drawn, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores - drawn.clamp_min(SMALLEST).log()


def _seed_of(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")


class Stops(StoppingCriteria):  # type: ignore[misc]
    """Ends a row once its answer, which follows a prompt of `width` tokens, contains one of `texts`. `after` has each
    row's answer length in tokens at that point, or None."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], width: int, rows: int) -> None:
        self.tokenizer, self.texts, self.width = tokenizer, texts, width
        # A token has at least one byte; one token more, since decoders strip a blank from the first.
        self.looked_at = 1 + max(len(text.encode()) for text in texts)
        self.after: list[int | None] = [None] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        length = input_ids.shape[1] - self.width
        tails = input_ids[:, max(self.width, input_ids.shape[1] - self.looked_at) :].tolist()
        for row, tail in enumerate(tails):
            if self.after[row] is None and any(text in self.tokenizer.decode(tail) for text in self.texts):
                self.after[row] = length
        return torch.tensor([after is not None for after in self.after], device=input_ids.device)
