"""Fine-tune a model that turns one text into another (summaries, translations), on one CPU core or on many GPUs.

    deepspeed --num_gpus 2 recipes/seq2seq.py           # small, offline: what functions of Python's own source do
    deepspeed --num_gpus 8 recipes/seq2seq.py --deepspeed zero3 --train_file news.jsonl --model_name_or_path FOLDER
    python recipes/seq2seq.py --model_name_or_path FOLDER --test_file new.jsonl --do_train False --do_predict True

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. The run folder (--output_dir) then opens with
`AutoModelForSeq2SeqLM.from_pretrained`. docs/seq2seq.md describes the columns, generation and metrics.
"""

from functools import partial

from finetune.entry.main import run_recipe
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.seq2seq import SEQ2SEQ, PairArguments


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.seq2seq import prepare_pairs
    from finetune.generation.seq2seq import PairTrainer, metrics_of_texts, pair_model, pair_source, write_pair_report
    from finetune.models.chunked_loss import row_figures
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.loss import token_loss
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)
    training = session.training

    # Data: the model's tokenizer, or one trained on the texts. One rank prepares, the others wait.
    source = pair_source(session)
    data = prepare_pairs(
        session[PairArguments],
        session[PreparationArguments],
        source.tokenizer,
        prefix=source.prefix,
        max_source_length=source.max_source_length,
        max_target_length=source.max_target_length,
        vocab_size=source.config.vocab_size,
        seed=training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
    )
    data.require_all(training)
    metrics = metrics_of_texts(session)
    session.introduce(data.describe(), source.description)

    # Model: built after `start`, because ZeRO-3 shards it while it is built.
    model, trained = pair_model(session, source, data)

    # Train; evaluate and predict on whole sets, each pair once at any number of ranks; then report.
    trainer = trainer_of(
        session,
        model,
        trained,
        compute_metrics=metrics,
        compute_loss=partial(token_loss, label_smoothing=training.label_smoothing_factor),
        preprocess_logits=row_figures,
        kind=PairTrainer,
    )
    trainer.judge_texts(session, source, metrics)
    finish(
        session,
        trainer,
        samples=data.account.rows,
        predict=lambda: trainer.predict_texts(data.splits["test"]),
        report=lambda done: write_pair_report(session, data, source, trainer, done),
    )


if __name__ == "__main__":
    run_recipe(SEQ2SEQ, main)
