"""Fine-tune a text classifier, with one or several labels per text, or a regressor, on one CPU core or on many GPUs.

    deepspeed --num_gpus 2 recipes/seq_cls.py           # small, offline, on built-in text
    deepspeed --num_gpus 8 recipes/seq_cls.py --deepspeed zero3 --train_file reviews.csv --model_name_or_path FOLDER
    python recipes/seq_cls.py --config recipes/configs/seq_cls_imdb.yaml --max_train_samples 2000

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. The run folder (--output_dir) then opens with
`pipeline("text-classification", folder)`.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.text import DataArguments, PreparationArguments
from finetune.run.recipes.seq_cls import SEQ_CLS


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.classification import TEXTS, prepare
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.classifiers import text_classifier, text_source
    from finetune.training.metrics import metrics_of_run, settle_thresholds
    from finetune.training.results import write_report
    from finetune.training.start import start
    from finetune.training.teachers import classifier_teacher

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)
    training = session.training

    # Data: the model's tokenizer, or one trained on the text. One rank prepares, the others wait.
    source = text_source(session, session[DataArguments].max_seq_length)
    data = prepare(
        session[DataArguments],
        session[PreparationArguments],
        source.tokenizer,
        max_seq_length=source.max_seq_length,
        vocab_size=source.vocab_size,
        seed=training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
        trained=source.labels,
        kind=TEXTS,
    )
    data.require_all(training)
    metrics = metrics_of_run(session, data.labels, source)
    session.introduce(data.describe(), source.description)

    # Model: built after `start`, because ZeRO-3 shards it while it is built; and the teacher, if there is one.
    model, loss = text_classifier(session, source, data)
    teacher, loss = classifier_teacher(session, source, data, loss)

    # Train; evaluate and predict on whole sets, each row once at any number of ranks; then report.
    trainer = trainer_of(session, model, data, compute_metrics=metrics, compute_loss=loss, teacher=teacher)
    finish(
        session,
        trainer,
        samples=data.account.rows,
        settle=lambda evaluated: settle_thresholds(session, metrics, evaluated),
        predict=lambda: trainer.predict_in_input_order(data.splits["test"]),
        report=lambda done: write_report(session, data, source, metrics, done.evaluated, done.predicted),
    )


if __name__ == "__main__":
    run_recipe(SEQ_CLS, main)
