"""One of two ranks, for test_touched_rows.py: `torchrun --nproc_per_node 2 touched_rows_run.py FOLDER`. It trains a
small classifier under DDP twice, with all rows of its embedding sent and with the touched ones alone, and writes what
each run logged and its weights to FOLDER/RANK.result."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import DistilBertConfig, DistilBertForSequenceClassification, TrainingArguments, set_seed

from finetune.training import touched_rows
from finetune.training.trainer import FinetuneTrainer

WORDS, WIDTH, STEPS = 600, 16, 4


def rows() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (STEPS * 16, 9), generator=draw)
    return [{"input_ids": one, "attention_mask": torch.ones_like(one), "labels": int(one[0] % 2)} for one in ids]


def trained(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What was logged of the steps, and the weights at the end."""
    set_seed(0)
    sizes = {"dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16}
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    trainer = FinetuneTrainer(
        DistilBertForSequenceClassification(DistilBertConfig(vocab_size=WORDS, **sizes)),
        TrainingArguments(str(folder), learning_rate=1e-2, **batches, **quiet),
        train_dataset=rows(),
    )
    trainer.train()
    names = ("loss", "grad_norm")
    logged = [{name: row[name] for name in names} for row in trainer.state.log_history if "loss" in row]
    return logged, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def main() -> None:
    folder, real, means = Path(sys.argv[1]), touched_rows._mean_of_rows, [0]

    def counted(table: torch.Tensor, ranks: int) -> None:
        means[0] += 1
        real(table, ranks)

    touched_rows._mean_of_rows = counted
    whole = trained(folder)
    assert means == [0], "the table is too small to be worth it"
    touched_rows.WORTH_ELEMENTS = WORDS * WIDTH
    torch.save({"whole": whole, "touched": trained(folder), "times": means[0]}, folder / f"{os.environ['RANK']}.result")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
