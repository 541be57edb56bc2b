"""Train a causal language model: GPT-lite from scratch, or any pretrained model, in full or with LoRA.

    deepspeed --num_gpus 2 recipes/causal_lm.py           # small, offline, on Python's reference manual
    python recipes/causal_lm.py --config recipes/configs/gptlite_tinyshakespeare.yaml --train_file input.txt
    deepspeed --num_gpus 8 recipes/causal_lm.py --deepspeed zero3 --model_name_or_path FOLDER --train_file chats.jsonl

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. The run folder (--output_dir) then opens with
`pipeline("text-generation", folder)`.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.language import BlockArguments, CorpusArguments, SampleArguments
from finetune.run.recipes.causal_lm import CAUSAL_LM


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.causal_lm import prepare_corpus
    from finetune.generation.causal import AnsweringTrainer
    from finetune.models.chunked_loss import row_figures
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.language import language_source
    from finetune.training.results import write_language_report
    from finetune.training.samples import Samples
    from finetune.training.start import start
    from finetune.training.teachers import taught_language_model

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)

    # Data: the model's tokenizer, or one trained on the text. One rank prepares, the others wait.
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

    # Model: built after `start`, with an adapter, a chunked loss and a teacher if the flags ask for them.
    model, teacher = taught_language_model(session, source, data)

    # Train; evaluate the whole held-out text, each token once at any number of ranks, and answer its prompts if the
    # flags ask for that; then report.
    metrics = AnsweringTrainer.metrics_for(session, data)
    synced, seed = session.run.expert_parallel_size > 1, session.training.seed
    samples = Samples(session[SampleArguments], session.folder, seed, data.is_chat, synced=synced)
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
