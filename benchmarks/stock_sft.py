"""The peer of recipes/causal_lm.py on chats: TRL's SFTTrainer, as its documentation has it, with packing.

It does what such scripts do, plus a clock, with one setting in its favor: no gradient checkpointing, which TRL enables
by default (`--gradient_checkpointing` here) and the recipe does not. `--loss_type chunked_nll` is TRL's own chunked
loss.

    python benchmarks/stock_sft.py --model FOLDER --train_file chats.jsonl --result out.json [--use_peft]
"""

import argparse

import torch
from clock import Clock
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--loss_type", default="nll")
    parser.add_argument("--use_peft", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    options = parser.parse_args()

    on_gpu, clock = torch.cuda.is_available(), Clock()
    arguments = SFTConfig(
        output_dir=options.result + ".out",
        packing=True,
        packing_strategy="wrapped",
        max_length=options.block_size,
        assistant_only_loss=True,
        loss_type=options.loss_type,
        per_device_train_batch_size=options.batch,
        max_steps=options.max_steps,
        learning_rate=1e-4,
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=options.bf16,
        use_cpu=not on_gpu,
        save_strategy="no",
        logging_steps=10,
        report_to="none",
    )
    # The base model as the recipe holds it: fp32 where all is trained, bf16 where an adapter is and the run is in bf16.
    dtype = torch.bfloat16 if options.use_peft and options.bf16 else torch.float32
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        args=arguments,
        train_dataset=load_dataset("json", data_files=options.train_file, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if options.use_peft else None,
        callbacks=[clock],
    )
    trainer.train()
    clock.write(options.result, losses=[row["loss"] for row in trainer.state.log_history if "loss" in row])


if __name__ == "__main__":
    main()
