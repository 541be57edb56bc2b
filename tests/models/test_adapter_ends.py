"""An adapter of a model without a chat template brings the tokens that end its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from finetune.models.adapters import with_adapter
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.task import TEXT_GENERATION
from finetune.training.trainer import FinetuneTrainer

SHAPE = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def base() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=2))


def test_added_ends_are_saved_with_the_adapter_and_opened_with_it(tmp_path: Path) -> None:
    model = with_adapter(base(), AdapterArguments(use_peft=True), None, TEXT_GENERATION.adapter)
    model.generation_config.eos_token_id = [2, 7]
    ids = list(range(8))
    trainer = FinetuneTrainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True),
        train_dataset=Dataset.from_dict({"input_ids": [ids], "labels": [ids]}),
    )
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        opened = with_adapter(base(), AdapterArguments(), folder, TEXT_GENERATION.adapter)
        assert opened.generation_config.eos_token_id == [2, 7]
        assert opened.merge_and_unload().generation_config.eos_token_id == [2, 7]
