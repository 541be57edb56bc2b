"""Sequence parallelism compared with one process: loss, gradient norm and weights in every layout; activations that a
rank keeps for the backward pass; and transformers' own sequence parallelism.

    python benchmarks/sequence_parallel.py            # half an hour on two cores, most of it with eight processes
    python benchmarks/sequence_parallel.py --largest 2    # layouts of at most two ranks

Measures no times, so other programs on the machine do not matter. Writes docs/results/sequence_parallel.json;
benchmarks/pages.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from releases import in_words, versions

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=8, help="ranks of the largest layout (default: 8)")
    largest = parser.parse_args().largest
    sys.path.append(str(REPO / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home)
        found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "versions": versions()}
        found["bytes"] = list(activation_bytes(home, largest))
        found["stock"] = list(stock(home))
        found["equality"] = []
        for row in equality(home, largest):
            found["equality"].append(row)
            OUT.write_text(json.dumps(found, indent=1) + "\n")


def prepare(home: Path) -> None:
    """A model, conversations of one turn, and rows of token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.data.tokenizer import train_text_tokenizer

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SHAPE, bos_token_id=None, eos_token_id=None)).save_pretrained(home / "model")
    train_text_tokenizer("byte", [], 0, SHAPE["max_position_embeddings"], with_end=True).save_pretrained(home / "model")
    draw = random.Random(0)
    lines = []
    for _ in range(200):
        asked, said = (draw.choices(WORDS, k=draw.choice(most)) for most in ((1, 4), (1, 9)))
        lines.append(json.dumps({"prompt": " ".join(asked), "completion": f" {' '.join(said)}"}))
    (home / "answers.jsonl").write_text("\n".join(lines))
    (home / "long.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=400)) for _ in range(40)))
    for kind in ("even", "uneven"):
        rows = []
        for _ in range(64):
            asked, said = (0, 64) if kind == "even" else (draw.choice([2, 20]), draw.choice([3, 40]))
            ids = [draw.randrange(257) for _ in range(asked + said)]
            rows.append(json.dumps({"input_ids": ids, "labels": [-100] * asked + ids[asked:]}))
        (home / f"{kind}.jsonl").write_text("\n".join(rows))


def launched(warm: Any, ranks: int, script: list[Any], values: dict[str, Any]) -> None:
    import os

    from conftest import LAUNCHERS, flags

    words = [*map(str, script), *flags(values)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    status, output = warm.run(LAUNCHERS["torchrun" if ranks > 1 else "python"](ranks), words, ranks, environment, 600)
    if status:
        raise SystemExit(output[-3000:])


def layouts(largest: int) -> Iterator[dict[str, int]]:
    """The layouts, those with few ranks first."""
    for size, readers in sorted(product(SIZES, READERS), key=math.prod):
        for stage, steps in product(STAGES, ACCUMULATION):
            if 1 < size * readers <= largest:
                yield {"size": size, "readers": readers, "stage": stage, "steps": steps}


def run_of(home: Path, warm: Any, every: Mapping[str, Any], ranks: int, **values: Any) -> tuple[list[Any], Any]:
    """The logged rows of recipes/causal_lm.py with a loss, and the final weights."""
    from safetensors.torch import load_file

    folder = Path(tempfile.mkdtemp(dir=home))
    launched(warm, ranks, ["recipes/causal_lm.py"], {**every, "output_dir": folder / "run", **values})
    log = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [row for row in log if "loss" in row], load_file(folder / "run/model.safetensors")


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
END = """
What this does not show: times, which on two cores say nothing about GPUs; NCCL; flash attention, which does not run on
CPUs; and half precision, where sums differ in their last digits even without sequence parallelism.
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
    return "\n".join(lines) + "\n" + END


if __name__ == "__main__":
    main()
