"""Train a language model on preferences (DPO, IPO, KTO, ORPO, SimPO), or a reward model, in full or with LoRA.

    deepspeed --num_gpus 2 recipes/preference.py          # small, offline, on Python's docstrings against shuffled ones
    deepspeed --num_gpus 8 recipes/preference.py --deepspeed zero3 --model_name_or_path MODEL --train_file answers.jsonl
    python recipes/preference.py --loss reward --model_name_or_path MODEL --train_file answers.jsonl --output_dir reward

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. docs/preference.md describes the rows, and what each loss is for.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.preference import PREFERENCE, PreferenceArguments, PreferenceDataArguments


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.preferences import prepare_preferences
    from finetune.training.chapters import finish, trainer_of
    from finetune.training.loss import mean_loss
    from finetune.training.preference import PreferenceTrainer, preference_metrics
    from finetune.training.preference_model import preference_model, preference_source, write_preference_report
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)

    # Data: the model's tokenizer, or one trained on the text. One rank prepares, the others wait.
    source = preference_source(session)
    data = prepare_preferences(
        session[PreferenceDataArguments],
        session[PreparationArguments],
        source.tokenizer,
        loss=session[PreferenceArguments].loss,
        block_size=source.block_size,
        seed=session.training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
    )
    data.require_all(session.training)
    session.introduce(data.describe(), source.description)

    # Model: built after `start`, because ZeRO-3 shards it while it is built; and its metrics.
    model, reference = preference_model(session, source, data)

    # Train; evaluate the held-out pairs, each once at any number of ranks; then report.
    trainer = trainer_of(
        session,
        model,
        data,
        compute_metrics=preference_metrics(session),
        compute_loss=mean_loss,
        kind=PreferenceTrainer,
    )
    trainer.judge_by(session, reference, data)
    finish(
        session,
        trainer,
        samples=data.account.rows,
        report=lambda done: write_preference_report(session, data, source, trainer.answers),
    )


if __name__ == "__main__":
    run_recipe(PREFERENCE, main)
