"""The cost of a verified, flushed checkpoint, compared with the stock Trainer's; saves are interleaved.

    python benchmarks/saving.py                                    # three sizes, about two minutes on two cores
    python benchmarks/saving.py --layers 12 --width 768 --folder /mnt/disk    # one size, on this disk
    torchrun --nproc_per_node 2 benchmarks/saving.py               # DDP: hashing and flushing are shared by two ranks

Two Trainers train the same model for a few steps and then take turns saving it: the stock Trainer, and ours with its
manifest, hashes and flushes. A save of the stock Trainer ends while its bytes are still in memory; the disk writes them
while training continues. That time is not counted, which favors the stock Trainer. The overhead is the additional time
of our save, as a share of a stock run that saves every 100 steps.
Prints a Markdown table; --json FILE writes the figures to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.training.checkpoints.manifest import files_of, hash_of, read_manifest, write_manifest
from finetune.training.checkpoints.writing import flush
from finetune.training.trainer import FinetuneTrainer

SIZES = ((4, 256), (6, 512), (8, 768))  # layers and hidden size
VOCABULARY, CONTEXT, BATCH = 8192, 128, 8
STEPS, SAVE_STEPS = 8, 100
SAVES = 7  # per Trainer


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun)


class Tokens(torch.utils.data.Dataset):
    """Random tokens, as many as the steps take."""

    def __init__(self, count: int) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.rows = torch.randint(VOCABULARY, (count, CONTEXT), generator=drawn)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trained(kind: type[Trainer], layers: int, width: int, folder: Path) -> tuple[Trainer, float]:
    """A Trainer whose optimizer has its states, and its median seconds per step."""
    set_seed(0)
    heads = width // 64
    config = GPTLiteConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, hidden_size=width,
                           num_attention_heads=heads, max_position_embeddings=CONTEXT)  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, save_strategy="no", report_to=[],
        save_total_limit=2, disable_tqdm=True, logging_strategy="no", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    clock = Clock()
    rows = Tokens(BATCH * STEPS * int(os.environ.get("WORLD_SIZE", "1")))
    trainer = kind(model=GPTLiteForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[clock])
    trainer.train()
    return trainer, statistics.median(clock.seconds[1:])


def save(trainer: Trainer) -> float:
    """The seconds of a save, on the slowest rank."""
    trainer.state.global_step += 1
    if distributed.is_initialized():
        distributed.barrier()
    begun = time.perf_counter()
    trainer._save_checkpoint(trainer.model, trial=None)
    if distributed.is_initialized():
        distributed.barrier()
    return time.perf_counter() - begun


def parts(folder: Path) -> dict[str, float]:
    """Seconds of each thing that our save does beyond writing, on a checkpoint that is still in memory."""
    names = sorted(files_of(folder)[0])
    begun = time.perf_counter()
    for name in names:
        hash_of(folder / name)
    hashed = time.perf_counter()
    manifest = read_manifest(folder)
    write_manifest(folder, manifest)
    written = time.perf_counter()
    for name in names:  # rewritten files are not on the disk yet
        path = folder / name
        path.write_bytes(path.read_bytes())
    copied = time.perf_counter()
    for name in names:
        flush(folder / name)
    flush(folder)
    flush(folder.parent)
    return {"hash": hashed - begun, "manifest": written - hashed, "flush": time.perf_counter() - copied}


def measure(layers: int, width: int, folder: Path, saves: int) -> dict[str, Any]:
    stock, stock_step = trained(Trainer, layers, width, folder / "stock")
    ours, own_step = trained(FinetuneTrainer, layers, width, folder / "ours")
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for turn in range(saves + 1):
        pair = [("stock", stock), ("ours", ours)]
        for name, trainer in pair if turn % 2 else reversed(pair):
            took = save(trainer)
            if turn:  # the first save finds no earlier checkpoint
                seconds[name].append(took)
            os.sync()  # so that neither pays for the other's bytes
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    last = folder / "ours" / f"checkpoint-{ours.state.global_step}"
    found: dict[str, Any] = {}
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        found = parts(last)
    if distributed.is_initialized():
        distributed.barrier()
    size = sum(files_of(last)[0].values())
    step = min(stock_step, own_step)
    extra = medians["ours"] - medians["stock"]
    return {
        "parameters": sum(p.numel() for p in ours.model.parameters()),
        "checkpoint_bytes": size,
        "step_seconds": step,
        **{f"{name}_seconds": value for name, value in medians.items()},
        **{f"{name}_seconds": value for name, value in found.items()},
        "overhead": extra / (SAVE_STEPS * step + medians["stock"]),
        "saves": saves,
        "save_steps": SAVE_STEPS,
        "each_seconds": seconds,
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "parameters",
        "checkpoint",
        "step",
        "stock save",
        "toolkit's save",
        "of which hash",
        "flush",
        "manifest",
        "overhead",
    )
    lines = [" | ".join(head), " | ".join("---:" for _ in head)]
    for row in rows:
        cells = [f"{row['parameters'] / 1e6:.1f} M", f"{row['checkpoint_bytes'] / 2**20:.0f} MiB"]
        names = ("step", "stock", "ours", "hash", "flush", "manifest")
        cells += [f"{1e3 * row[f'{name}_seconds']:,.0f} ms" for name in names]
        lines.append(" | ".join([*cells, f"{row['overhead']:+.2%}"]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--layers", type=int)
    asked.add_argument("--width", type=int)
    asked.add_argument("--saves", type=int, default=SAVES)
    asked.add_argument("--folder", help="a folder on the disk to measure (default: the one for temporary files)")
    asked.add_argument("--json", metavar="FILE")
    given = asked.parse_args()
    sizes = ((given.layers, given.width),) if given.layers and given.width else SIZES
    rows = []
    speaks = os.environ.get("RANK", "0") == "0"
    place = Path(given.folder or tempfile.gettempdir()) / f"saving-{os.environ.get('MASTER_PORT', os.getpid())}"
    try:
        for layers, width in sizes:
            rows.append(measure(layers, width, place / f"{layers}x{width}", given.saves))
    finally:
        if speaks:
            shutil.rmtree(place, ignore_errors=True)
    if speaks:
        where = f"{os.environ.get('WORLD_SIZE', '1')} rank(s), {platform.machine()}, {os.cpu_count()} cores"
        run = f"overhead on a run that saves every {SAVE_STEPS} steps of {BATCH} x {CONTEXT} tokens per rank"
        print(f"{where}; medians of {given.saves} interleaved saves; {run}.\n\n{table(rows)}", flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
