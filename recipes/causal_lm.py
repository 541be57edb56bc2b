"""Train a causal language model: GPT-lite from scratch, or any pretrained one, in full or by LoRA.

    deepspeed --num_gpus 2 recipes/causal_lm.py           # small, offline, on Python's reference manual
    python recipes/causal_lm.py --config recipes/configs/gptlite_tinyshakespeare.yaml --train_file input.txt
    deepspeed --num_gpus 8 recipes/causal_lm.py --deepspeed zero3 --model_name_or_path FOLDER --train_file chats.jsonl

Plain `python`, `torchrun` and `accelerate launch` start it as well. Every flag of the Trainer's TrainingArguments is
taken, too; `--help` lists all. The run folder (--output_dir) then opens with `pipeline("text-generation", folder)`.
"""

import sys
from pathlib import Path

from finetune.data.causal_lm import BlockArguments, CorpusArguments, prepare_corpus
from finetune.models.adapters import AdapterArguments, add_adapter, check_adapter, write_merged
from finetune.models.causal import CausalModelArguments, build_causal_lm, find_causal_source
from finetune.models.chunked_loss import choose_chunk_tokens, row_figures, use_chunked_loss
from finetune.models.document_mask import check_document_mask
from finetune.models.source import positions_of
from finetune.training.arguments import RunArguments
from finetune.training.comm_hooks.arguments import CompressionArguments
from finetune.training.guards.arguments import GuardArguments
from finetune.training.hub import push
from finetune.training.launch import run
from finetune.training.loss import settle_loss_scaling
from finetune.training.metrics import language_metrics, settle_language_arguments
from finetune.training.output_dir import check_same_model, open_output_dir
from finetune.training.profiling.arguments import ProfileArguments
from finetune.training.profiling.callback import profiling
from finetune.training.results import headline, write_language_report
from finetune.training.run_folder import MetricsFile, explained_disk_errors, write_ds_config, write_records
from finetune.training.samples import SampleArguments, Samples, check_sample
from finetune.training.start import start
from finetune.training.trainer import FinetuneTrainer, early_stopping

DEFAULTS = {
    "output_dir": "runs/causal_lm",
    "do_train": True,
    "do_eval": True,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "num_train_epochs": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "logging_steps": 10,
    "report_to": ["none"],
    "logging_nan_inf_filter": False,  # a loss that is no number is to be seen; looking costs a GPU a stop every step
    "remove_unused_columns": False,  # labels come shifted, under a name that no model's signature has
}
# A model from scratch wants a higher rate and more rounds than a pretrained one; the rate is for the size `tiny`.
SCRATCH = {
    "learning_rate": 4e-3,
    "num_train_epochs": 8,
    "adam_beta2": 0.99,  # few tokens a step: the usual 0.999 would remember too long
    "warmup_steps": 0.05,
    "lr_scheduler_type": "cosine",
    "ddp_find_unused_parameters": False,  # a GPT-lite uses all it has
}


def main() -> None:
    # Start: parse, check, settle the machine. What is wrong with the request is said here or in the next two chapters.
    groups = (CausalModelArguments, AdapterArguments, CorpusArguments, BlockArguments, SampleArguments)
    engine = (ProfileArguments, RunArguments, CompressionArguments, GuardArguments)
    session = start((*groups, *engine), DEFAULTS, sys.argv[1:], scratch_defaults=SCRATCH)
    model_args, adapter_args, *text_args, profile_args, run_args, comm_args, guards = session.arguments
    corpus_args, block_args, sample_args = text_args
    training, folder = session.training, Path(session.training.output_dir)
    settle_language_arguments(training, corpus_args, session.request.given)

    # Data: the model's tokenizer, or one made from the text. One rank prepares, the others wait.
    source = find_causal_source(model_args, block_args.block_size)
    check_adapter(adapter_args, source.pretrained, model_args.resize_embeddings, session.shards_weights)
    data = prepare_corpus(
        corpus_args,
        block_args,
        source.tokenizer,
        block_size=source.block_size,
        seed=training.seed,
        leads=session.launch.leads_its_node,
        reports=session.launch.leads_its_node or session.launch.local_rank == 1,
    )
    check_sample(data.tokenizer, sample_args, positions_of(source.config))
    other = "" if source.pretrained else "; --model_name_or_path takes any other"
    session.say(data.account.headline(), f"model: {source.description}{other}")

    # Model: built after TrainingArguments, for ZeRO-3 shards pretrained weights while they are read. From scratch each
    # rank draws them whole, so that they are the same under every stage.
    model = build_causal_lm(model_args, source, data.tokenizer, training.seed, adapter_args.load_in_4bit)
    chunk = choose_chunk_tokens(model_args.loss_chunk_tokens, model, training.device.type)
    if chunk:
        model.accepts_loss_kwargs = True  # see use_chunked_loss
    else:
        settle_loss_scaling(model, label_per_token=True)
    if block_args.document_mask and session.launch.speaks:
        check_document_mask(model, max(training.train_batch_size, training.eval_batch_size))
    if adapter_args.use_peft:
        model = add_adapter(model, adapter_args)
    if chunk:
        use_chunked_loss(model, chunk)
    check_same_model(session.checkpoint, model.config)

    # Trainer
    samples = Samples(sample_args, folder, training.seed)
    callbacks = [MetricsFile(), samples, *profiling(profile_args), *early_stopping(run_args)]
    trainer = FinetuneTrainer(
        model=model,
        args=training,
        train_dataset=data.splits["train"],
        eval_dataset=data.splits["validation"],
        processing_class=data.tokenizer,
        data_collator=data.collator,
        compute_metrics=language_metrics(data.account.tokens_per_byte, data.account.tokens_per_character),
        preprocess_logits_for_metrics=row_figures,
        callbacks=callbacks,
        lengths=data.lengths if run_args.group_by_length else None,
        compression=comm_args,
        guards=guards,
    )

    with explained_disk_errors(folder):
        # Train, then save the model where `from_pretrained` looks for it.
        if session.launch.speaks:
            open_output_dir(session.request)
            write_records(folder, session.request.values, sys.argv[1:], session.launch)
        if training.do_train:
            trained = trainer.train(resume_from_checkpoint=session.checkpoint)
            peaks = trainer.peak_memory_gib_per_rank()
            trainer.save_metrics("train", {**trained.metrics, "peak_memory_gib_per_rank": peaks})
            trainer.save_model()
            trainer.save_state()

        # Evaluate: the whole held-out text, each token once, whatever the number of ranks.
        if training.do_eval:
            trainer.save_metrics("eval", trainer.evaluate())

        # Report
        if session.launch.speaks:
            write_ds_config(folder, trainer)
            if adapter_args.merge_adapter and training.do_train:
                session.say(f"merged: {write_merged(folder, model_args, source, data.tokenizer)}")
            write_language_report(folder, data, source, samples.last)
            session.say(*(["sample:", samples.last] if samples.last else []), headline(folder))
        if training.push_to_hub:
            session.say(push(trainer))


if __name__ == "__main__":
    run(main)
