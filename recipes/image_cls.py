"""Train an image classifier: a ResNet or AlexNet from scratch, or any pretrained one; AlexNet also as a pipeline.

    deepspeed --num_gpus 2 recipes/image_cls.py           # small, offline, on scikit-learn's handwritten digits
    deepspeed --num_gpus 8 recipes/image_cls.py --deepspeed zero2 --train_dir photos --model_name_or_path FOLDER
    python recipes/image_cls.py --config recipes/configs/image_cls_cifar10.yaml --cifar_dir cifar-10-batches-py
    deepspeed --num_gpus 2 recipes/image_cls.py --model_type alexnet --pipeline_parallel_size 2

It also starts with plain `python`, `torchrun` and `accelerate launch`, and takes every flag of the Trainer's
TrainingArguments; `--help` lists all flags. The run folder (--output_dir) then opens with
`pipeline("image-classification", folder)`. docs/images.md explains batch norm on several ranks.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.images import AugmentationArguments, ImageArguments, ImageModelArguments
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.image_cls import IMAGE_CLS


def main(run):
    # Heavy imports come after the command line is parsed, so that --help and mistakes cost no time.
    from finetune.data.images import prepare_images
    from finetune.models.images import find_image_source
    from finetune.training.chapters import finish
    from finetune.training.image_trainers import image_trainer
    from finetune.training.metrics import CountedMetrics, settle_best_metric
    from finetune.training.results import write_image_report
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the config.
    session = start(run)
    training = session.training

    # Data: one rank decodes and checks all pictures, the others wait.
    source = find_image_source(session[ImageModelArguments], session[ImageArguments].image_size)
    data = prepare_images(
        session[ImageArguments],
        session[PreparationArguments],
        session[AugmentationArguments],
        source.processor,
        seed=training.seed,
        launch=session.launch,
        trained=source.labels,
    )
    data.require_all(training)
    metrics = CountedMetrics(len(data.labels.names), session.run.value("metrics"), session.run.stages is not None)
    settle_best_metric(training, metrics, session.run.given)
    session.introduce(data.describe(), source.description)

    # Model and trainer: with --pipeline_parallel_size the engine is DeepSpeed's pipeline.
    trainer = image_trainer(session, source, data, metrics)

    # Train; evaluate and predict on whole sets, each picture once at any number of ranks; then report.
    def keep_counts(evaluated):
        counted.append(metrics.counts)  # now: the prediction replaces them later
        return evaluated

    counted = []
    finish(
        session,
        trainer,
        samples=data.account.rows,
        settle=keep_counts,
        predict=lambda: trainer.predict(data.splits["test"], metric_key_prefix="predict"),
        report=lambda done: write_image_report(session, data, source, counted[-1] if counted else None, done.predicted),
    )


if __name__ == "__main__":
    run_recipe(IMAGE_CLS, main)
