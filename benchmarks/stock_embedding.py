"""The peer of recipes/embedding.py: sentence-transformers' trainer on pairs, as in its documentation.

With --mini_batch, a batch is embedded in parts: CachedMultipleNegativesRankingLoss (GradCache).

    python benchmarks/stock_embedding.py --model FOLDER --train_file pairs.jsonl --result out.json --out FOLDER
"""

import argparse

import torch
from clock import Clock
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "train_file", "result", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("batch", 64), ("mini_batch", 0), ("max_seq_length", 64), ("max_steps", 20), ("seed", 42)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    on_gpu, clock = torch.cuda.is_available(), Clock()
    model = SentenceTransformer(options.model, device=None if on_gpu else "cpu")
    model.max_seq_length = options.max_seq_length
    loss = MultipleNegativesRankingLoss(model)
    if options.mini_batch:
        loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=options.mini_batch)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=options.batch,
            max_steps=options.max_steps,
            learning_rate=options.learning_rate,
            warmup_steps=0.1,
            seed=options.seed,
            bf16=options.bf16,
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=options.train_file, split="train"),
        loss=loss,
        callbacks=[clock],
    )
    trainer.train()
    model.save_pretrained(options.out)
    clock.write(options.result)


if __name__ == "__main__":
    main()
