"""A loop like the Trainer's around DeepSpeed's pipeline engine: the same samples, schedule, logs and run folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_pt_utils import save_metrics, save_state
from transformers.trainer_utils import PredictionOutput, SaveStrategy, TrainOutput, speed_metrics

from finetune.data.changes import mapped_files
from finetune.data.image_samples import Pictures
from finetune.data.sampling import sampler_of
from finetune.errors import InterruptedRunError
from finetune.models.pipeline import PipelineModel
from finetune.run.flags.guards import GuardArguments
from finetune.run.launch import Launch
from finetune.training.checkpoints.identity import Identity
from finetune.training.checkpoints.saves import Saves
from finetune.training.checkpoints.writing import every, together
from finetune.training.evaluation import EvaluatesOnce
from finetune.training.guards.nan_guard import NanGuard
from finetune.training.guards.pipeline_adapter import PipelineSuspect
from finetune.training.interruption import StopOnSignal, close_trackers
from finetune.training.pipeline.batches import TrainingShard, loader
from finetune.training.pipeline.checkpoint import Checkpoints
from finetune.training.pipeline.engine import build_engine
from finetune.training.pipeline.evaluation import StageLoss, evaluated, note_best
from finetune.training.pipeline.experts import StageExperts
from finetune.training.pipeline.resuming import alike, load_best, resume, save_checkpoint
from finetune.training.pipeline.stages import Cut, build_module
from finetune.training.pipeline.trace import Recorder, note_schedule
from finetune.training.progress import display
from finetune.training.resuming import SavesLast, ended_early
from finetune.training.running_loss import RunningLoss
from finetune.training.speed import SpeedMeter, peak_memory_bytes, wall_clock
from finetune.training.watch import watching


class PipelineTrainer(EvaluatesOnce):
    """One rank's trainer. All ranks must call every method; the public ones behave like the Trainer's.

    `ds_config` has no "auto" left. `lengths` are the training samples' lengths, to group by. With `dynamic`,
    micro-batches may have different shapes. `weights` is a folder to start from, or None for newly initialized layers.
    `offloads`: activation checkpoints lie in host memory.
    The schedule of step `schedule_step` is recorded and plotted.
    """

    is_deepspeed_enabled = True
    save_metrics, save_state = save_metrics, save_state  # as transformers' Trainer has them

    def __init__(
        self,
        model: PipelineModel,
        parts: Cut,
        *,
        args: Any,
        ds_config: dict[str, Any],
        launch: Launch,
        train_dataset: Any,
        eval_dataset: Any,
        data_collator: Any,
        processing_class: Any,
        compute_metrics: Any,
        callbacks: Sequence[TrainerCallback] = (),
        lengths: Any = None,
        dynamic: bool = False,
        checkpoint_interval: int = 0,
        offloads: bool = False,
        weights: Path | None = None,
        schedule_step: int = 0,
        guards: GuardArguments | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.guards = guards or GuardArguments(hang_timeout=0.0, on_nan="off", stop_grace=0.0, async_save="off")
        self.ds_config, self.identity = ds_config, identity
        self.model, self.parts, self.args, self.launch = model, parts, args, launch
        self.train_dataset, self.eval_dataset, self.collator = train_dataset, eval_dataset, data_collator
        self.processing_class, self.compute_metrics = processing_class, compute_metrics
        self._settle_steps(lengths)
        self.loss = StageLoss(model, self.micro_batches * self.pipelines)
        self.dynamic, self.schedule_step, self.planned = dynamic, schedule_step, parts.plan()
        module = build_module(model, parts, self.loss, checkpoint_interval, dynamic, args.seed, offloads)
        built = build_engine(module, parts, args, ds_config, self.max_steps)
        self.engine, self.optimizer, self.scheduler = built.engine, built.optimizer, built.scheduler
        self.grid, self.device = self.engine.grid, self.engine.device
        self.stage, self.pipeline = self.grid.get_stage_id(), self.grid.get_data_parallel_rank()
        self.experts = StageExperts(self, {id(weight): name for name, weight in built.named.items()})
        self.checkpoints = Checkpoints(built, parts, model.save, processing_class, args.save_only_model)
        if weights is not None:
            together(lambda: self.checkpoints.load_weights(weights))
        torch.manual_seed(args.seed + launch.rank)  # every stage must draw different dropout masks
        self.speed = SpeedMeter(model.multiplied_parameters, launch.world_size)
        self.state, self.control = TrainerState(), TrainerControl()
        self.saves = Saves(self, self.checkpoints)
        self.stop, self.running_loss = StopOnSignal(self.guards.stop_grace), RunningLoss(self.experts)
        self.suspect = PipelineSuspect(self) if self.guards.on_nan != "off" else None
        self.nan_guard = NanGuard(self.guards, self.suspect) if self.suspect else None
        every, module = self._callbacks(callbacks), self.engine.module
        self.handler = CallbackHandler(every, module, processing_class, self.optimizer, self.scheduler)
        self.control = self.handler.on_init_end(args, self.state, self.control)

    def _settle_steps(self, lengths: Any) -> None:
        """Set the global batch size, the sampler, and the number of steps."""
        args = self.args
        self.pipelines = self.launch.world_size // self.parts.stages
        self.micro_batches = args.gradient_accumulation_steps
        self.global_batch_size = args.train_batch_size * self.micro_batches * self.pipelines
        seed = args.data_seed if args.data_seed is not None else args.seed
        self.sampler = sampler_of(self.train_dataset, self.global_batch_size, seed, lengths)
        self.steps_per_epoch = len(self.sampler) // self.global_batch_size
        by_epochs = math.ceil(args.num_train_epochs * self.steps_per_epoch)
        self.max_steps = args.max_steps if args.max_steps > 0 else by_epochs

    def _callbacks(self, others: Sequence[TrainerCallback]) -> list[TrainerCallback]:
        reports = [report() for report in get_reporting_integration_callbacks(self.args.report_to)]
        shown = display(self.args, self.compute_metrics)
        own = (self.speed, shown, self.running_loss, self.saves.beside, SavesLast(), self.stop, self.nan_guard)
        return [DefaultFlowCallback(), *reports, *others, self.experts, *filter(None, own)]

    @property
    def is_first(self) -> bool:
        return bool(self.stage == 0)

    @property
    def is_last(self) -> bool:
        return bool(self.stage == self.parts.stages - 1)

    def is_world_process_zero(self) -> bool:
        return self.launch.rank == 0

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """Inside this context, a stage whose process is killed ends the run with an explanation."""

        def name_of(rank: int) -> str:
            stage, pipeline = divmod(rank, self.pipelines)
            of = f" of pipeline {pipeline}" if self.pipelines > 1 else ""
            return f"rank {rank} (stage {stage} of {self.parts.stages}{of})"

        guards = self.guards
        return watching(name_of, self.stop, Path(self.args.output_dir), guards.hang_timeout, guards.hang_blame)

    def train(self, resume_from_checkpoint: str | None = None) -> TrainOutput:
        """Train to the end."""
        try:
            return self._train(resume_from_checkpoint)
        except InterruptedRunError:
            close_trackers(self.handler, self.args, self.state, self.control)
            raise
        finally:
            self.saves.beside.close(gives_time=True)
            self.stop.end_grace()

    def _train(self, resume_from_checkpoint: str | None) -> TrainOutput:
        args, state, handler = self.args, self.state, self.handler
        epochs = math.ceil(self.max_steps / self.steps_per_epoch)
        if resume_from_checkpoint:
            state = self.state = resume(self, Path(resume_from_checkpoint))
            if self.launch.speaks:
                print(f"going on from {resume_from_checkpoint}, after step {state.global_step}", flush=True)
        state.max_steps, state.num_train_epochs = self.max_steps, epochs
        state.is_world_process_zero = self.launch.rank == 0
        state.is_local_process_zero = self.launch.local_rank == 0
        state.train_batch_size = args.train_batch_size
        state.compute_steps(args, self.max_steps)
        if args.save_strategy != SaveStrategy.NO:
            self.saves.check_space("before the first step")
            self.saves.beside.choose(self.guards.async_save)
        self.data_files = mapped_files()
        first_step, start = state.global_step, time.monotonic()
        self._grad_norm: float | None = None
        self.control = handler.on_train_begin(args, state, self.control)
        if first_step and ended_early(handler.callbacks):
            self.control.should_training_stop = True
        if args.eval_on_start:
            self.evaluate()
        for epoch in range(first_step // self.steps_per_epoch, epochs):
            if self.control.should_training_stop or state.global_step >= self.max_steps:
                break
            self._epoch(epoch, skipped=state.global_step - epoch * self.steps_per_epoch)
        steps = state.global_step - first_step
        metrics: dict[str, Any] = speed_metrics("train", wall_clock(start), steps * self.global_batch_size, steps)
        metrics["train_loss"] = self.running_loss.mean(state.global_step, alike)
        metrics |= self.speed.summary(self._sum_over_ranks)
        metrics["peak_memory_gib"] = max(self.peak_memory_gib_per_rank())
        self.log(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint:
            load_best(self)
        self.control = handler.on_train_end(args, state, self.control)
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def _epoch(self, epoch: int, skipped: int) -> None:
        args, state, handler = self.args, self.state, self.handler
        self.control = handler.on_epoch_begin(args, state, self.control)
        self.sampler.set_epoch(epoch)
        if isinstance(self.train_dataset, Pictures):
            self.train_dataset.begin_epoch(epoch)
        batches = None
        if self.is_first or self.is_last:
            shard = TrainingShard(self.sampler, args.train_batch_size, self.pipeline, self.pipelines, skipped)
            batches = iter(loader(self, self.train_dataset, shard))
        for _ in range(skipped, self.steps_per_epoch):
            self.control = handler.on_step_begin(args, state, self.control)
            self._step(batches)
            self.control = handler.on_optimizer_step(args, state, self.control)
            state.global_step += 1
            state.epoch = state.global_step / self.steps_per_epoch
            self.control = handler.on_step_end(args, state, self.control)
            self._log_evaluate_save()
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = handler.on_epoch_end(args, state, self.control)
        self._log_evaluate_save()

    def _step(self, batches: Iterator[Any] | None) -> None:
        """One global batch through the pipeline, and one step of the optimizer."""
        self.data_files.look()
        pairs, some = None, []
        if batches is not None:
            some = [next(batches) for _ in range(self.micro_batches)]
            if self.is_first:
                for batch in some:
                    self.speed.count(batch)
            pairs = [self.model.split(batch) for batch in some]
        if self.is_last:
            assert pairs is not None
            self.loss.count([labels for _, labels in pairs], self.grid.get_data_parallel_group(), self.device)
        if self.suspect:
            self.suspect.begin(some)
        of_routers = self.experts.begin(some)
        self.loss.real_rows = None
        self._learning_rate = self.scheduler.get_last_lr()[0]  # this step's; the engine advances to the next one's
        # The step before the plotted one gives the stage times from which it is planned.
        records = self.state.global_step + 1 in (self.schedule_step - 1, self.schedule_step)
        recorder = Recorder(self.engine)
        with recorder.recording() if records else contextlib.nullcontext():
            loss = self.engine.train_batch(None if pairs is None else iter(pairs))
        if records:
            note_schedule(self, recorder)
        self.running_loss.add(loss.detach() + of_routers, self.state.global_step, filters=False)
        self._grad_norm = self.engine.get_global_grad_norm()

    def _log_evaluate_save(self) -> None:
        """Do what the callbacks have requested, in the Trainer's order."""
        args, state = self.args, self.state
        if self.control.should_log and state.global_step > self.running_loss.logged_step:
            logs = {"loss": self.running_loss.window(state.global_step, alike)}
            if self._grad_norm is not None:
                logs["grad_norm"] = float(self._grad_norm)
            logs |= {"learning_rate": self._learning_rate, **self.speed.window(self._sum_over_ranks)}
            logs |= self.experts.window()
            logs |= self.nan_guard.window(state.global_step, logs["loss"]) if self.nan_guard else {}
            self.log(logs)
        if self.control.should_evaluate:
            is_best = note_best(self.args, self.state, self.evaluate())
            if args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
        if self.control.should_save:
            save_checkpoint(self)
            self.control = self.handler.on_save(args, state, self.control)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Pass the logs to the callbacks: a file, the terminal, a tracker."""
        logs = {**logs, "epoch": self.state.epoch} if self.state.epoch is not None else logs
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.handler.on_log(self.args, self.state, self.control, logs)

    def evaluate(self) -> dict[str, float]:
        """Evaluate each sample of the evaluation set once; the metrics are the same on every rank."""
        metrics = evaluated(self) | ({} if self.state.epoch is None else {"epoch": self.state.epoch})
        self.log(metrics)
        self.control = self.handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.keep_evaluation(PredictionOutput(None, None, metrics))
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the final model in the run folder: fp32 weights, one part per stage, with config and tokenizer."""
        self.checkpoints.save_model(Path(output_dir or self.args.output_dir))

    def peak_memory_gib_per_rank(self) -> list[float]:
        """Each rank's peak memory in GiB."""
        return every(round(peak_memory_bytes() / 2**30, 3))

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        distributed.all_reduce(tensor)
        return tensor.cpu()
