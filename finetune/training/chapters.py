"""Steps that all recipes share: building the trainer of either engine with its callbacks, and finishing a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import PredictionOutput, TrainOutput

from finetune.data.mixture import Joined, taken_of_each
from finetune.data.numbered import Numbered, NumberedCollator
from finetune.models import short_attention
from finetune.models.chunked_loss import loss_head
from finetune.models.composite import describe_frozen
from finetune.models.dropout import draws_slowly, use_fast_dropout, use_fast_dropout_in_layers
from finetune.models.pipeline import PipelineModel
from finetune.run.facts import SHORT_TOKENS, checkpoints_on_host, mixes_attention
from finetune.run.flags.common import RunArguments
from finetune.run.flags.compression import CompressionArguments
from finetune.run.flags.guards import GuardArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.profiling import ProfileArguments
from finetune.training.checkpoints.identity import lineage_lines
from finetune.training.checkpoints.manifest import CHECKPOINT
from finetune.training.distilling import Teacher
from finetune.training.hub import push
from finetune.training.kept_memory import KeptMemory
from finetune.training.pipeline.partition import describe, partition
from finetune.training.pipeline.trainer import PipelineTrainer
from finetune.training.position import follow
from finetune.training.profiling.callback import profiling
from finetune.training.progress import show_numbers, terminal_of, tidy_terminal
from finetune.training.results import closing_line, refuse_divergence
from finetune.training.run_folder import (
    MetricsFile,
    explained_disk_errors,
    forget_results,
    kept_failure,
    open_output_dir,
    write_ds_config,
    write_records,
)
from finetune.training.running_loss import SourceLosses
from finetune.training.same_run import settle_identity, write_run_record
from finetune.training.start import Session
from finetune.training.summary import print_summary
from finetune.training.trainer import FinetuneTrainer


@dataclass(frozen=True)
class Data:
    """What a trainer reads: the splits `train`, `validation` and `test` where they exist, `lengths` of training samples
    in tokens to group by, and the `processor` saved with the weights. Recipes' own data have these names and more."""

    splits: Mapping[str, Any]
    collator: Any
    processor: Any = None
    lengths: Any = None


def trainer_of(
    session: Session,
    model: Any,
    data: Any,
    *,
    compute_metrics: Any,
    compute_loss: Any = None,
    preprocess_logits: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    kind: type[FinetuneTrainer] = FinetuneTrainer,
    teacher: Teacher | None = None,
) -> FinetuneTrainer:
    """The Trainer over `data`, which has the attributes of `Data`. Build the model after `start`, so that ZeRO-3 can
    shard it while it is built."""
    identity = settle_identity(session, model.config, data) if session.training.do_train else None
    if session.training.do_train:
        session.say(*describe_frozen(model))
    _settle_attention(session, model)
    if _draws_slowly(session):
        use_fast_dropout(model)
    train, collator, sources = data.splits.get("train"), data.collator, None
    # A teacher's divergence is part of the loss, and Liger's fused loss gives no losses of tokens.
    if isinstance(train, Joined) and teacher is None and not session.training.use_liger_kernel:
        sources = SourceLosses(train.names, train.cumulative_sizes, loss_head(model))
    if sources is not None or (teacher is not None and teacher.kept is not None):
        train, collator = Numbered(train), NumberedCollator(collator)
    trainer = kind(
        model=model,
        args=session.training,
        train_dataset=train,
        eval_dataset=data.splits.get("validation"),
        processing_class=data.processor,
        data_collator=collator,
        compute_metrics=compute_metrics,
        compute_loss_func=compute_loss,
        preprocess_logits_for_metrics=preprocess_logits,
        callbacks=_callbacks(session, callbacks),
        lengths=data.lengths if session[RunArguments].group_by_length else None,
        compression=session[CompressionArguments],
        guards=session[GuardArguments],
        sequence_parallel_size=session.run.sequence_parallel_size,
        expert_parallel_size=session.run.expert_parallel_size,
    )
    show_numbers(trainer)
    trainer.identity, trainer.teacher, trainer.running_loss.sources = identity, teacher, sources
    return trainer


def _settle_attention(session: Session, model: Any) -> None:
    """Attend as `run.facts.mixes_attention` says; a model without SDPA keeps its own."""
    training = session.training
    precision = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
    if mixes_attention(session.run, training.device.type, precision) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(short_attention.NAME)
        session.say(f"attention: without SDPA up to {SHORT_TOKENS} tokens or with dropout: faster in bf16 on a CPU")


def _draws_slowly(session: Session) -> bool:
    return session.training.device.type == "cpu" and draws_slowly()


def pipeline_of(
    session: Session,
    model: PipelineModel,
    data: Any,
    *,
    compute_metrics: Any,
    weights: Path | None = None,
    collator: Any = None,
    dynamic: bool = False,
) -> PipelineTrainer:
    """DeepSpeed's pipeline engine over the same `data`, optionally with another `collator`; `weights` is the folder of
    a trained model. Set `dynamic` if batches differ in length."""
    arguments, run_args, launch = session[PipelineArguments], session[RunArguments], session.launch
    collator = collator or data.collator
    interval, train = run_args.activation_checkpoint_interval or 0, data.splits["train"]
    offloads = checkpoints_on_host(session.run)
    parts = partition(
        model, arguments, session.training, launch, train, collator, interval, session.checkpoint, offloads
    )
    session.say(*describe(parts))
    identity = settle_identity(session, model.config, data)
    trainer = PipelineTrainer(
        model,
        parts,
        args=session.training,
        ds_config=session.ds_config or {},
        launch=launch,
        train_dataset=train,
        eval_dataset=data.splits.get("validation"),
        data_collator=collator,
        processing_class=data.processor,
        compute_metrics=compute_metrics,
        callbacks=_callbacks(session, ()),
        lengths=data.lengths if run_args.group_by_length else None,
        dynamic=dynamic,
        checkpoint_interval=interval,
        offloads=offloads,
        weights=weights,
        schedule_step=arguments.schedule_step,
        guards=session[GuardArguments],
        identity=identity,
    )
    if _draws_slowly(session):
        use_fast_dropout_in_layers(trainer.engine.module)
    return trainer


