"""Train a GPT-lite as a pipeline: its layers in stages, a stage a rank, by DeepSpeed's pipeline engine.

    deepspeed --num_gpus 2 recipes/causal_lm_pipeline.py --pipeline_parallel_size 2     # small and offline
    deepspeed --num_gpus 8 recipes/causal_lm_pipeline.py --pipeline_parallel_size 4 --gradient_accumulation_steps 16
    python recipes/causal_lm.py --model_name_or_path runs/causal_lm_pipeline --do_train False    # evaluates it

The same model, data, losses, logs and run folder as recipes/causal_lm.py; more ranks than stages are more pipelines.
docs/pipeline.md says what moves between stages, and how to choose their number.
"""

import sys
from pathlib import Path

from finetune.data.causal_lm import BlockArguments, CorpusArguments, prepare_corpus
from finetune.models.causal import CausalModelArguments, find_causal_source, settled_config
from finetune.models.gptlite_pipeline import check_gptlite, gptlite_pipeline, pipeline_layers
from finetune.models.source import positions_of
from finetune.training.arguments import RunArguments
from finetune.training.guards.arguments import GuardArguments
from finetune.training.launch import run
from finetune.training.metrics import language_metrics, settle_language_arguments
from finetune.training.output_dir import check_same_model, open_output_dir
from finetune.training.pipeline.arguments import PipelineArguments
from finetune.training.pipeline.partition import describe, partition
from finetune.training.pipeline.stages import check_cut
from finetune.training.pipeline.trainer import PipelineTrainer
from finetune.training.profiling.arguments import ProfileArguments
from finetune.training.profiling.callback import profiling
from finetune.training.results import headline, write_language_report
from finetune.training.run_folder import MetricsFile, explained_disk_errors, write_json, write_records
from finetune.training.samples import SampleArguments, Samples, check_sample
from finetune.training.start import start
from finetune.training.trainer import early_stopping

DEFAULTS = {
    "output_dir": "runs/causal_lm_pipeline",
    "do_train": True,
    "do_eval": True,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,  # micro-batches that fill the pipeline; with one pipeline 32 blocks a step
    "per_device_eval_batch_size": 32,
    "num_train_epochs": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "logging_steps": 10,
    "report_to": ["none"],
}
# Those of recipes/causal_lm.py: the same model learns the same.
SCRATCH = {
    "learning_rate": 4e-3,
    "num_train_epochs": 8,
    "adam_beta2": 0.99,
    "warmup_steps": 0.05,
    "lr_scheduler_type": "cosine",
}


def main() -> None:
    # Start: parse, check the layout, settle the machine.
    text = (CorpusArguments, BlockArguments, SampleArguments)
    groups = (CausalModelArguments, PipelineArguments, *text, ProfileArguments, RunArguments, GuardArguments)
    session = start(groups, DEFAULTS, sys.argv[1:], scratch_defaults=SCRATCH)
    model_args, pipeline_args, corpus_args, block_args, sample_args, profile_args, run_args, guards = session.arguments
    training, folder, launch = session.training, Path(session.training.output_dir), session.launch
    settle_language_arguments(training, corpus_args, session.request.given)

    # Data: as in causal_lm.py. The first and the last stage of each pipeline read the same samples of it.
    source = find_causal_source(model_args, block_args.block_size)
    check_gptlite(source, model_args)
    check_cut(pipeline_layers(source.config, seed=None), pipeline_args.partition_method, session.request.stages)
    data = prepare_corpus(
        corpus_args,
        block_args,
        source.tokenizer,
        block_size=source.block_size,
        seed=training.seed,
        leads=launch.leads_its_node,
        reports=launch.leads_its_node or launch.local_rank == 1,
    )
    check_sample(data.tokenizer, sample_args, positions_of(source.config))
    session.say(data.account.headline(), f"model: {source.description}")
    collator = data.collator if block_args.packing == "none" else data.same_length_collator()

    # Model: a list of layers, of which each rank builds those of its stage.
    config = settled_config(model_args, source, data.tokenizer)
    check_same_model(session.checkpoint, config)
    model = gptlite_pipeline(config, seed=None if source.pretrained else training.seed)
    interval = run_args.activation_checkpoint_interval or 0
    rows = data.splits["train"]
    parts = partition(model, pipeline_args, training, launch, rows, collator, interval, session.checkpoint)
    session.say(*describe(parts))

    # Trainer
    trainer = PipelineTrainer(
        model,
        parts,
        args=training,
        ds_config=session.ds_config,
        launch=launch,
        train_dataset=rows,
        eval_dataset=data.splits["validation"],
        data_collator=collator,
        processing_class=data.tokenizer,
        compute_metrics=language_metrics(data.account.tokens_per_byte, data.account.tokens_per_character),
        callbacks=[MetricsFile(), *profiling(profile_args), *early_stopping(run_args)],
        lengths=data.lengths if run_args.group_by_length else None,
        dynamic=block_args.packing == "none",
        checkpoint_interval=interval,
        weights=Path(source.pretrained) if source.pretrained else None,
        schedule_step=pipeline_args.schedule_step,
        guards=guards,
    )

    with explained_disk_errors(folder):
        # Train, then save the model where `from_pretrained` looks for it.
        if launch.speaks:
            open_output_dir(session.request)
            write_records(folder, session.request.values, sys.argv[1:], launch)
        trained = trainer.train(resume_from_checkpoint=session.checkpoint)
        peaks = trainer.peak_memory_gib_per_rank()
        trainer.save_metrics("train", {**trained.metrics, "peak_memory_gib_per_rank": peaks})
        trainer.save_model()
        trainer.save_state()

        # Evaluate: the whole held-out text, each token once, through the pipeline.
        if training.do_eval:
            trainer.save_metrics("eval", trainer.evaluate())

        # Report
        if launch.speaks:
            write_json(folder / "ds_config.json", session.ds_config)
            samples = Samples(sample_args, folder, training.seed)
            samples.write_from_folder(trainer.state.global_step)
            note = f"Pipeline of {parts.stages} stage(s), cut by {pipeline_args.partition_method}."
            write_language_report(folder, data, source, samples.last, "recipes/causal_lm_pipeline.py", note)
            if samples.last:
                session.say("sample:", samples.last)
            session.say(headline(folder))


if __name__ == "__main__":
    run(main)
