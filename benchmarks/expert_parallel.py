"""Expert parallelism compared with one process: loss, gradient norm, router loss and weights in every layout; and steps
by turns with ZeRO alone.

    python benchmarks/expert_parallel.py                  # a quarter of an hour on two cores
    python benchmarks/expert_parallel.py --parts times    # this part alone; other programs do not disturb the other

Writes docs/results/expert_parallel.json; benchmarks/pages.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from releases import in_words
from sequence_parallel import PACKED, REPO, SHAPE, STEPS, TIMED, TRAINED, prepare
from sharing import ROUNDS, TIMED_STEPS, WARM_STEPS, by_turns, ratio, run_of, write_parts

OUT = REPO / "docs" / "results" / "expert_parallel.json"
GLOBAL_BATCH, CLIP, ROUTER = 8, 0.5, 0.1
# Ranks, ranks that hold all experts together, ZeRO stage.
WHOLE = [*product((2, 4), (1,), (0, 1, 2, 3))]
DIVIDED = [(*of, stage) for of in ((2, 2), (4, 2), (4, 4)) for stage in (1, 2)]
ACCUMULATION, PARTS, BLOCK = (1, 2), ("whole", "equality", "offload", "times"), 512
# DeepSpeed's optimizer on the host is Adam, whose usual epsilon would turn rounding in tiny gradients into whole steps.
ADAM = {"optim": None, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2}
FIGURES = ("loss", "grad_norm", "router_loss")


def main() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="those to measure (default: all)")
    asked = parser.parse_args()
    sys.path.append(str(REPO / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home)  # its models are replaced: the tokenizer and the rows are the same
        for name, shape in {"model": SHAPE, "timed": {**SHAPE, **TIMED}}.items():
            mixtral = MixtralConfig(**shape | EXPERTS, bos_token_id=None, eos_token_id=None, sliding_window=None)
            MixtralForCausalLM(mixtral).save_pretrained(home / name)
        config = json.loads((REPO / "ds_configs/zero2_offload.json").read_text())
        for stage in (1, 2):
            config["zero_optimization"]["stage"] = stage
            (home / f"zero{stage}.json").write_text(json.dumps(config))
        parts = {
            "whole": partial(equality, home, WHOLE, "zero{}", {}),
            "equality": partial(equality, home, DIVIDED, "zero{}", {}),
            "offload": partial(equality, home, DIVIDED, f"{home}/zero{{}}.json", ADAM),
            "times": partial(times, home),
        }
        write_parts(OUT, {name: parts[name] for name in asked.parts}, is_whole=set(asked.parts) == set(PARTS))


def equality(home: Path, layouts: Any, config: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`config` names the DeepSpeed config of a ZeRO stage; `more` are flags of all runs."""
    from safetensors.torch import load_file
    from warm_ranks import WarmRanks

    every = {**TRAINED, **PACKED, "max_grad_norm": CLIP, "router_aux_loss_coef": ROUTER}
    every |= {"train_file": home / "answers.jsonl", "model_name_or_path": home / "model", **more}

    warm = WarmRanks()
    trained = partial(run_of, home, warm, every)
    log, weights = trained(1, per_device_train_batch_size=GLOBAL_BATCH)
    before = load_file(home / "model/model.safetensors")
    largest_update = max(float((weights[name] - before[name]).abs().max()) for name in weights)
    for (ranks, size, stage), steps in product(layouts, ACCUMULATION):
        got, own = trained(
            ranks,
            deepspeed=config.format(stage),
            expert_parallel_size=size,
            per_device_train_batch_size=GLOBAL_BATCH // (ranks * steps),
            gradient_accumulation_steps=steps,
        )
        apart = max(float((own[name] - weights[name]).abs().max()) for name in weights)
        pairs = list(zip(got, log, strict=True))
        off = {name: max(abs(here[name] / truth[name] - 1) for here, truth in pairs) for name in FIGURES}
        layout = {"ranks": ranks, "size": size, "stage": stage, "steps": steps}
        print(layout, off, apart, flush=True)
        yield {**layout, **off, "weights": apart, "of": largest_update, "norm": min(row["grad_norm"] for row in log)}
    warm.close()


