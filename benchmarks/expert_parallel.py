"""Expert parallelism compared with one process: loss, gradient norm, router loss and weights in every layout.

    python benchmarks/expert_parallel.py            # some minutes on two cores

Measures no times, so other programs on the machine do not matter. Writes docs/results/expert_parallel.json;
benchmarks/pages.py makes the page.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from releases import in_words, versions
from sequence_parallel import PACKED, REPO, SHAPE, STEPS, TRAINED, prepare, run_of

OUT = REPO / "docs" / "results" / "expert_parallel.json"
GLOBAL_BATCH, CLIP, ROUTER = 8, 0.5, 0.1
SIZES, STAGES, ACCUMULATION = ((2, 2), (4, 2), (4, 4)), (1, 2), (1, 2)  # ranks, and ranks that hold all experts
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2}
FIGURES = ("loss", "grad_norm", "router_loss")


def main() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sys.path.append(str(REPO / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        prepare(home)  # its model is replaced: the tokenizer and the rows are the same
        mixtral = MixtralConfig(**SHAPE | EXPERTS, bos_token_id=None, eos_token_id=None, sliding_window=None)
        MixtralForCausalLM(mixtral).save_pretrained(home / "model")
        found = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "equality": list(equality(home))}
        OUT.write_text(json.dumps(found, indent=1) + "\n")


def equality(home: Path) -> Iterator[dict[str, Any]]:
    from safetensors.torch import load_file
    from warm_ranks import WarmRanks

    every = {**TRAINED, **PACKED, "max_grad_norm": CLIP, "router_aux_loss_coef": ROUTER}
    every |= {"train_file": home / "answers.jsonl", "model_name_or_path": home / "model"}

    warm = WarmRanks()
    trained = partial(run_of, home, warm, every)
    log, weights = trained(1, per_device_train_batch_size=GLOBAL_BATCH)
    before = load_file(home / "model/model.safetensors")
    largest_update = max(float((weights[name] - before[name]).abs().max()) for name in weights)
    for (ranks, size), stage, steps in product(SIZES, STAGES, ACCUMULATION):
        got, own = trained(
            ranks,
            deepspeed=f"zero{stage}",
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

| ranks | ranks that hold all experts | ZeRO stage | accumulation | loss | gradient norm | router loss | weights |
|---:|---:|---:|---:|---:|---:|---:|---:|"""
END = """
What this does not show: times, which on two cores say nothing about GPUs; NCCL; and half precision, where sums differ
in their last digits even without expert parallelism.
"""


def page(found: dict[str, Any]) -> str:
    rows, figures = found["equality"], (*FIGURES, "weights")
    words = {"date": found["date"], "versions": in_words(found["versions"]), "batch": GLOBAL_BATCH, "steps": STEPS}
    words |= {"router": ROUTER, "clip": CLIP, "norm": rows[0]["norm"], "update": rows[0]["of"]}
    lines = [HEAD.format(**words)]
    for row in rows:
        where = " | ".join(str(row[name]) for name in ("ranks", "size", "stage", "steps"))
        lines.append(f"| {where} | {' | '.join(f'{row[name]:.1e}' for name in figures)} |")
    worst = ", ".join(f"{name.replace('_', ' ')} {max(row[name] for row in rows):.1e}" for name in figures)
    lines.append(f"\nThe largest over {len(rows)} layouts: {worst}.")
    return "\n".join(lines) + "\n" + END


if __name__ == "__main__":
    main()
