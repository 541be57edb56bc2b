"""Sequence parallelism compared with one process: loss, gradient norm and weights in every layout; activations that a
rank keeps for the backward pass; transformers' own sequence parallelism; and steps by turns with ZeRO-3 alone.

    python benchmarks/sequence_parallel.py            # half an hour on two cores, most of it with eight processes
    python benchmarks/sequence_parallel.py --largest 2    # layouts of at most two ranks
    python benchmarks/sequence_parallel.py --parts times  # this part alone; other programs disturb no other

Writes docs/results/sequence_parallel.json; benchmarks/pages.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from releases import in_words
from sharing import ROUNDS, TIMED_STEPS, WARM_STEPS, by_turns, launched, ratio, run_of, write_parts

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results" / "sequence_parallel.json"
GLOBAL_BATCH, STEPS, RATE = 8, 3, 0.125
SIZES, READERS, STAGES, ACCUMULATION = (1, 2, 4), (1, 2), (0, 1, 2, 3), (1, 2)
WORDS = "the cat sat on a mat and saw two birds in tall grass".split()
SHAPE = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # fewer than four ranks
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
TRAINED = {
    "max_steps": STEPS,
    "logging_steps": 1,
    "do_eval": False,
    "save_strategy": "no",
    "bf16": False,
    "optim": "sgd",  # SGD's weights show the gradients; Adam's would show their signs
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_grad_norm": "inf",
    "sample_tokens": 0,
}
PACKED = {"block_size": 64, "packing": "bfd", "document_mask": True}
BLOCK = 1024  # tokens per block where bytes are measured
# Where steps are timed, on two ranks, which read two blocks a step.
TIMED = {"hidden_size": 256, "intermediate_size": 688, "max_position_embeddings": 4096}
BLOCKS = (256, 2048)
PARTS = ("bytes", "stock", "equality", "times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=8, help="ranks of the largest layout (default: 8)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="those to measure (default: all)")
    asked = parser.parse_args()
    sys.path.append(str(REPO / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home)
        parts = {
            "bytes": partial(activation_bytes, home, asked.largest),
            "stock": partial(stock, home),
            "equality": partial(equality, home, asked.largest),
            "times": partial(times, home),
        }
        write_parts(OUT, {name: parts[name] for name in asked.parts}, is_whole=set(asked.parts) == set(PARTS))


def prepare(home: Path) -> None:
    """Models, conversations of one turn, and rows of token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.data.tokenizer import train_text_tokenizer

    torch.manual_seed(1)
    for name, shape in {"model": SHAPE, "timed": {**SHAPE, **TIMED}}.items():
        LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=None)).save_pretrained(home / name)
        tokenizer = train_text_tokenizer("byte", [], 0, shape["max_position_embeddings"], with_end=True)
        tokenizer.save_pretrained(home / name)
    draw = random.Random(0)
    lines = []
    for _ in range(200):
        asked, said = (draw.choices(WORDS, k=draw.choice(most)) for most in ((1, 4), (1, 9)))
        lines.append(json.dumps({"prompt": " ".join(asked), "completion": f" {' '.join(said)}"}))
    (home / "answers.jsonl").write_text("\n".join(lines))
    (home / "long.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=400)) for _ in range(80)))
    for kind in ("even", "uneven"):
        rows = []
        for _ in range(64):
            asked, said = (0, 64) if kind == "even" else (draw.choice([2, 20]), draw.choice([3, 40]))
            ids = [draw.randrange(257) for _ in range(asked + said)]
            rows.append(json.dumps({"input_ids": ids, "labels": [-100] * asked + ids[asked:]}))
        (home / f"{kind}.jsonl").write_text("\n".join(rows))


def layouts(largest: int) -> Iterator[dict[str, int]]:
    """The layouts, those with few ranks first."""
    for size, readers in sorted(product(SIZES, READERS), key=math.prod):
        for stage, steps in product(STAGES, ACCUMULATION):
            if 1 < size * readers <= largest:
                yield {"size": size, "readers": readers, "stage": stage, "steps": steps}


def equality(home: Path, largest: int) -> Iterator[dict[str, Any]]:
    from safetensors.torch import load_file
    from warm_ranks import WarmRanks

    every = {**TRAINED, **PACKED, "train_file": home / "answers.jsonl", "model_name_or_path": home / "model"}

    warm = WarmRanks()
    trained = partial(run_of, home, warm, every)
    log, weights = trained(1, per_device_train_batch_size=GLOBAL_BATCH)
    before = load_file(home / "model/model.safetensors")
    largest_update = max(float((weights[name] - before[name]).abs().max()) for name in weights)
    for layout in layouts(largest):
        got, own = trained(
            layout["size"] * layout["readers"],
            deepspeed=f"zero{layout['stage']}",
            sequence_parallel_size=layout["size"],
            per_device_train_batch_size=GLOBAL_BATCH // (layout["readers"] * layout["steps"]),
            gradient_accumulation_steps=layout["steps"],
        )
        apart = max(float((own[name] - weights[name]).abs().max()) for name in weights)
        steps = list(zip(got, log, strict=True))
        off = {name: max(_off(here[name], truth[name]) for here, truth in steps) for name in ("loss", "grad_norm")}
        print(layout, off, apart, flush=True)
        yield layout | off | {"weights": apart, "of": largest_update}
    warm.close()


def _off(found: float, truth: float) -> float:
    return abs(found - truth) / abs(truth)


def activation_bytes(home: Path, largest: int) -> Iterator[dict[str, Any]]:
    from warm_ranks import WarmRanks

    warm = WarmRanks()
    every = {**TRAINED, "max_steps": 1, "block_size": BLOCK, "train_file": home / "long.txt"}
    every |= {"model_name_or_path": home / "model", "per_device_train_batch_size": 1, "deepspeed": "zero1"}
    for checkpointing in (False, True):
        for size in SIZES:
            if size > largest:
                continue
            folder = Path(tempfile.mkdtemp(dir=home))
            values = {**every, "output_dir": folder / "run", "sequence_parallel_size": size}
            values |= {"activation_checkpointing": True} if checkpointing else {}
            launched(warm, size, ["benchmarks/sequence_parallel_rank.py", folder / "bytes"], values)
            kept = [json.loads((folder / f"bytes.{rank}").read_text())[0] for rank in range(size)]
            yield {"size": size, "checkpointing": checkpointing, "bytes": max(kept), "least": min(kept)}
    warm.close()


def stock(home: Path) -> Iterator[dict[str, Any]]:
    """Four rows per step, one at a time: on one process, and on two ranks that share each row."""
    import os

    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "2", "--master_port"]
    for kind in ("even", "uneven"):
        logs = []
        for size in (1, 2):
            launcher = (
                [*torchrun, str(random.SystemRandom().randrange(10_000, 32_768))] if size > 1 else [sys.executable]
            )
            out = home / f"stock-{kind}-{size}.json"
            words = [home / "model", home / f"{kind}.jsonl", out, size, 1, 4]
            command = [*launcher, "benchmarks/stock_sequence_parallel.py", *map(str, words)]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            subprocess.run(command, cwd=REPO, env=environment, check=True, capture_output=True)
            logs.append(json.loads(out.read_text()))
        one, two = (log[0] for log in logs)  # the first step only: later ones start from different weights
        yield {"masks": kind, **{name: [one[name], two[name]] for name in ("loss", "grad_norm")}}


