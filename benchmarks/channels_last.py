"""A training step of image classifiers on pictures laid out pixel by pixel (channels last) and channel by channel.

    python benchmarks/channels_last.py            # about two minutes on two cores; pages.py makes the page

Only the batch's layout differs: convolutions pass it on. Each round times a step with each layout, in an order that
alternates; a row has the median of the ratios within one round. Writes docs/results/channels_last.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from releases import in_words, this_machine, versions

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "channels_last.json"
ROUNDS, WARM_ROUNDS = 15, 2
# Model, pixels per side, batch.
ROWS = (
    *(("ResNet-18", side, batch) for side, batch in ((32, 64), (64, 32), (96, 24), (128, 16), (160, 12), (224, 8))),
    *(("ResNet-50", side, batch) for side, batch in ((128, 12), (224, 4))),
    ("AlexNet", 224, 32),
    ("ViT, 12 layers of 192", 224, 8),
)


def built(name: str, side: int) -> Any:
    import transformers as hf

    from finetune.models.alexnet import AlexNetConfig, AlexNetForImageClassification
    from finetune.run.sizes import ALEXNET_SIZES, resnet_shape

    hf.set_seed(0)
    if name == "ResNet-18":
        return hf.ResNetForImageClassification(hf.ResNetConfig(**resnet_shape("resnet18"), num_labels=10))
    if name == "ResNet-50":
        return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10))
    if name == "AlexNet":
        return AlexNetForImageClassification(AlexNetConfig(**ALEXNET_SIZES["original"], num_labels=10))
    config = hf.ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=side, num_labels=10)
    return hf.ViTForImageClassification(config)


def measure(name: str, side: int, batch: int, precision: str) -> dict[str, Any]:
    """Seconds of a step with each layout, by round."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = built(name, side).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    first = torch.randn(batch, 3, side, side, device=device)
    pixels = {"first": first, "last": first.contiguous(memory_format=torch.channels_last)}
    labels = torch.randint(0, 10, (batch,), device=device)

    def step(layout: str) -> float:
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(pixel_values=pixels[layout], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    rounds = [
        {layout: step(layout) for layout in (("first", "last"), ("last", "first"))[number % 2]}
        for number in range(WARM_ROUNDS + ROUNDS)
    ]
    return {"model": name, "side": side, "batch": batch, "precision": precision, "rounds": rounds[WARM_ROUNDS:]}


def page(found: dict[str, Any]) -> str:
    """docs/results/channels_last.md"""
    head = ("model", "precision", "pixels", "batch", "channels first", "channels last", "times as fast")
    lines = []
    for row in found["rows"]:
        medians = [1e3 * statistics.median(one[layout] for one in row["rounds"]) for layout in ("first", "last")]
        ratios = sorted(one["first"] / one["last"] for one in row["rounds"])
        low, _, high = statistics.quantiles(ratios, n=4)
        cells = (row["model"], row["precision"], f"{row['side']} x {row['side']}", str(row["batch"]))
        times = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        lines.append((*cells, *(f"{one:.0f} ms" for one in medians), times))
    table = [" | ".join(cells) for cells in (head, ["---"] * 4 + ["---:"] * 3, *lines)]
    return f"""# Pictures with channels last

`python benchmarks/channels_last.py`, {found["machine"]}; {in_words(found["versions"])}.

A training step (forward, backward, fused AdamW) of image classifiers from scratch, with the batch laid out channel by
channel or pixel by pixel. Medians of {ROUNDS} rounds by turns; in parentheses the quartiles of the ratios within a
round. One run.

{chr(10).join(f"| {line} |" for line in table)}

`recipes/image_cls.py` lays pictures out pixel by pixel on a CPU from 128 pixels per side on, and on a GPU in 16 bits.
The latter is not measured here. PyTorch Image Models measured it: its ResNet-50 trains 1.47 times, and its ResNet-18
1.26 times as fast on an RTX 3090 with AMP (huggingface/pytorch-image-models, results, benchmark-train-amp-nhwc and
-nchw-pt112-cu113-rtx3090.csv: 1,218 against 826 and 3,482 against 2,764 images/s).

What this does not show: whole runs, with loading and augmentation; several processes; other CPUs.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = [measure(*row, precision) for precision in ("fp32", "bf16") for row in ROWS]
    found = {"rows": rows, "versions": versions(), "machine": this_machine()}
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
