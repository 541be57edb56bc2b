"""Fine-tune a model that finds the answer to a question in a text, on one CPU core or on many GPUs.

    deepspeed --num_gpus 2 recipes/question_answering.py   # small, offline: questions about Python's own functions
    deepspeed --num_gpus 8 recipes/question_answering.py --deepspeed zero3 --train_file train-v1.1.json \\
        --validation_file dev-v1.1.json --model_name_or_path FOLDER --max_seq_length 384 --doc_stride 128
    python recipes/question_answering.py --model_name_or_path FOLDER --test_file new.jsonl --do_train False \\
        --do_predict True

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. The run folder (--output_dir) then opens with
`AutoModelForQuestionAnswering.from_pretrained`. docs/question_answering.md describes the rows, and how to ask.
"""

from functools import partial

from finetune.entry.main import run_recipe
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.question_answering import QUESTION_ANSWERING, QuestionDataArguments


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.question_answering import prepare_questions
    from finetune.training.answers import (
        AnswerTrainer,
        both_scores,
        metrics_of_answers,
        span_loss,
        span_model,
        write_answer_report,
    )
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.classifiers import text_source
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)
    training = session.training

    # Data: the model's tokenizer, or one trained on the text. One rank prepares, the others wait.
    source = text_source(session, session[QuestionDataArguments].max_seq_length)
    data = prepare_questions(
        session[QuestionDataArguments],
        session[PreparationArguments],
        source.tokenizer,
        max_seq_length=source.max_seq_length,
        vocab_size=source.vocab_size,
        seed=training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
    )
    data.require_all(training)
    metrics = metrics_of_answers(session)
    session.introduce(data.describe(), source.description)

    # Model: built after `start`, because ZeRO-3 shards it while it is built.
    model = span_model(session, source, data)

    # Train; evaluate and predict on whole sets, each question once at any number of ranks; then report.
    trainer = trainer_of(
        session,
        model,
        data,
        compute_metrics=metrics,
        compute_loss=partial(span_loss, label_smoothing=training.label_smoothing_factor),
        preprocess_logits=both_scores,
        kind=AnswerTrainer,
    )
    trainer.judge_answers(session, source, metrics)
    finish(
        session,
        trainer,
        samples=data.account.rows,
        predict=lambda: trainer.predict_in_input_order(data.splits["test"]),
        report=lambda done: write_answer_report(session, data, source, trainer),
    )


if __name__ == "__main__":
    run_recipe(QUESTION_ANSWERING, main)
