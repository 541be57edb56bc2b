"""The Trainer of transformers with its own sequence parallelism, for benchmarks/sequence_parallel.py: two ranks share
each text, or one process reads all. `python stock_sequence_parallel.py MODEL ROWS OUTPUT SIZE MICRO STEPS` writes the
logged steps to OUTPUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.parallelism_config import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

MODEL, ROWS, OUTPUT = map(Path, sys.argv[1:4])
SIZE, MICRO, STEPS = map(int, sys.argv[4:])
LENGTH = 64
SGD = {"optim": "sgd", "learning_rate": 0.125, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad all rows to one length, as gloo requires of both ranks, and add positions for DeepSpeed's loader."""
    longest = LENGTH
    fill = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }
    return {**batch, "position_ids": torch.arange(longest).expand(len(rows), longest)}


def main() -> None:
    zero = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1e9}
    shared: dict[str, Any] = {}
    if SIZE > 1:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        attention = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        shared = {
            "deepspeed": {
                **zero,
                "gradient_accumulation_steps": "auto",
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
            "accelerator_config": {"use_configured_state": True},
            "parallelism_config": ParallelismConfig(sp_size=SIZE, sp_backend="deepspeed", sp_handler=attention),
        }
    args = TrainingArguments(
        output_dir=str(OUTPUT.with_suffix("")),
        use_cpu=True,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=STEPS,
        train_sampling_strategy="sequential",
        **SGD,
        **shared,
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
    trainer.train()
    if args.process_index == 0:
        OUTPUT.write_text(json.dumps([row for row in trainer.state.log_history if "loss" in row]))


if __name__ == "__main__":
    main()
