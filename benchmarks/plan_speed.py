"""Published training speeds, compared with `finetune plan`: a part of docs/results/plan_public.md, which
plan_public.py prints. Every plan is computed anew; the data has only the published figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from finetune.plan.job import DEEPSPEED, FSDP, TRAINER, Job
from finetune.plan.machine import find_machine
from finetune.plan.model import Model, in_4bit, model_of, with_lora
from finetune.plan.named import find_model_config
from finetune.plan.optimizers import Optimizer
from finetune.plan.search import laid_out
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import Lora
from finetune.plan.zero import Zero

EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {"qv": ("q_proj", "v_proj"), "qkvo": EVERY_LINEAR[:4]}
# MPT's layers, width and heads (llm-foundry, scripts/train/yamls/pretrain). Its operators are GPT-2's with torch's
# GELU, without biases.
MPT = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
       "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
       "70b": (80, 8192, 64)}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
# FlashAttention in Triton: half of FlashAttention-2's shares of the peak, which is 1.3 to 2.5 times as fast (arXiv
# 2307.08691, section 4.1).
TRITON = {"A100": {"forward": 0.365, "backward": 0.315}, "H100": {"forward": 0.18, "backward": 0.16}}
LATER, LATER_WORDS = ("fms-acceleration", "VectorLM"), "added later"
LOW = 2048  # tokens up to which samples count as short

HEAD = """
# Speed