def times(home: Path) -> Iterator[dict[str, Any]]:
    """Seconds of a step on two ranks under ZeRO-3, of whole texts and of shared ones, which are the same."""
    whole = {**TRAINED, "deepspeed": "zero3", "train_file": home / "long.txt", "model_name_or_path": home / "timed"}
    whole |= {"per_device_train_batch_size": 1, "max_steps": WARM_STEPS + TIMED_STEPS}
    shared = {"sequence_parallel_size": 2, "per_device_train_batch_size": 2}
    for block in BLOCKS:
        yield {"block": block, **by_turns(home, {**whole, "block_size": block}, {"zero3": {}, "shared": shared})}


HEAD = """# Sequence parallelism compared with one process

`python benchmarks/sequence_parallel.py`, {date}, CPU processes over gloo in fp32; {versions}.
The model is a Llama with four attention heads and two key-value heads. The data are prompts, which the loss ignores,
and answers of one or nine words, packed into blocks of 64 tokens with `--document_mask True`. A run is {steps} steps of
SGD without clipping, with {batch} blocks per step.

The reference is one process without DeepSpeed that reads {batch} blocks at a time. Loss and gradient norm are the
largest relative differences from it at any step. Weights are the largest absolute difference of any weight after the
last step. For comparison, the largest change of any weight (the sum of its gradients times the learning rate) is
{update:.3g}.

| ranks that share a text | groups | ZeRO stage | accumulation | loss | gradient norm | weights |
|---:|---:|---:|---:|---:|---:|---:|"""
BYTES = """
## Activations that a rank keeps for the backward pass

Bytes of the tensors that the first forward pass allocates and that are alive when it ends
(`finetune/measure/memory.py`), for one block of {block:,} tokens under ZeRO-1, on the fullest rank. What a rank keeps
above its share, such as the copies that the exchange around attention makes, was not measured separately.

| ranks that share a text | all activations | relative to one rank | with checkpointing | relative to one rank |
|---:|---:|---:|---:|---:|"""
STOCK = """
## transformers' own sequence parallelism

The Trainer of transformers with `ParallelismConfig(sp_size=2)` on two ranks under ZeRO-1, four rows per step, one at a
time, compared with the same Trainer on one process. Figures are those of the first step, before any weight has changed.
Even: the loss counts all 64 tokens of each row. Uneven: it counts 3 or 40 of them. The gradient is twice as large even
with even masks. DeepSpeed divides by the ranks that read different rows (runtime/zero/stage_1_and_2.py,
`sequence_parallel_size`), and the loss is gathered with its gradient from each rank of the group
(integrations/deepspeed.py, `deepspeed_sp_compute_loss`).

| counted tokens | loss, one process | loss, two ranks | difference | gradient norm, one process | two ranks | ratio |
|---|---:|---:|---:|---:|---:|---:|"""
TIMES = """
## Seconds of a step, compared with ZeRO-3 alone

Two ranks, one core each, under ZeRO-3, with two blocks per step: each rank reads one of them, or both share both. The
model is {width} wide. Median of {rounds} launches of each, taken in turns on {date}, and of their ratios, with the
smallest and the largest; a launch counts by the median of {steps} steps. Both compute the same products. What sharing
adds here is the exchange through gloo and its copies, whose share falls with the length of the text.

| tokens per block | ZeRO-3 alone, seconds | two ranks share each text, seconds | ratio |
|---:|---:|---:|---:|"""
END = """
What this does not show: times on GPUs, where the exchange goes over NVLink and attention is another kernel; NCCL; flash
attention, which does not run on CPUs; and half precision, where sums differ in their last digits even without sequence
parallelism.
"""


