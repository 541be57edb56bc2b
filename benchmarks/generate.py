"""Tokens per second of `finetune generate` and of a plain loop over `model.generate`, with the same model, prompts,
batch size and threads, interleaved in one process.

    OMP_NUM_THREADS=1 python benchmarks/generate.py --out docs/results/generate.json    # a small GPT-lite on the CPU

The loop is the one in transformers' documentation: prompts in their original order, padded on the left by the
tokenizer, answers decoded. Ours groups prompts of similar length and detects where each answer ends. Both decode
greedily and write the same number of tokens for each prompt. Their answers are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from releases import this_machine
from spread import spread

from finetune.data.tokenizer import train_text_tokenizer
from finetune.generation.answering import Answerer
from finetune.generation.batches import batches_of
from finetune.generation.sampling import Decoding
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

POSITIONS, LAYERS, WIDTH = 512, 4, 256
PROMPTS, BATCH, NEW = 48, 8, 24
SHORTEST, LONGEST, ALIKE = 8, 400, 100  # tokens of a prompt


def texts() -> dict[str, list[str]]:
    drawn = random.Random(0)
    uneven = [min(LONGEST, SHORTEST + int(drawn.expovariate(1 / 90))) for _ in range(PROMPTS)]
    kinds = {f"of {SHORTEST} to {LONGEST} tokens, most short": uneven, f"of {ALIKE} tokens": [ALIKE] * PROMPTS}
    return {
        kind: ["".join(drawn.choice("abcdefgh ") for _ in range(length)) for length in lengths]
        for kind, lengths in kinds.items()
    }


def build() -> tuple[Any, Any]:
    torch.manual_seed(0)
    tokenizer = train_text_tokenizer("byte", [], 0, POSITIONS, with_end=True)
    tokenizer.padding_side = "left"
    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = GPTLiteConfig(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, initializer_range=0.1, **shape)
    model = GPTLiteForCausalLM(config).eval()
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def plain(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    found = []
    for start in range(0, len(prompts), BATCH):
        inputs = tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True)
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        found += tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def ours(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    answerer = Answerer(model, tokenizer, Decoding(), (), torch.device("cpu"), frozenset())
    ids = tokenizer(prompts)["input_ids"]
    found = {}
    for batch in batches_of([len(one) for one in ids], POSITIONS, NEW, BATCH):
        for row in answerer.answer([ids[number] for number in batch.numbers], batch):
            found[row["index"]] = row["text"]
    return [found[number] for number in range(len(prompts))]


def measure(turns: int) -> dict[str, Any]:
    """Tokens per second of both, per round, by wall-clock time and by CPU time, which other programs affect less; they
    alternate in going first."""
    model, tokenizer = build()
    kinds, same = {}, True
    for kind, prompts in texts().items():
        same &= plain(model, tokenizer, prompts) == ours(model, tokenizer, prompts)  # also a warm-up
        rates: dict[str, list[float]] = {"plain": [], "ours": [], "plain_cpu": [], "ours_cpu": []}
        for turn in range(turns):
            for run in (plain, ours) if turn % 2 else (ours, plain):
                start, start_cpu = time.perf_counter(), time.process_time()
                run(model, tokenizer, prompts)
                rates[run.__name__].append(PROMPTS * NEW / (time.perf_counter() - start))
                rates[f"{run.__name__}_cpu"].append(PROMPTS * NEW / (time.process_time() - start_cpu))
        kinds[kind] = rates
    return {
        "machine": f"{this_machine()}, {torch.get_num_threads()} thread(s)",
        "load": round(os.getloadavg()[0], 1),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers")),
        "same_answers": same,
        "kinds": kinds,
    }


def page(data: dict[str, Any]) -> str:
    """docs/results/generate.md."""
    turns = len(next(iter(data["kinds"].values()))["ours"])
    lines = [
        "# `finetune generate` compared with a plain loop",
        "",
        f"A GPT-lite with {LAYERS} layers and hidden size {WIDTH} in fp32; {PROMPTS} prompts, {NEW} new tokens each,",
        f"batch size {BATCH}. Both run in one process, interleaved. {data['machine']}, load average {data['load']};",
        f"{data['versions']}. Medians of {turns} rounds, with the range in parentheses.",
        f"The answers are {'identical' if data['same_answers'] else 'NOT identical'}.",
        "",
        "The plain loop calls `model.generate` on the prompts in their original order. `finetune generate` groups",
        "prompts of similar length, and detects where each answer ends. With prompts of one length, there is nothing",
        "to group.",
        "",
        "Made by `OMP_NUM_THREADS=1 python benchmarks/generate.py --out docs/results/generate.json`.",
        "",
        "| prompts | plain loop, tokens/s | `finetune generate`, tokens/s | ratio, wall-clock | ratio, CPU time |",
        "|---|---|---|---|---|",
    ]
    for kind, rates in data["kinds"].items():
        ratios = (
            [one / other for one, other in zip(rates[f"ours{by}"], rates[f"plain{by}"], strict=True)]
            for by in ("", "_cpu")
        )
        cells = [spread(rates["plain"], 0), spread(rates["ours"], 0), *(spread(ratio, 2) for ratio in ratios)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    data = measure(asked.turns)
    print(page(data), end="")
    if asked.out:
        asked.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
