"""Train an image classifier: a ResNet or AlexNet from scratch, or any pretrained one; AlexNet as a pipeline, too.

    deepspeed --num_gpus 2 recipes/image_cls.py           # small, offline, on scikit-learn's handwritten digits
    deepspeed --num_gpus 8 recipes/image_cls.py --deepspeed zero2 --train_dir photos --model_name_or_path FOLDER
    python recipes/image_cls.py --config recipes/configs/image_cls_cifar10.yaml --cifar_dir cifar-10-batches-py
    deepspeed --num_gpus 2 recipes/image_cls.py --model_type alexnet --pipeline_parallel_size 2

Plain `python`, `torchrun` and `accelerate launch` start it as well. Every flag of the Trainer's TrainingArguments is
taken, too; `--help` lists all. The run folder (--output_dir) then opens with `pipeline("image-classification",
folder)`. docs/images.md says what batch norm does where a batch is spread over ranks.
"""

import sys
from pathlib import Path

from finetune.data.image_samples import AugmentationArguments
from finetune.data.image_sources import ImageArguments
from finetune.data.images import prepare_images
from finetune.data.tables import PreparationArguments
from finetune.models.images import ImageModelArguments, build_image_classifier, find_image_source, settled_image_config
from finetune.training.arguments import RunArguments
from finetune.training.comm_hooks.arguments import CompressionArguments
from finetune.training.guards.arguments import GuardArguments
from finetune.training.hub import push
from finetune.training.launch import run
from finetune.training.loss import ClassArguments, loss_for, settle_loss_scaling
from finetune.training.metrics import CountedMetrics, settle_best_metric
from finetune.training.output_dir import check_same_model, open_output_dir
from finetune.training.pipeline.arguments import PipelineArguments, asks_for_pipeline
from finetune.training.pipeline.images import ImagePipelineTrainer
from finetune.training.profiling.arguments import ProfileArguments
from finetune.training.profiling.callback import profiling
from finetune.training.results import headline, write_image_report, write_predictions
from finetune.training.run_folder import MetricsFile, explained_disk_errors, write_ds_config, write_records
from finetune.training.start import start
from finetune.training.statistics import SharedStatistics
from finetune.training.trainer import FinetuneTrainer, early_stopping

DEFAULTS = {
    "output_dir": "runs/image_cls",
    "do_train": True,
    "do_eval": True,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "num_train_epochs": 3,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "logging_steps": 10,
    "ddp_broadcast_buffers": False,  # of batch norm: SharedStatistics averages them instead
    "report_to": ["none"],
}
# A model from scratch wants a higher rate and more rounds than a pretrained one.
SCRATCH = {"learning_rate": 3e-3, "num_train_epochs": 8, "warmup_steps": 0.1, "lr_scheduler_type": "cosine"}


def main() -> None:
    # Start: parse, check, settle the machine. With --pipeline_parallel_size the engine is DeepSpeed's pipeline.
    engine = (PipelineArguments,) if asks_for_pipeline(sys.argv[1:]) else (ClassArguments, CompressionArguments)
    data_groups = (ImageArguments, PreparationArguments, AugmentationArguments)
    groups = (ImageModelArguments, *data_groups, *engine, ProfileArguments, RunArguments, GuardArguments)
    session = start(groups, DEFAULTS, sys.argv[1:], scratch_defaults=SCRATCH)
    model_args, image_args, preparation, augmentation, *_ = session.arguments
    training, folder = session.training, Path(session.training.output_dir)

    # Data: one rank decodes and checks all pictures, the others wait.
    source = find_image_source(model_args, image_args.image_size, training.do_train)
    data = prepare_images(
        image_args,
        preparation,
        augmentation,
        source.processor,
        seed=training.seed,
        leads=session.launch.leads_its_node,
        reports=session.launch.leads_its_node or session.launch.local_rank == 1,
        trained=source.labels,
    )
    data.require_all(training)
    metrics = CountedMetrics(len(data.labels.names), session.request.values.get("metrics"))
    settle_best_metric(training, metrics, session.request.given)
    session.say(data.headline(), f"model: {source.description}; --model_name_or_path takes any other")

    # Model and Trainer, either of which holds the same data, losses and run folder.
    config = settled_image_config(model_args, source, data, training.do_train)
    check_same_model(session.checkpoint, config)
    of_engine = image_trainer if session.request.stages is None else ImagePipelineTrainer
    trainer = of_engine(session, source, data, config, metrics)

    with explained_disk_errors(folder):
        # Train, then save the model where `from_pretrained` looks for it.
        if session.launch.speaks:
            open_output_dir(session.request)
            write_records(folder, session.request.values, sys.argv[1:], session.launch)
        if training.do_train:
            trained = trainer.train(resume_from_checkpoint=session.checkpoint)
            peaks = {"peak_memory_gib_per_rank": trainer.peak_memory_gib_per_rank()}
            trainer.save_metrics("train", {**trained.metrics, **peaks, "train_samples": data.account.rows["train"]})
            trainer.save_model(str(folder))
            trainer.save_state()

        # Evaluate and predict: whole sets, each picture once, whatever the number of ranks.
        if training.do_eval:
            trainer.save_metrics("eval", {**trainer.evaluate(), "eval_samples": data.account.rows["validation"]})
        counts = metrics.counts if training.do_eval else None
        predicted = None
        if training.do_predict:
            predicted = trainer.predict(data.splits["test"], metric_key_prefix="predict")
            trainer.save_metrics("predict", {**predicted.metrics, "predict_samples": data.account.rows["test"]})

        # Report
        if session.launch.speaks:
            write_ds_config(folder, trainer)
            if predicted is not None:
                rows = predicted.predictions, data.labels, predicted.label_ids, data.names["test"]
                write_predictions(folder / "predictions.csv", *rows, row_name="picture")
            write_image_report(folder, data, counts, source, config.model_type, session.request.stages)
            session.say(headline(folder))
        if training.push_to_hub:
            session.say(push(trainer))


def image_trainer(session, source, data, config, metrics):
    """The Hugging Face Trainer. The model is built after TrainingArguments, for ZeRO-3 shards it while it is built."""
    model_args, _, _, _, class_args, comm_args, profile_args, run_args, guards = session.arguments
    training = session.training
    recomputes = bool(training.activation_checkpointing)
    model = build_image_classifier(model_args, source, config, data.account.side, training.seed, recomputes)
    settle_loss_scaling(model)
    counts = [data.account.label_counts.get(name, 0) for name in data.labels.names]
    weights = class_args.class_weights if training.do_train else "none"
    return FinetuneTrainer(
        model=model,
        args=training,
        train_dataset=data.splits.get("train"),
        eval_dataset=data.splits.get("validation"),
        processing_class=data.processor,
        data_collator=data.collator,
        compute_metrics=metrics,
        compute_loss_func=loss_for(weights, training.label_smoothing_factor, data.labels.task, counts),
        callbacks=[MetricsFile(), SharedStatistics(model), *profiling(profile_args), *early_stopping(run_args)],
        compression=comm_args,
        guards=guards,
    )


if __name__ == "__main__":
    run(main)
