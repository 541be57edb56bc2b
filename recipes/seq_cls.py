"""Fine-tune a text classifier (or regressor, or one of several labels a text), on one CPU core or on many GPUs.

    deepspeed --num_gpus 2 recipes/seq_cls.py           # small, offline, on built-in text
    deepspeed --num_gpus 8 recipes/seq_cls.py --deepspeed zero3 --train_file reviews.csv --model_name_or_path FOLDER
    python recipes/seq_cls.py --config recipes/configs/seq_cls_imdb.yaml --max_train_samples 2000

Plain `python`, `torchrun` and `accelerate launch` start it as well. Every flag of the Trainer's TrainingArguments is
taken, too; `--help` lists all. The run folder (--output_dir) then opens with `pipeline("text-classification", folder)`.
"""

import sys
from pathlib import Path

from finetune.data.classification import prepare
from finetune.data.tables import DataArguments, PreparationArguments
from finetune.models.classifier import ModelArguments, build_classifier, find_source
from finetune.training.arguments import RunArguments
from finetune.training.comm_hooks.arguments import CompressionArguments
from finetune.training.guards.arguments import GuardArguments
from finetune.training.hub import push
from finetune.training.launch import run
from finetune.training.loss import ClassArguments, loss_for, settle_loss_scaling
from finetune.training.metrics import metrics_for, settle_best_metric, settle_thresholds
from finetune.training.output_dir import check_same_model, open_output_dir
from finetune.training.profiling.arguments import ProfileArguments
from finetune.training.profiling.callback import profiling
from finetune.training.results import headline, write_predictions, write_report
from finetune.training.run_folder import MetricsFile, explained_disk_errors, write_ds_config, write_records
from finetune.training.start import start
from finetune.training.trainer import FinetuneTrainer, early_stopping

DEFAULTS = {
    "output_dir": "runs/seq_cls",
    "do_train": True,
    "do_eval": True,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "num_train_epochs": 3,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "logging_steps": 10,
    "report_to": ["none"],
}
# A model from scratch wants a higher rate and more rounds than a pretrained one.
SCRATCH = {"learning_rate": 1e-3, "num_train_epochs": 8, "warmup_steps": 0.1}


def main() -> None:
    # Start: parse, check, settle the machine. What is wrong with the request is said here or in the next two chapters.
    engine = (RunArguments, CompressionArguments, GuardArguments)
    groups = (ModelArguments, DataArguments, PreparationArguments, ClassArguments, ProfileArguments, *engine)
    session = start(groups, DEFAULTS, sys.argv[1:], scratch_defaults=SCRATCH)
    model_args, data_args, preparation, class_args, profile_args, run_args, comm_args, guards = session.arguments
    training, folder = session.training, Path(session.training.output_dir)

    # Data: the model's tokenizer, or one trained on the text. One rank prepares, the others wait.
    source = find_source(model_args, data_args.max_seq_length)
    data = prepare(
        data_args,
        preparation,
        source.tokenizer,
        max_seq_length=source.max_seq_length,
        vocab_size=source.vocab_size,
        seed=training.seed,
        leads=session.launch.leads_its_node,
        reports=session.launch.leads_its_node or session.launch.local_rank == 1,
        trained=source.labels,
    )
    for split, flag in (("train", "do_train"), ("validation", "do_eval"), ("test", "do_predict")):
        if getattr(training, flag):
            data.require(split, flag)
    metrics = metrics_for(data.labels, class_args.metrics, None if training.do_train else source.config)
    settle_best_metric(training, metrics, session.request.given)
    session.say(data.headline(), f"model: {source.description}; --model_name_or_path takes any other")

    # Model: built after TrainingArguments, for ZeRO-3 shards it while it is built.
    counts = [data.account.label_counts.get(name, 0) for name in data.labels.names]
    weights = class_args.class_weights if training.do_train else "none"
    rows = data.account.rows.get("train", 0)
    loss = loss_for(weights, training.label_smoothing_factor, data.labels.task, counts, rows)
    model = build_classifier(model_args, source, data.labels, data.tokenizer, will_train=training.do_train)
    settle_loss_scaling(model, label_is_float=data.labels.task != "classification")
    check_same_model(session.checkpoint, model.config)

    # Trainer
    callbacks = [MetricsFile(), *profiling(profile_args), *early_stopping(run_args)]
    trainer = FinetuneTrainer(
        model=model,
        args=training,
        train_dataset=data.splits.get("train"),
        eval_dataset=data.splits.get("validation"),
        processing_class=data.tokenizer,
        data_collator=data.collator,
        compute_metrics=metrics,
        compute_loss_func=loss,
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
            peaks = {"peak_memory_gib_per_rank": trainer.peak_memory_gib_per_rank()}
            trainer.save_metrics("train", {**trained.metrics, **peaks, "train_samples": data.account.rows["train"]})
            trainer.save_model()
            trainer.save_state()

        # Evaluate and predict: whole sets, each row once, whatever the number of ranks.
        evaluated = predicted = None
        if training.do_eval:
            evaluated = trainer.predict(data.splits["validation"], metric_key_prefix="eval")
            trainer.log(evaluated.metrics)
            trainer.save_metrics("eval", {**evaluated.metrics, "eval_samples": data.account.rows["validation"]})
            if training.do_train:
                settle_thresholds(metrics, evaluated, folder if session.launch.speaks else None)
        if training.do_predict:
            predicted = trainer.predict_in_input_order(data.splits["test"])
            trainer.save_metrics("predict", {**predicted.metrics, "predict_samples": data.account.rows["test"]})

        # Report
        if session.launch.speaks:
            write_ds_config(folder, trainer)
            if predicted is not None:
                write_predictions(
                    folder / "predictions.csv",
                    predicted.predictions,
                    data.labels,
                    predicted.label_ids,
                    data.splits["test"]["row"],
                    thresholds=metrics.thresholds,
                )
            write_report(folder, data, evaluated, source, metrics.thresholds)
            session.say(headline(folder))
        if training.push_to_hub:
            session.say(push(trainer))


if __name__ == "__main__":
    run(main)
