"""Train a causal language model: GPT-lite from scratch, or any pretrained one, in full or by LoRA.

    deepspeed --num_gpus 2 recipes/causal_lm.py           # small, offline, on Python's reference manual
    python recipes/causal_lm.py --config recipes/configs/gptlite_tinyshakespeare.yaml --train_file input.txt
    deepspeed --num_gpus 8 recipes/causal_lm.py --deepspeed zero3 --model_name_or_path FOLDER --train_file chats.jsonl

Plain `python`, `torchrun` and `accelerate launch` start it as well. Every flag of the Trainer's TrainingArguments is
taken, too; `--help` lists all. The run folder (--output_dir) then opens with `pipeline("text-generation", folder)`.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.language import BlockArguments, CorpusArguments, SampleArguments
from finetune.run.recipes.causal_lm import CAUSAL_LM


def main(run):
    # Heavy imports come after the command line has been understood, so that --help and mistakes cost no time.
    from finetune.data.causal_lm import prepare_corpus
    from finetune.generation.causal import AnsweringTrainer
    from finetune.models.chunked_loss import row_figures
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.language import language_source
    from finetune.training.results import write_language_report
    from finetune.training.samples import Samples
    from finetune.training.start import start
    from finetune.training.teachers import taught_language_model

    # Start: the machine is settled, the ranks meet, the config is checked.
    session = start(run)

    # Data: the model's tokenizer, or one made from the text. One rank prepares, the others wait.
    source = language_source(session)
    data = prepare_corpus(
        session[CorpusArguments],
        session[BlockArguments],
        source.tokenizer,
        block_size=source.block_size,
        seed=session.training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
    )

    # Model: built after `start`, with its adapter and its loss in chunks, where these are asked for; and a teacher.
    model, teacher = taught_language_model(session, source, data)

    # Train, evaluate the whole held-out text, each token once, whatever the number of ranks, and answer its prompts
    # where that is asked for; then report.
    metrics = AnsweringTrainer.metrics_for(session, data)
    samples = Samples(session[SampleArguments], session.folder, session.training.seed, data.is_chat)
    trainer = trainer_of(
        session,
        model,
        data,
        compute_metrics=metrics,
        preprocess_logits=row_figures,
        callbacks=[samples],
        kind=AnsweringTrainer,
        teacher=teacher,
    )
    trainer.judge_answers(session, source, data, metrics)
    finish(
        session,
        trainer,
        report=lambda done: write_language_report(
            session, data, source, samples, tables=trainer.write_answers(session)
        ),
    )


if __name__ == "__main__":
    run_recipe(CAUSAL_LM, main)
