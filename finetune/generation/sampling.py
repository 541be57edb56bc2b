"""How the next token is chosen, and when an answer ends: for each row of a batch as if it were alone."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

WARPING = ("temperature", "top_k", "top_p", "min_p")
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Decoding:
    """`temperature` 0 takes the likeliest token. None and 0 of the others leave all tokens in."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        if not self.temperature:
            return "greedy"
        cuts = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p")}
        said = ", ".join(f"{name} {value:g}" for name, value in cuts.items() if value)
        return f"sampled at temperature {self.temperature:g}{', ' if said else ''}{said}, seed {self.seed}"

    def processors(self, numbers: Sequence[int], device: torch.device) -> LogitsProcessorList:
        """For a batch of the prompts with these numbers."""
        if not self.temperature:
            return LogitsProcessorList()
        found = [TemperatureLogitsWarper(self.temperature)]
        found += [TopKLogitsWarper(self.top_k)] if self.top_k else []
        found += [TopPLogitsWarper(self.top_p)] if self.top_p and self.top_p < 1 else []
        found += [MinPLogitsWarper(self.min_p)] if self.min_p else []
        return LogitsProcessorList([*found, Noise(self.seed, numbers, device)])


def settle_decoding(asked: argparse.Namespace, model: Any) -> Decoding:
    """As the flags say, else as the model's generation_config.json does, else the likeliest token; the model itself is
    then left greedy, for `Noise` is what samples. Its penalties and its end tokens stay."""
    config = model.generation_config
    samples = bool(config.do_sample or asked.top_p) if asked.temperature is None else asked.temperature > 0
    own = {name: getattr(config, name) for name in WARPING} if config.do_sample else {}
    for name in (*WARPING, "typical_p", "max_length", "max_new_tokens", "stop_strings"):
        setattr(config, name, None)
    config.do_sample, config.num_beams, config.num_return_sequences = False, 1, 1
    if not samples:
        return Decoding()
    temperature, top_p = asked.temperature or own.get("temperature") or 1.0, asked.top_p or own.get("top_p")
    return Decoding(temperature, own.get("top_k"), top_p, own.get("min_p"), asked.seed)


class Noise(LogitsProcessor):  # type: ignore[misc]
    """Scores plus Gumbel's noise, so that the largest is a draw from their softmax (Maddison et al., arXiv 1611.00712,
    section 3.1). `torch.multinomial`, which transformers draws by, takes one generator for a batch: a draw depends on
    who else is in it. Here each row has its own, by the prompt's number."""

    def __init__(self, seed: int, numbers: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(_seed_of(seed, number)) for number in numbers]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` (B, vocabulary), in float32."""
        drawn = torch.empty_like(scores)
        for row, generator in zip(drawn, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores - drawn.clamp_min(SMALLEST).log()


def _seed_of(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")


class Stops(StoppingCriteria):  # type: ignore[misc]
    """Ends a row once one of `texts` stands in its answer, after a prompt of `width` tokens. `after` says for each row
    by how many tokens, None where there is none."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], width: int, rows: int) -> None:
        self.tokenizer, self.texts, self.width = tokenizer, texts, width
        # A token has a byte at least; one more, for decoders take a blank off the first.
        self.looked_at = 1 + max(len(text.encode()) for text in texts)
        self.after: list[int | None] = [None] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        length = input_ids.shape[1] - self.width
        tails = input_ids[:, max(self.width, input_ids.shape[1] - self.looked_at) :].tolist()
        for row, tail in enumerate(tails):
            if self.after[row] is None and any(text in self.tokenizer.decode(tail) for text in self.texts):
                self.after[row] = length
        return torch.tensor([after is not None for after in self.after], device=input_ids.device)
