"""Train a GPT-lite with DeepSpeed's pipeline engine: its layers are split into stages, one stage per rank.

    deepspeed --num_gpus 2 recipes/causal_lm_pipeline.py --pipeline_parallel_size 2     # small and offline
    deepspeed --num_gpus 8 recipes/causal_lm_pipeline.py --pipeline_parallel_size 4 --gradient_accumulation_steps 16
    python recipes/causal_lm.py --model_name_or_path runs/causal_lm_pipeline --do_train False    # evaluate it

Model, data, losses, logs and run folder are the same as with recipes/causal_lm.py. If there are more ranks than
stages, several pipelines run side by side. docs/pipeline.md explains what moves between stages, and how many to use.
"""

from pathlib import Path

from finetune.entry.main import run_recipe
from finetune.run.flags.language import BlockArguments, CorpusArguments, SampleArguments
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.causal_lm import prepare_corpus
    from finetune.training.chapters import finish, pipeline_of
    from finetune.training.language import language_pipeline, language_source
    from finetune.training.metrics import language_metrics
    from finetune.training.results import write_language_report
    from finetune.training.samples import Samples
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the layout.
    session = start(run)

    # Data: as in causal_lm.py. The first and the last stage of each pipeline read the same samples.
    source = language_source(session)
    blocks = session[BlockArguments]
    data = prepare_corpus(
        session[CorpusArguments],
        blocks,
        source.tokenizer,
        block_size=source.block_size,
        seed=session.training.seed,
        launch=session.launch,
        kept=session.kept_tokenizer(),
    )

    # Model: a list of layers. Each rank builds the layers of its own stage.
    is_dynamic = blocks.packing == "none"
    trainer = pipeline_of(
        session,
        language_pipeline(session, source, data),
        data,
        compute_metrics=language_metrics(*data.account.rates),
        weights=Path(source.pretrained) if source.pretrained else None,
        collator=data.collator if is_dynamic else data.same_length_collator(),
        dynamic=is_dynamic,
    )

    # Train and evaluate through the pipeline, each token once. No rank has the whole model, so the sample comes last.
    samples = Samples(session[SampleArguments], session.folder, session.training.seed, data.is_chat)

    def report(done):
        samples.write_from_folder(trainer.state.global_step)
        note = f"Pipeline of {trainer.parts.stages} stage(s), cut by {run.value('partition_method')}"
        return write_language_report(session, data, source, samples, note)

    finish(session, trainer, report=report)


if __name__ == "__main__":
    run_recipe(CAUSAL_LM_PIPELINE, main)
