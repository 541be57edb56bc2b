"""Fine-tune a token classifier (named entities and the like), on one CPU core or on many GPUs.

    deepspeed --num_gpus 2 recipes/token_cls.py         # small, offline: what the names in Python's own source are
    deepspeed --num_gpus 8 recipes/token_cls.py --deepspeed zero3 --train_file train.conll --model_name_or_path FOLDER
    python recipes/token_cls.py --train_file train.jsonl --test_file new.jsonl --do_predict True

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. The run folder (--output_dir) then opens with
`pipeline("token-classification", folder, aggregation_strategy="simple")`. docs/token_cls.md describes the files.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.text import PreparationArguments, TokenDataArguments
from finetune.run.recipes.token_cls import TOKEN_CLS


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.classification import prepare
    from finetune.data.token_labels import SENTENCES
    from finetune.data.word_tokens import not_scored
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.classifiers import text_classifier, text_source
    from finetune.training.entities import kept_of_tokens, write_entity_report
    from finetune.training.metrics import metrics_of_run
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)
    training = session.training

    # Data: the model's tokenizer, or one trained on the words. One rank prepares, the others wait.
    source = text_source(session, session[TokenDataArguments].max_seq_length)
    data = prepare(
        session[TokenDataArguments],
        session[PreparationArguments],
        source.tokenizer,
        max_seq_length=source.max_seq_length,
        vocab_size=source.vocab_size,
        seed=training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
        trained=source.labels,
        kind=SENTENCES,
    )
    data.require_all(training)
    metrics = metrics_of_run(session, data.labels, source)
    session.introduce(data.describe(), source.description)

    # Model: built after `start`, because ZeRO-3 shards it while it is built.
    model, loss = text_classifier(session, source, data)

    # Train; evaluate and predict on whole sets, each sentence once at any number of ranks; then report.
    trainer = trainer_of(
        session, model, data, compute_metrics=metrics, compute_loss=loss, preprocess_logits=kept_of_tokens
    )
    finish(
        session,
        trainer,
        samples=data.account.rows,
        counts=not_scored(data.account),
        predict=lambda: trainer.predict_in_input_order(data.splits["test"]),
        report=lambda done: write_entity_report(session, data, source, metrics, done.evaluated, done.predicted),
    )


if __name__ == "__main__":
    run_recipe(TOKEN_CLS, main)
