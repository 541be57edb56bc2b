"""Published longest texts, compared with `finetune plan --longest`: a part of docs/results/plan_public.md, which
plan_public.py prints. Every plan is computed anew; the data has only the published figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from finetune.plan.answers import most_that_fits
from finetune.plan.job import Job
from finetune.plan.machine import find_machine
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.search import laid_out

STEP, MOST = 1024, 2**23  # tokens
CHUNK_TOKENS, TILES = 2048, 32

HEAD = """
## The longest text that fits

Source: Arctic Long Sequence Training (arXiv 2506.13996), by the authors of the exchange in DeepSpeed: the longest text,
in thousands of tokens, that Llama-3.1-8B trains on with 80-GB H100s, in bf16 with ZeRO-3, optimizer states on the host,
activation checkpointing, flash attention 2 and one text per micro-batch. Its layout is our reading of the publication.
The plan is `--longest` with the machine's usual margins; the publication goes on until memory is exhausted, with
expandable segments. MLPs are planned in 32 tiles, and losses in chunks of 2,048 tokens.
"""
TAIL = """
In the first row and in the first with tiled MLPs, the plan promises more than was published; we do not know why.
"""


def planned(row: dict[str, Any]) -> int:
    """Thousands of tokens."""
    job = laid_out(Job(model_of(find_model_config("Llama-3.1-8B")), precision="bf16"), "zero3_offload")
    job = replace(
        job, world_size=row["gpus"], ranks_per_node=8, sequence_parallel_size=row["sharing"], checkpoint_interval=1,
        attention="flash_attention_2", loss_chunk_tokens=CHUNK_TOKENS if row["chunked"] else 0,
        tiled_mlp_num_shards=TILES if row.get("tiled") else 0,
        checkpoints_on_host=row.get("host", False),
        zero=job.zero if row["gpus"] == 1 else replace(job.zero, offload_param="none"),
    )  # fmt: skip
    sizes, machine = range(STEP, MOST + 1, STEP), find_machine("H100-80GB")
    found = most_that_fits("longest", "", sizes, lambda size: replace(job, tokens=size), machine, None)
    return int(found.found) // 1000


def page(data: dict[str, Any]) -> Iterator[str]:
    yield from (HEAD, "| what | GPUs | ranks per text | published | planned | error |", "|---|---|---|---|---|---|")
    for row in data["alst"]:
        found = planned(row)
        yield (
            f"| {row['what']} | {row['gpus']} | {row['sharing']} | {row['thousands']:,} | {found:,} "
            f"| {found / row['thousands'] - 1:+.0%} |"
        )
    yield TAIL
