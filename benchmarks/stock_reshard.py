"""The moves of benchmarks/reshard.py with the plain Hugging Face Trainer and DeepSpeed, without this toolkit.
benchmarks/reshard.py runs this script and reads the JSON that it prints.

    torchrun --nproc_per_node 2 benchmarks/stock_reshard.py '[{"folder": "runs/a", "stage": 3}]'
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.update(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")  # otherwise the Trainer sees one rank

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import distributed
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

STEPS, SAVE_STEPS, GLOBAL_BATCH, MICRO_BATCH = 14, 4, 16, 2


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count modulo 97 from any start: the loss falls, and gradients do not vanish."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(32) * (1 + index % 7) + index) % 97
        return {"input_ids": ids, "labels": ids}


def train(folder: str, stage: int, resume: str | None = None, universal: bool = False) -> list[dict[str, float]]:
    """The logged steps."""
    torch.manual_seed(0)
    ranks = distributed.get_world_size()
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    config: dict[str, Any] = {**auto, "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": stage}}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    path = Path(tempfile.mkdtemp()) / "ds.json"
    path.write_text(json.dumps(config))
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=str(path),
        accelerator_config={"use_configured_state": True},
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=GLOBAL_BATCH // MICRO_BATCH // ranks,
        learning_rate=3e-3,
        warmup_steps=2,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=SAVE_STEPS,
        report_to=[],
        disable_tqdm=True,
    )
    zeros = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=2, **zeros))
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=resume)
    return [row for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    for run in json.loads(sys.argv[1]):
        gc.collect()
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        try:
            found: dict[str, Any] = {"steps": train(**run)}
        except Exception as error:
            words = (str(error).strip().splitlines() or ["(no message)"])[0]
            found = {"error": f"{type(error).__name__}: {words[:160]}"}
        if distributed.get_rank() == 0:
            print(json.dumps({**run, **found}), flush=True)
        distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
