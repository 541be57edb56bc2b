"""Train an image classifier: a ResNet or AlexNet from scratch, or any pretrained one; AlexNet as a pipeline, too.

    deepspeed --num_gpus 2 recipes/image_cls.py           # small, offline, on scikit-learn's handwritten digits
    deepspeed --num_gpus 8 recipes/image_cls.py --deepspeed zero2 --train_dir photos --model_name_or_path FOLDER
    python recipes/image_cls.py --config recipes/configs/image_cls_cifar10.yaml --cifar_dir cifar-10-batches-py
    deepspeed --num_gpus 2 recipes/image_cls.py --model_type alexnet --pipeline_parallel_size 2

Plain `python`, `torchrun` and `accelerate launch` start it as well. Every flag of the Trainer's TrainingArguments is
taken, too; `--help` lists all. The run folder (--output_dir) then opens with `pipeline("image-classification",
folder)`. docs/images.md says what batch norm does where a batch is spread over ranks.
"""

from finetune.entry.main import run_recipe
from finetune.run.flags.images import AugmentationArguments, ImageArguments, ImageModelArguments
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.image_cls import IMAGE_CLS


def main(run):
    # Heavy imports come after the command line has been understood, so that --help and mistakes cost no time.
    from finetune.data.images import prepare_images
    from finetune.models.images import find_image_source
    from finetune.training.chapters import finish
    from finetune.training.image_trainers import image_trainer
    from finetune.training.metrics import CountedMetrics, settle_best_metric
    from finetune.training.results import write_image_report
    from finetune.training.start import start

    # Start: the machine is settled, the ranks meet, the config is checked.
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

    # Train, evaluate and predict whole sets, each picture once, whatever the number of ranks; then report.
    def keep_counts(evaluated):
        counted.append(metrics.counts)  # a prediction has others
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
