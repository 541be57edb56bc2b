"""The peer of benchmarks/faults.py: the plain Trainer with DeepSpeed, resuming as in tutorials.

It uses no code of the toolkit. Its data and model are random, so that only training takes time. Without a GPU, it sets
Accelerate's backend; otherwise the Trainer and DeepSpeed do not start on a CPU.

    torchrun --nproc_per_node 2 benchmarks/stock_resume.py FOLDER --max_steps 60 --save_steps 3
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"
ROWS, TOKENS, VOCABULARY = 80, 24, 8000


class Metrics(TrainerCallback):
    """Writes each logged row to a file, and prints where training begins."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(f"going on from step {state.global_step}", flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with Path(args.output_dir, "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs, "time": time.time()}) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--save_steps", type=int, default=3)
    parser.add_argument("--deepspeed", default="zero2", help="a shipped name")
    options = parser.parse_args()

    state = {}
    if not torch.cuda.is_available():
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        state = {"accelerator_config": {"use_configured_state": True}}
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.max_steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=str(CONFIGS / f"{options.deepspeed}.json"),
        disable_tqdm=True,
        report_to="none",
        **state,
    )
    set_seed(42)
    generator = torch.Generator().manual_seed(42)
    rows = [
        {
            "input_ids": torch.randint(5, VOCABULARY, (TOKENS,), generator=generator),
            "labels": torch.randint(0, 2, (), generator=generator),
        }
        for _ in range(ROWS)
    ]
    config = DistilBertConfig(n_layers=2, dim=128, n_heads=2, hidden_dim=512, vocab_size=VOCABULARY, num_labels=2)
    model = DistilBertForSequenceClassification(config)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Metrics()])
    trainer.train(resume_from_checkpoint=any(options.folder.glob("checkpoint-*")))
    trainer.save_model()


if __name__ == "__main__":
    main()
