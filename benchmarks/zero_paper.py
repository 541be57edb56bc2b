"""The ZeRO paper's example (arXiv 1910.02054, figure 1: 7.5 billion parameters, 64 ranks), planned:

    python benchmarks/zero_paper.py

Prints the table of docs/plan.md, which tests/plan/test_memory.py holds against both.
"""

from __future__ import annotations

from finetune.plan.job import DEEPSPEED, Job
from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of
from finetune.plan.zero import Zero

PAPER_GB = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}
LAYERS, WIDTH, VOCABULARY, RANKS = 36, 4096, 50_304, 64
CONFIG = {
    "model_type": "gptlite",
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
STATES = {"parameters", "master weights", "optimizer states", "gradients"}


def planned_gb(stage: int) -> tuple[float, float]:
    """GB of weights, masters, states and gradients per rank: at the peak of the backward pass, and between steps."""
    zero = Zero(  # small buckets and little gathered, because the paper counts neither
        stage=stage,
        reduce_bucket_size=5_000_000,
        prefetch_bucket_size=0,
        max_reuse_distance=0,
        persistence_threshold=0,
        max_live_parameters=1,
    )
    job = Job(model_of(CONFIG), DEEPSPEED, zero, RANKS, tokens=8, precision="fp16", loss_chunk_tokens=2048)
    found = plan_memory(job, find_machine("H200"))
    peak, rest = (
        sum(size for kind, size in sizes.items() if kind in STATES) / 1e9
        for sizes in (found.peaks["backward"].by_kind, found.resident)
    )
    return peak, rest


def table() -> str:
    lines = [
        "| | the paper | planned, at the peak of the backward pass | planned, between steps |",
        "|---|---|---|---|",
    ]
    for stage, paper in PAPER_GB.items():
        peak, rest = planned_gb(stage)
        lines.append(f"| {f'ZeRO-{stage}' if stage else 'no ZeRO'} | {paper:g} | {peak:.1f} | {rest:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
