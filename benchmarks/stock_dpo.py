"""The peer of recipes/preference.py: TRL's DPOTrainer on prompts with a chosen and a rejected answer.

It has one setting in its favor: no gradient checkpointing, which TRL enables by default and the recipe does not.

    python benchmarks/stock_dpo.py --model FOLDER --train_file pairs.jsonl --result out.json --out FOLDER [--precompute]
"""

import argparse

import torch
from clock import Clock
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "train_file", "result", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("batch", 8), ("block_size", 256), ("max_steps", 20), ("seed", 42)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--precompute", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    clock = Clock()
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=DPOConfig(
            output_dir=options.out,
            per_device_train_batch_size=options.batch,
            max_length=options.block_size,
            max_steps=options.max_steps,
            learning_rate=options.learning_rate,
            warmup_steps=0.1,
            precompute_ref_log_probs=options.precompute,
            gradient_checkpointing=False,
            seed=options.seed,
            bf16=options.bf16,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        train_dataset=load_dataset("json", data_files=options.train_file, split="train"),
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model()
    clock.write(options.result)


if __name__ == "__main__":
    main()