def page(found: dict[str, Any]) -> str:
    rows = found["equality"]
    words = {"date": found["date"], "versions": in_words(found["versions"]), "batch": GLOBAL_BATCH, "steps": STEPS}
    lines = [HEAD.format(**words, update=rows[0]["of"])]
    for row in rows:
        where = " | ".join(str(row[name]) for name in ("size", "readers", "stage", "steps"))
        lines.append(f"| {where} | {row['loss']:.1e} | {row['grad_norm']:.1e} | {row['weights']:.1e} |")
    worst = {name: max(row[name] for row in rows) for name in ("loss", "grad_norm", "weights")}
    loss, norm, weights = (f"{worst[name]:.1e}" for name in worst)
    lines.append(f"\nThe largest over {len(rows)} layouts: loss {loss}, gradient norm {norm}, weights {weights}.")
    lines.append(BYTES.format(block=BLOCK))
    by = {(row["size"], row["checkpointing"]): row["bytes"] for row in found["bytes"]}
    for size in sorted({size for size, _ in by}):
        shares = [f"{by[size, kind]:,} | {by[size, kind] / by[1, kind]:.3f}" for kind in (False, True)]
        lines.append(f"| {size} | {' | '.join(shares)} |")
    lines.append(STOCK)
    for row in found["stock"]:
        (loss_1, loss_2), (norm_1, norm_2) = row["loss"], row["grad_norm"]
        losses = f"{loss_1:.6f} | {loss_2:.6f} | {_off(loss_2, loss_1):.1%}"
        lines.append(f"| {row['masks']} | {losses} | {norm_1:.4f} | {norm_2:.4f} | {norm_2 / norm_1:.2f} |")
    for row in found.get("times", ()):
        if row is found["times"][0]:
            words = {"width": TIMED["hidden_size"], "rounds": ROUNDS, "steps": TIMED_STEPS, "date": row["date"]}
            lines.append(TIMES.format(**words))
        seconds = " | ".join(f"{statistics.median(row[name]):.3f}" for name in ("zero3", "shared"))
        lines.append(f"| {row['block']:,} | {seconds} | {ratio(row, 'shared', 'zero3')} |")
    return "\n".join(lines) + "\n" + END


if __name__ == "__main__":
    main()