def _callbacks(session: Session, own: Sequence[TrainerCallback]) -> list[TrainerCallback]:
    patience = session[RunArguments].early_stopping_patience
    stopping = [EarlyStoppingCallback(patience)] if patience else []
    return [MetricsFile(), KeptMemory(), *own, *profiling(session[ProfileArguments]), *stopping]


@dataclass(frozen=True)
class Outcome:
    """The results of a run; None for what was not requested. `evaluated` of a pipeline has no logits."""

    trained: TrainOutput | None
    evaluated: PredictionOutput | None
    predicted: PredictionOutput | None


def finish(
    session: Session,
    trainer: FinetuneTrainer | PipelineTrainer,
    *,
    samples: Mapping[str, int] | None = None,
    counts: Mapping[str, Mapping[str, int]] | None = None,
    report: Callable[[Outcome], Iterable[str]] | None = None,
    settle: Callable[[PredictionOutput], PredictionOutput] | None = None,
    predict: Callable[[], PredictionOutput] | None = None,
) -> None:
    """Train, save the model where `from_pretrained` looks for it, evaluate, predict, report and push, as the flags ask.

    `samples` are the numbers of rows of each split, for the record, and `counts` others of a split, by name. `settle`
    receives the last evaluation and may replace its metrics. `report` writes predictions, pictures and the model card
    on rank 0 and returns lines to print.
    """
    training, folder, speaks, samples = session.training, session.folder, session.launch.speaks, samples or {}
    counts = counts or {}
    if speaks:
        with explained_disk_errors(folder, session.launch):
            open_output_dir(session.run)
            lineage = trainer.identity.lineage if trainer.identity else ()
            write_records(folder, session.run, lineage_lines(lineage))
            if trainer.identity:
                write_run_record(folder, trainer.identity)
    with kept_failure(folder), explained_disk_errors(folder, session.launch):
        with trainer.watched(), tidy_terminal(trainer):
            trained = _train(session, trainer, samples) if training.do_train else None
            evaluated = predicted = None
            if training.do_eval:
                evaluated = logged = trainer.evaluated_at_end()
                if settle and (evaluated := settle(logged)) is not logged:
                    trainer.log(evaluated.metrics)
                more = _prefixed(counts.get("validation", {}), "eval") | _count(samples, "validation", "eval_samples")
                trainer.save_metrics("eval", {**evaluated.metrics, **more})
            if training.do_predict and predict is not None:
                predicted = predict()
                more = _prefixed(counts.get("test", {}), "predict") | _count(samples, "test", "predict_samples")
                trainer.save_metrics("predict", {**predicted.metrics, **more})
        if speaks:
            write_ds_config(folder, trainer)
            session.say(*(report(Outcome(trained, evaluated, predicted)) if report else ()))
            refuse_divergence(folder)
            session.say(closing_line(folder))
            if console := terminal_of(training):
                print_summary(console, folder, session.run)
        if training.push_to_hub:
            session.say(push(trainer))


def _stood_there(checkpoint: str | None, step: int) -> bool:
    """Whether a run that resumed had no step left."""
    found = CHECKPOINT.fullmatch(Path(checkpoint).name) if checkpoint else None
    return found is not None and int(found[1]) == step


def _train(session: Session, trainer: FinetuneTrainer | PipelineTrainer, samples: Mapping[str, int]) -> TrainOutput:
    batch, data = trainer.global_batch_size, trainer.train_dataset
    if isinstance(data, Sized) and batch > (rows := len(data)):  # a stream has no length, or that of whole batches
        session.say(
            f"note: the global batch of {batch:,} has more rows than the training data, {rows:,}: each batch repeats "
            "some. Give a smaller --per_device_train_batch_size, or fewer ranks."
        )
    follow(trainer)
    trained: TrainOutput = trainer.train(resume_from_checkpoint=session.checkpoint)
    peaks = {"peak_memory_gib_per_rank": trainer.peak_memory_gib_per_rank()}
    sources = taken_of_each(
        trainer.train_dataset, trainer.sampler, trainer.state.global_step * trainer.global_batch_size
    )
    for name, means in trainer.running_loss.of_sources.items():
        sources[name] |= means
    found = {**trained.metrics, **peaks, **({"sources": sources} if sources else {})}
    if session.launch.speaks and not _stood_there(session.checkpoint, trained.global_step):
        forget_results(session.folder)
    trainer.save_metrics("train", {**found, **_count(samples, "train", "train_samples")})
    trainer.save_model()
    trainer.save_state()
    return trained


def _count(samples: Mapping[str, int], split: str, name: str) -> dict[str, int]:
    return {name: samples[split]} if split in samples else {}


def _prefixed(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {f"{prefix}_{name}": count for name, count in counts.items()}
