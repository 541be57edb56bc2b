"""Train sentence embeddings on pairs, triplets, scored pairs or labeled texts, in full or with LoRA.

    deepspeed --num_gpus 2 recipes/embedding.py           # small, offline, on Python's docstrings and their functions
    deepspeed --num_gpus 8 recipes/embedding.py --model_name_or_path FOLDER --train_file pairs.jsonl \\
        --per_device_train_batch_size 64 --gradient_accumulation_steps 8      # negatives from all 4,096 pairs of a step

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. docs/embedding.md describes the rows and their losses. The run folder
opens with sentence-transformers and transformers.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.embedding import EMBEDDING, EmbeddingDataArguments


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.embedding import prepare_embedding
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.embedding import (
        EmbeddingTrainer,
        contrast_of,
        embedding_model,
        embedding_source,
        write_embedding_report,
    )
    from finetune.training.loss import mean_loss
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)

    # Data: the model's tokenizer, or one trained on the text. One rank prepares, the others wait.
    source = embedding_source(session)
    data = prepare_embedding(
        session[EmbeddingDataArguments],
        session[PreparationArguments],
        source.tokenizer,
        prompts=source.prompts,
        max_seq_length=source.max_seq_length,
        vocab_size=source.vocab_size,
        seed=session.training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
    )
    data.require_all(session.training)
    session.introduce(data.describe(), source.description)

    # Model: built after `start`, because ZeRO-3 shards it while it is built; and the loss on its vectors.
    model, contrast = embedding_model(session, source, data), contrast_of(session, data.labels.task)

    # Train; evaluate the held-out rows, each once at any number of ranks; then report.
    trainer = trainer_of(session, model, data, compute_metrics=None, compute_loss=mean_loss, kind=EmbeddingTrainer)
    trainer.compare_by(session, source, contrast)
    finish(
        session,
        trainer,
        samples=data.account.rows,
        predict=lambda: trainer.predict(data.splits["test"], metric_key_prefix="predict"),
        report=lambda done: write_embedding_report(session, data, source),
    )


if __name__ == "__main__":
    run_recipe(EMBEDDING, main)
