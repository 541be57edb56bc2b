r"""The peers of recipes/seq_cls.py: the plain Trainer as tutorials write it, and the plain Trainer at its best.

It does what such scripts do, with three additions: it reads the benchmark's files; it counts real tokens and step times
as the recipe does; and without a GPU, it sets Accelerate's backend, without which the Trainer and DeepSpeed do not
start on a CPU.

    deepspeed --num_gpus 2 benchmarks/stock_seq_cls.py --model FOLDER --train_file a.tsv --padding max \
        --deepspeed zero2_offload --result out.json
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"


class Clock(TrainerCallback):
    """Step times of this rank, and the tokens of its batches, counted in the collator."""

    def __init__(self, collate):
        self.collate, self.real, self.padded = collate, [], []
        self.times, self.mark = [], None

    def __call__(self, rows):
        batch = self.collate(rows)
        self.real.append(int(batch["attention_mask"].sum()))
        self.padded.append(batch["input_ids"].numel())
        return batch

    def on_step_begin(self, args, state, control, **kwargs):
        self.mark = self.mark or time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.times.append(now - self.mark)
        self.mark = now


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file")
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--padding", choices=["max", "dynamic"], default="dynamic")
    parser.add_argument("--grouped", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--torch_compile", action="store_true")
    parser.add_argument("--deepspeed", help="a shipped name")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--warmup_steps_left_out", type=int, default=3)
    parser.add_argument("--result", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()

    state = {}
    if options.deepspeed and not torch.cuda.is_available():
        from accelerate import PartialState

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        state = {"accelerator_config": {"use_configured_state": True}}
    arguments = TrainingArguments(
        output_dir=options.result + ".out",
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=32,
        max_steps=options.max_steps,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        seed=options.seed,
        bf16=options.bf16,
        torch_compile=options.torch_compile,
        use_cpu=not torch.cuda.is_available(),
        train_sampling_strategy="group_by_length" if options.grouped else "random",
        deepspeed=str(CONFIGS / f"{options.deepspeed}.json") if options.deepspeed else None,
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        **state,
    )
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def encode(rows):
        padding = "max_length" if options.padding == "max" else False
        return tokenizer(rows["text"], truncation=True, max_length=options.max_length, padding=padding)

    def table(path):
        rows = load_dataset("csv", data_files=path, sep="\t", quoting=3, names=["text", "label"], header=None)["train"]
        return rows.map(encode, batched=True, remove_columns=["text"])

    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    clock = Clock(default_data_collator if options.padding == "max" else DataCollatorWithPadding(tokenizer))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=table(options.train_file),
        eval_dataset=table(options.validation_file) if options.validation_file else None,
        processing_class=tokenizer,
        data_collator=clock,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[clock],
    )
    trainer.train()
    steps, skip = len(clock.times), options.warmup_steps_left_out
    counts = torch.tensor(
        [sum(clock.real[skip:steps]), sum(clock.padded[skip:steps])], dtype=torch.float32, device=arguments.device
    )
    real, padded = trainer.accelerator.reduce(counts, reduction="sum").tolist()
    accuracy = trainer.evaluate()["eval_accuracy"] if options.validation_file else None
    if trainer.is_world_process_zero():
        seconds = sum(clock.times[skip:])
        figures = {
            "real_tokens_per_second": real / seconds,
            "padding_share": 1 - real / padded,
            "samples_per_second": options.batch * arguments.world_size * (steps - skip) / seconds,
            "eval_accuracy": accuracy,
        }
        Path(options.result).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
