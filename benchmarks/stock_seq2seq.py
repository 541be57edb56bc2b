"""The peer of recipes/seq2seq.py: transformers' Seq2SeqTrainer, as its run_summarization.py calls it.

python benchmarks/stock_seq2seq.py --model FOLDER --train_file pairs.jsonl --result out.json --out FOLDER
"""

import argparse

import torch
from clock import Clock
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "train_file", "result", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("batch", 16), ("source", 128), ("target", 32), ("max_steps", 20), ("seed", 42)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(options.model),
        AutoTokenizer.from_pretrained(options.model),
    )
    rows = load_dataset("json", data_files=options.train_file, split="train")

    def tokenized(some):
        made = tokenizer(some["source"], max_length=options.source, truncation=True)
        made["labels"] = tokenizer(text_target=some["target"], max_length=options.target, truncation=True)["input_ids"]
        return made

    clock = Clock()
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=options.batch,
            max_steps=options.max_steps,
            learning_rate=options.learning_rate,
            warmup_steps=0.1,
            seed=options.seed,
            bf16=options.bf16,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows.map(tokenized, batched=True, remove_columns=rows.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model()
    clock.write(options.result)


if __name__ == "__main__":
    main()
