"""Planned and measured memory and step times of runs on one NVIDIA GPU. Writes docs/results/plan_gpu.json and its page.

    python benchmarks/plan_gpu.py --measure runs/plan_gpu                        # on the GPU; three to ten minutes
    python benchmarks/plan_gpu.py --compare runs/plan_gpu --machine here.json    # plans the same runs, anywhere

`here.json` is from `finetune plan --calibrate here.json --ranks 1` on that GPU. Each configuration is a process of its
own. Several start side by side, but use the GPU one after the other (gpu_turns/sitecustomize.py). One that is in the
folder already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from releases import versions

from finetune.host.hardware import gpu_names
from finetune.measure.start import measure
from finetune.plan.job import Job
from finetune.plan.model import model_of, with_lora
from finetune.plan.named import find_model_config
from finetune.plan.search import laid_out, shipped
from finetune.plan.values import Lora
from finetune.run.facts import CHUNK_TOKENS

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
STEPS = 8  # timed
CLASSES = "sequence_classification"
# Models that are not known by name.
SHAPES: dict[str, dict[str, Any]] = {
    "moe-small": {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 8,
                  "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 1536,
                  "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048},
    "vit-base": {"model_type": "vit", "image_size": 224, "num_channels": 3, "num_labels": 1000},
}  # fmt: skip
HEADS = {"bert": CLASSES, "roberta": CLASSES, "distilbert": CLASSES, "t5": "seq2seq_lm", "vit": "image_classification"}


@dataclass(frozen=True)
class Case:
    """A configuration. `more`: fields of the planner's Job."""

    model: str
    micro_batch: int
    tokens: int = 0
    layout: str = "none"
    precision: str = "bf16"
    lora: Lora | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.model, f"{self.micro_batch}x{self.tokens}", self.precision, self.layout]
        words += [f"lora{self.lora.rank}"] if self.lora else []
        return "-".join([*words, *(f"{key}={value}" for key, value in self.more.items())])

    @property
    def job(self) -> Job:
        config = SHAPES.get(self.model) or find_model_config(self.model)
        attention = self.more.get("attention", "sdpa")
        model = model_of(config, self.model, HEADS.get(config["model_type"], "causal_lm"), attention)
        if self.lora:
            model = with_lora(model, self.lora)
        job = Job(
            model, world_size=1, ranks_per_node=1, micro_batch=self.micro_batch, tokens=self.tokens or 1,
            precision=self.precision, **self.more,
        )  # fmt: skip
        return laid_out(job, self.layout)


def with_(**more: Any) -> dict[str, Any]:
    return more


CHUNKED, EVERY_LAYER = with_(loss_chunk_tokens=CHUNK_TOKENS["cuda"]), with_(checkpoint_interval=1)
LORA = Lora(16, ("q_proj", "k_proj", "v_proj", "o_proj"))
IN_BF16 = with_(dtype="bfloat16", loss_chunk_tokens=CHUNK_TOKENS["cuda"])
CASES = (
    *(Case("gpt2", 16, 1024, layout) for layout in ("none", "zero0", "zero1", "zero2", "zero3")),
    Case("gpt2", 16, 1024, more=CHUNKED),
    Case("gpt2", 16, 1024, more=EVERY_LAYER),
    Case("gpt2", 8, 1024, more=with_(attention="eager")),
    Case("gpt2", 8, 1024, precision="fp32"),
    Case("gpt2", 1, 1024),
    Case("gpt2", 4, 256),
    Case("gpt2", 4, 1024, more=with_(accumulation=4)),
    Case("Qwen2.5-0.5B", 4, 2048),
    Case("Qwen2.5-0.5B", 4, 2048, more=CHUNKED),
    Case("Qwen2.5-0.5B", 4, 2048, "zero3", more=CHUNKED),
    Case("Llama-3.2-1B", 4, 2048, more=CHUNKED),
    Case("Llama-3.2-1B", 4, 2048, "zero2", more=CHUNKED),
    Case("Llama-3.2-1B", 4, 2048, "zero3", more=CHUNKED),
    Case("Llama-3.2-1B", 2, 8192, more={**CHUNKED, **EVERY_LAYER}),
    Case("Llama-3.2-1B", 4, 2048, lora=LORA, more=IN_BF16),
    Case("Llama-3.2-1B", 1, 512),
    Case("Llama-3.1-8B", 1, 2048, lora=LORA, more=IN_BF16),
    Case("Llama-3.1-8B", 4, 2048, lora=LORA, more={**IN_BF16, **EVERY_LAYER}),
    Case("Qwen3-1.7B", 2, 4096, lora=LORA, more={**IN_BF16, **EVERY_LAYER}),
    Case("gemma-3-270m", 4, 2048, more=CHUNKED),
    Case("SmolLM2-360M", 8, 2048),
    Case("SmolLM2-360M", 8, 2048, "zero1"),
    Case("bert-base-uncased", 32, 128),
    Case("bert-base-uncased", 32, 128, precision="fp32"),
    Case("bert-large-uncased", 16, 512),
    Case("distilbert-base-uncased", 64, 256),
    Case("distilbert-base-uncased", 16, 128, "zero2"),
    Case("roberta-base", 32, 256, precision="fp16"),
    Case("gptlite-post", 64, 256),
    Case("gptlite-post", 64, 256, "zero1"),
    Case("gptlite-post", 64, 256, "zero3"),
    Case("gptlite-post", 64, 256, more=EVERY_LAYER),
    Case("gptlite-small", 16, 1024),
    Case("t5-base", 8, 512),
    Case("moe-small", 8, 1024),
    Case("vit-base", 64),
)


def measure_all(cases: Iterable[Case], folder: Path, workers: int) -> None:
    """Write a JSON file for each case to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["GPU_TURNS"] = str((folder / "turn").resolve())
    sys.path.insert(0, str(Path(__file__).with_name("gpu_turns")))  # children get sys.path as PYTHONPATH
    facts = {"gpu": gpu_names()[0], "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    (folder / "facts.json").write_text(json.dumps(facts))

    def one(case: Case) -> None:
        out = folder / f"{case.name}.json"
        if out.is_file():
            return
        config = None if case.layout == "none" else shipped(case.layout)
        got = measure(case.job, config, folder / case.name, STEPS)
        out.write_text(json.dumps(got if isinstance(got, str) else vars(got)))
        print(
            f"{time.strftime('%X')} {case.name}: {got if isinstance(got, str) else f'{got.step_seconds:.4f} s'}",
            flush=True,
        )

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FOLDER")
    parser.add_argument("--workers", type=int, default=4, help="processes that start side by side (default: 4)")
    parser.add_argument("--only", default="", help="the cases whose names have this")
    asked = parser.parse_args()
    measure_all([case for case in CASES if asked.only in case.name], asked.measure, asked.workers)


if __name__ == "__main__":
    main()