def times(home: Path) -> Iterator[dict[str, Any]]:
    """Seconds of a step on two ranks, which read one block each."""
    every = {**TRAINED, "train_file": home / "long.txt", "model_name_or_path": home / "timed", "block_size": BLOCK}
    every |= {"per_device_train_batch_size": 1, "max_steps": WARM_STEPS + TIMED_STEPS, "router_aux_loss_coef": ROUTER}
    layouts = {name: {"deepspeed": name} for name in ("zero3", "zero2")}
    layouts["experts"] = {"deepspeed": "zero2", "expert_parallel_size": 2}
    yield by_turns(home, every, layouts)


HEAD = """# Expert parallelism compared with one process

`python benchmarks/expert_parallel.py`, {date}, CPU processes over gloo in fp32; {versions}.
The model is a Mixtral with 8 experts per layer, 2 per token. The data are prompts, which the loss ignores, and answers
of one or nine words, packed into blocks of 64 tokens with `--document_mask True`. A run is {steps} steps of SGD with
{batch} blocks per step, `--router_aux_loss_coef {router}`, and gradients clipped to {clip} (their norm is {norm:.2g} or
more).

The reference is one process without DeepSpeed that reads {batch} blocks at a time. Loss, gradient norm and router loss
are the largest relative differences from it at any step. Weights are the largest absolute difference of any weight
after the last step. For comparison, the largest change of any weight (the sum of its clipped gradients times the
learning rate) is {update:.3g}.

Where 1 rank holds all experts, there is no expert parallelism.
"""
OFFLOAD = """
## Optimizer states on the host

DeepSpeed's CPU Adam (`offload_optimizer`), compared with torch's AdamW in one process, both with a learning rate of
{rate:g} and an epsilon of {epsilon:g}. The largest change of any weight is {update:.3g}.
"""
TABLE = """\
| ranks | ranks that hold all experts | ZeRO stage | accumulation | loss | gradient norm | router loss | weights |
|---:|---:|---:|---:|---:|---:|---:|---:|"""
TIMES = """
## Seconds of a step, compared with ZeRO alone

Two ranks, one core each, which read one block of {block} tokens each per step. The model is {width} wide. Median of
{rounds} launches of each, taken in turns on {date}, and of their ratios, with the smallest and the largest; a launch
counts by the median of {steps} steps.

| layout | seconds | relative to ZeRO-3 alone | relative to ZeRO-2 alone |
|---|---:|---:|---:|"""
NAMES = {"zero3": "ZeRO-3 alone", "zero2": "ZeRO-2 alone", "experts": "ZeRO-2 with expert parallelism"}
END = """
What this does not show: times on GPUs, where the exchange goes over NVLink and grouped products compute the experts;
NCCL; and half precision, where sums differ in their last digits even without expert parallelism.
"""


def page(found: dict[str, Any]) -> str:
    rows = [*found.get("whole", ()), *found["equality"]]
    words = {"date": found["date"], "versions": in_words(found["versions"]), "batch": GLOBAL_BATCH, "steps": STEPS}
    words |= {"router": ROUTER, "clip": CLIP, "norm": rows[0]["norm"], "update": rows[0]["of"]}
    lines = [HEAD.format(**words), *table(rows)]
    if others := found.get("offload"):
        said = {"rate": ADAM["learning_rate"], "epsilon": ADAM["adam_epsilon"], "update": others[0]["of"]}
        lines += [OFFLOAD.format(**said), *table(others)]
    for timed in found.get("times", ()):
        words = {"block": BLOCK, "width": TIMED["hidden_size"], "rounds": ROUNDS, "steps": TIMED_STEPS}
        lines.append(TIMES.format(**words, date=timed["date"]))
        for name, said in NAMES.items():
            others = " | ".join(ratio(timed, name, other) for other in ("zero3", "zero2"))
            lines.append(f"| {said} | {statistics.median(timed[name]):.3f} | {others} |")
    return "\n".join(lines) + "\n" + END


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    figures = (*FIGURES, "weights")
    yield TABLE
    for row in rows:
        where = " | ".join(str(row[name]) for name in ("ranks", "size", "stage", "steps"))
        yield f"| {where} | {' | '.join(f'{row[name]:.1e}' for name in figures)} |"
    worst = ", ".join(f"{name.replace('_', ' ')} {max(row[name] for row in rows):.1e}" for name in figures)
    yield f"\nThe largest over {len(rows)} layouts: {worst}."


if __name__ == "__main__":
    main()