A row is "used" if a constant of the planner was fitted to it; all others are held out. Four constants were fitted:
`SUSTAINED` in `finetune/plan/kernels.py` (eight A100-80GB at 2,048 tokens, llm-foundry), the rates of Hopper's matrix
products in `finetune/plan/machines/` (H100-80GB at 2,048 tokens, llm-foundry), the seconds per kernel launch (the first
Qwen with LoRA on one GPU, 256 tokens; on V100s three rows of BERT), and `PYTHON` in `finetune/plan/kernels.py` (the
first Qwen, full fine-tuning under ZeRO-3 up to 1,024 tokens). We had seen most of the held-out rows when we chose them,
so these are not a blind test. The rows of fms-acceleration, VectorLM and BERT were: they were added later. Their errors
led to corrections: of the bytes that an optimizer moves in bf16 and in fp16, and of the host's time for DeepSpeed's
step in fp16, for Adafactor and for launches beside V100s. A positive error means that the plan is faster than the
published speed.
"""
SOURCES = """
Excluded, because a plan does not model it: `torch.compile`, FP8, tensor, context and expert parallelism, selective
checkpointing (torchtitan's H100 rows, at 500 W per GPU), and runs that do not state the length of their samples
(LitGPT). Also excluded are torchtune's rows on an A6000: 4,699 tokens/s with an 8B model are 226 TFLOP/s, on a chip
with 155. There are no rows for an AMD chip, because we found no sufficiently detailed source; rows for consumer
cards are in the last chapter.

## Many layouts

All rows are for A100s with 80 GB in bf16. The batch is micro-batch x accumulation steps.

- Qwen: QwenLM/Qwen, README, "Profiling of Memory and Speed": seconds per iteration of 8 micro-batches of one sample,
  flash attention 2, gradient checkpointing. We assume ZeRO-3 with the settings of our `zero3`.
- ATorch: intelligent-machine-learning/dlrover, atorch/examples/llama2, README, "Performance": hardware TFLOP/s,
  converted to tokens with its own `compute_llama2_training_flops`; blocks of 4,096 tokens, according to its launch
  script. Its memory column is excluded: it is 19 GB above the plan for any number of GPUs, which the publication does
  not explain.
- fms-fsdp: foundation-model-stack/fms-fsdp, README, 4,096 tokens on 128 GPUs. Its 7b and 13b shard within a node and
  replicate across nodes, which plans do not support: we assume FSDP over all ranks.
- torchtitan: pytorch/torchtitan, docs/performance.md of 2024, FSDP2; we assume no `torch.compile`.
- torchtune: meta-pytorch/torchtune, README, "Optimization flags", the row with a packed data set. Its optimizer works
  in bf16; the size of its A100 is an assumption.
- fms-acceleration: the runs above. Their time includes the first steps.
- VectorLM: VectorInstitute/vectorlm, docs/reference_throughput.md, medians of steps: full fine-tuning in bf16 without
  fp32 weights, and LoRA of rank 8 on queries and values. Four GPUs are a node.
"""
FOUNDRY = """
## llm-foundry

mosaicml/llm-foundry, scripts/train/benchmarking/README.md, every row in bf16: MPT with 125 million to 70 billion
parameters under FSDP, planned as GPT-2 with the same shape. It uses a Triton attention kernel from 2023, which we plan
at half the speed of FlashAttention-2; the paper of the latter claims 1.3 to 2.5 times the speed. Some rows are
inconsistent with their neighbors: 760m on A100-80GB at 512 and 1,024 tokens, and 1b on 32 A100-40GB.
"""


@dataclass(frozen=True)
class Speed:
    """`error`: how much faster the plan is than the published speed. `used`: a constant was fitted to the row."""

    cells: tuple[str, ...]
    error: float
    used: bool
    kind: str

    @property
    def shown(self) -> str:
        return f"{self.error:+.0%}{' (used)' * self.used}"


@cache
def mpt(size: str, tokens: int) -> Model:
    layers, width, heads = MPT[size]
    return model_of({"model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": 50368,
                     "n_positions": tokens, "activation_function": "gelu", **NO_DROPOUT})  # fmt: skip


def of_foundry(row: list[Any]) -> Speed:
    gpu, size, tokens, gpus, batch, steps, checkpointing, published = row
    machine = replace(find_machine(gpu), flash_attention_2=TRITON[gpu[:4]])
    job = Job(mpt(size, tokens), FSDP, Zero(), gpus, 8, micro_batch=batch, tokens=tokens, accumulation=steps,
              precision="bf16", checkpoint_interval=checkpointing, attention="flash_attention_2")  # fmt: skip
    planned = plan_seconds(job, machine).tokens_per_second / gpus
    is_short = tokens == LOW and gpus == 8
    used = (is_short and gpu == "A100-80GB") or (tokens == LOW and gpu == "H100-80GB")
    cells = (gpu, size, f"{tokens:,}", str(gpus), f"{batch} x {steps}", "yes" if checkpointing else "no",
             f"{published:,}", f"{planned:,.0f}")  # fmt: skip
    return Speed(cells, planned / published - 1, used, kind_of(tokens, gpus))


def kind_of(tokens: int, gpus: int) -> str:
    where = "one node" if gpus <= 8 else "several nodes"
    return f"{where}, {'up to 2,048' if tokens <= LOW else '4,096 and more'} tokens"


def other(row: dict[str, Any], models: dict[str, Any]) -> Speed:
    job, machine = job_of(row, models), find_machine("A100-80GB")
    step = plan_seconds(job, machine)
    planned = step.tokens_per_second / row["gpus"]
    if "seconds" in row:
        published = step.tokens / row["gpus"] / row["seconds"]
    elif "tflops" in row:
        published = row["tflops"] * 1e12 / hardware_flops(row["tokens"])
    else:
        published = row["tokens_per_second"]
    waits = row["tokens"] <= (256 if row["layout"] == "none" else 1024)  # for the host
    used = row["source"] == "Qwen" and waits and (row["layout"] == "none" or not row["lora"])
    layout = {"none": "alone", "fsdp": "FSDP"}.get(row["layout"], row["layout"]) + (", LoRA" if row["lora"] else "")
    layout += ", 4 bits" if row.get("packed") else ""
    cells = (row["source"], row["model"], layout, str(row["gpus"]), f"{row['tokens']:,}",
             f"{row['batch']} x {row['accumulation']}", "yes" if row["checkpointing"] else "no",
             f"{published:,.0f}", f"{planned:,.0f}")  # fmt: skip
    return Speed(cells, planned / published - 1, used, kind_of(row["tokens"], row["gpus"]))


def job_of(row: dict[str, Any], models: dict[str, Any]) -> Job:
    model = model_of(
        {**(models.get(row["model"]) or find_model_config(row["model"])), "max_position_embeddings": 32768}
    )
    if row["lora"]:
        adapter = Lora(row["lora"], TARGETS.get(row.get("targets", ""), EVERY_LINEAR), row.get("dropout", 0.05))
        model = with_lora(in_4bit(model, double_quant=True) if row.get("packed") else model, adapter)
    job = Job(
        model, world_size=row["gpus"], ranks_per_node=row.get("gpus_per_node", 8), micro_batch=row.get("batch", 1),
        tokens=row["tokens"], accumulation=row.get("accumulation", 8), precision="bf16", dtype="bfloat16",
        checkpoint_interval=int(row.get("checkpointing", True)), attention=row.get("attention", "flash_attention_2"),
        optimizer=Optimizer(row.get("optimizer", "adam")),
    )  # fmt: skip
    layout = row.get("layout", "zero3")
    if layout == "zero3":
        return laid_out(job, layout)
    return replace(job, engine={"none": TRAINER, "fsdp": FSDP, "zero0": DEEPSPEED}[layout])


def hardware_flops(
    tokens: int, layers: int = 32, width: int = 4096, inner: int = 11008, vocabulary: int = 32000
) -> float:
    """FLOPs per token of Llama-2-7b with checkpointing, as ATorch counts them: attention without a mask, four times the
    forward FLOPs for blocks, three times for the head."""
    block = 8 * width**2 + 4 * tokens * width + 6 * width * inner
    return 4 * layers * block + 3 * 2 * width * vocabulary


def summary(rows: Iterable[Speed], words: str) -> str:
    errors = [row.error for row in rows]
    worst = max(errors, key=abs)
    either = statistics.median(map(abs, errors))
    return f"| {words} | {len(errors)} | {either:.1%} | {statistics.median(errors):+.1%} | {worst:+.0%} |"


def speeds(data: dict[str, Any]) -> tuple[list[Speed], list[Speed]]:
    """The rows of many layouts, and those of llm-foundry."""
    timed = [row for row in data["speed"] if {"seconds", "tflops", "tokens_per_second"} & {*row}]
    others = [other(row, data["models"]) for row in timed]
    return others, [of_foundry(row) for row in data["llm_foundry"]]


def page(data: dict[str, Any], berts: list[Speed]) -> Iterator[str]:
    others, foundry = speeds(data)
    rows = [*others, *foundry, *berts]
    kept = [row for row in rows if not row.used]
    yield HEAD
    yield "| rows | count | median absolute error | median error | worst error |"
    yield "|---|---|---|---|---|"
    yield summary((row for row in rows if row.used), "used")
    yield summary(kept, "held out")
    yield summary((row for row in kept if row not in foundry), "held out, without llm-foundry")
    yield summary((row for row in kept if row in berts or row.cells[0] in LATER), f"held out, {LATER_WORDS}")
    for kind in sorted({row.kind for row in kept}):
        yield summary((row for row in kept if row.kind == kind), f"held out, {kind}")
    yield SOURCES
    ends = ("GPUs", "tokens", "batch", "checkpointing", "published tokens/s per GPU", "planned", "error")
    yield from table(("source", "model", "layout", *ends), map(_cells, others))
    yield FOUNDRY
    yield from table(("GPU", "model", "tokens", "GPUs", *ends[2:]), map(_cells, foundry))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = (columns, ["---"] * len(columns), *rows)
    return [f"| {' | '.join(map(str, line))} |".replace(" --- ", "---") for line in lines]


def _cells(row: Speed) -> tuple[str, ...]:
    return *row.cells, row.shown
