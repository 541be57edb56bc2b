"""Training as the Trainer does it, with DeepSpeed's pipeline engine in place of its step: the same arguments, samples,
schedule, callbacks, logs and run folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer_utils import SaveStrategy, TrainOutput, speed_metrics

from finetune.data.changes import mapped_files
from finetune.data.image_samples import Pictures
from finetune.data.sampling import GlobalBatchSampler
from finetune.errors import InterruptedRunError, RequestError
from finetune.models.pipeline import PipelineModel
from finetune.run.files import STATE_FILE
from finetune.run.flags.guards import GuardArguments
from finetune.run.launch import Launch
from finetune.training.checkpoints.best import best_to_load, note_place_of_best
from finetune.training.checkpoints.rotation import Keeper
from finetune.training.guards.nan_guard import NanGuard, rng_state, set_rng_state
from finetune.training.guards.pipeline_adapter import PipelineSuspect
from finetune.training.interruption import StopOnSignal, close_trackers
from finetune.training.model_card import results_of
from finetune.training.pipeline.batches import TrainingShard, loader
from finetune.training.pipeline.checkpoint import Checkpoints, read_record
from finetune.training.pipeline.engine import build_engine
from finetune.training.pipeline.evaluation import forward, note_best, whole_set
from finetune.training.pipeline.loss import StageLoss
from finetune.training.pipeline.schedule_plot import write_schedule
from finetune.training.pipeline.stages import Cut, build_module
from finetune.training.pipeline.trace import Recorder, intervals_of, measured, plan_from
from finetune.training.reshard.for_pipeline import loadable
from finetune.training.resuming import RunningLoss, SavesLast, ended_early, restore_callbacks
from finetune.training.run_folder import write_json
from finetune.training.speed import SpeedMeter, peak_memory_bytes, wall_clock
from finetune.training.watch import watching


class PipelineTrainer:
    """One rank of `parts.stages` stages times so many pipelines. Every method must be called on all ranks.

    `ds_config` has no "auto" left. `lengths` are those of the training samples, to group by. With `dynamic`,
    micro-batches may have different shapes. `weights` is a folder to start from, or None for the layers as they were
    drawn. The step `schedule_step` is recorded and drawn.
    """

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
        weights: Path | None = None,
        schedule_step: int = 0,
        guards: GuardArguments | None = None,
    ) -> None:
        self.guards = guards or GuardArguments(hang_timeout=0.0, on_nan="off", stop_grace=0.0)
        self.ds_config = ds_config
        self.model, self.parts, self.args, self.launch = model, parts, args, launch
        self.train_dataset, self.eval_dataset, self.collator = train_dataset, eval_dataset, data_collator
        self.processing_class, self.compute_metrics = processing_class, compute_metrics
        self.pipelines = launch.world_size // parts.stages
        self.micro_batches = args.gradient_accumulation_steps
        self.global_batch_size = args.train_batch_size * self.micro_batches * self.pipelines
        seed = args.data_seed if args.data_seed is not None else args.seed
        self.sampler = GlobalBatchSampler(len(train_dataset), self.global_batch_size, seed, lengths)
        self.steps_per_epoch = len(self.sampler) // self.global_batch_size
        by_epochs = math.ceil(args.num_train_epochs * self.steps_per_epoch)
        self.max_steps = args.max_steps if args.max_steps > 0 else by_epochs

        self.loss = StageLoss(model, self.micro_batches * self.pipelines)
        self.dynamic, self.schedule_step = dynamic, schedule_step
        self.planned = parts.plan()
        module = build_module(model, parts, self.loss, checkpoint_interval, dynamic, args.seed)
        built = build_engine(module, parts, args, ds_config, self.max_steps)
        self.engine, self.optimizer, self.scheduler = built.engine, built.optimizer, built.scheduler
        self.grid, self.device = self.engine.grid, self.engine.device
        self.stage, self.pipeline = self.grid.get_stage_id(), self.grid.get_data_parallel_rank()
        self.checkpoints = Checkpoints(built, parts, model.save, processing_class)
        if weights is not None:
            self.checkpoints.load_weights(weights)
        torch.manual_seed(args.seed + launch.rank)  # dropout must not draw the same masks on every stage

        self.speed = SpeedMeter(model.multiplied_parameters, launch.world_size)
        self.state, self.control = TrainerState(), TrainerControl()
        shown = PrinterCallback() if args.disable_tqdm else ProgressCallback()
        reports = [report() for report in get_reporting_integration_callbacks(args.report_to)]
        self.keeper = Keeper(Path(args.output_dir))
        self.stop, self.running_loss = StopOnSignal(self.guards.stop_grace), RunningLoss()
        self.suspect = PipelineSuspect(self) if self.guards.on_nan != "off" else None
        self.nan_guard = NanGuard(self.guards, self.suspect) if self.suspect else None
        guard = [self.nan_guard] if self.nan_guard else []
        own = [self.speed, shown, self.running_loss, SavesLast(), self.stop, *guard]
        every = [DefaultFlowCallback(), *reports, *callbacks, *own]
        self.handler = CallbackHandler(every, self.engine.module, processing_class, self.optimizer, self.scheduler)
        self.control = self.handler.on_init_end(args, self.state, self.control)

    is_deepspeed_enabled = True

    @property
    def is_first(self) -> bool:
        return bool(self.stage == 0)

    @property
    def is_last(self) -> bool:
        return bool(self.stage == self.parts.stages - 1)

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """While inside, a stage whose process is killed ends the run in words."""

        def name_of(rank: int) -> str:
            stage, pipeline = divmod(rank, self.pipelines)
            of = f" of pipeline {pipeline}" if self.pipelines > 1 else ""
            return f"rank {rank} (stage {stage} of {self.parts.stages}{of})"

        return watching(name_of, self.stop, Path(self.args.output_dir), self.guards.hang_timeout)

    def train(self, resume_from_checkpoint: str | None = None) -> TrainOutput:
        """Train to the end, and return the closing figures."""
        args, state, handler = self.args, self.state, self.handler
        epochs = math.ceil(self.max_steps / self.steps_per_epoch)
        if resume_from_checkpoint:
            state = self.state = self._resume(Path(resume_from_checkpoint))
            if self.launch.speaks:
                print(f"going on from {resume_from_checkpoint}, after step {state.global_step}", flush=True)
        state.max_steps, state.num_train_epochs = self.max_steps, epochs
        state.is_world_process_zero = self.launch.rank == 0
        state.is_local_process_zero = self.launch.local_rank == 0
        state.train_batch_size = args.train_batch_size
        state.compute_steps(args, self.max_steps)
        if args.save_strategy != SaveStrategy.NO:
            self.checkpoints.check_space(Path(args.output_dir), "before the first step", args.save_only_model)
        self.data_files = mapped_files()
        first_step = state.global_step
        self._logged_step, self._loss, self._total_loss = first_step, 0.0, 0.0
        kept, steps_before = self.running_loss, first_step
        if first_step and 0 <= kept.logged_step <= first_step:
            self._logged_step, self._loss, self._total_loss = kept.logged_step, kept.sums[0], kept.total
            steps_before = 0
        self._grad_norm: float | None = None
        start = time.monotonic()
        self.control = handler.on_train_begin(args, state, self.control)
        if first_step and ended_early(handler.callbacks):
            self.control.should_training_stop = True
        if args.eval_on_start:
            self.evaluate()
        for epoch in range(first_step // self.steps_per_epoch, epochs):
            if self.control.should_training_stop or state.global_step >= self.max_steps:
                break
            try:
                self._epoch(epoch, skipped=state.global_step - epoch * self.steps_per_epoch)
            except InterruptedRunError:
                close_trackers(handler, args, state, self.control)
                raise
        steps = state.global_step - first_step
        total = float(self._total_loss) + float(self._loss)
        metrics = speed_metrics("train", wall_clock(start), num_samples=steps * self.global_batch_size, num_steps=steps)
        metrics["train_loss"] = total / max(state.global_step - steps_before, 1)
        metrics |= self.speed.summary(self._sum_over_ranks)
        metrics["peak_memory_gib"] = max(self.peak_memory_gib_per_rank())
        self.log(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._load_best()
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
            batches = iter(self.loader(self.train_dataset, shard))
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
            items = torch.stack([self.model.items(labels) for _, labels in pairs]).sum().to(self.device)
            if self.pipelines > 1:
                distributed.all_reduce(items, group=self.grid.get_data_parallel_group())
            self.loss.items = items.clamp(min=1)
        if self.suspect:
            self.suspect.begin(some, self._loss)
        self.loss.real_rows = None
        self._learning_rate = self.scheduler.get_last_lr()[0]  # that of this step; the engine goes on to the next one's
        # The step before the one to draw gives the stages' times, from which that one is planned.
        records = self.state.global_step + 1 in (self.schedule_step - 1, self.schedule_step)
        recorder = Recorder(self.engine.module, self.loss, self.is_last)
        with recorder.recording() if records else contextlib.nullcontext():
            loss = self.engine.train_batch(None if pairs is None else iter(pairs))
        if records:
            self._note_schedule(recorder)
        self._loss = self._loss + loss.detach()
        self._grad_norm = self.engine.get_global_grad_norm()

    def _note_schedule(self, recorder: Recorder) -> None:
        """What the first pipeline did: from the first of two steps the plan, from the second the picture of both."""
        stages = intervals_of(recorder, self.grid, self.parts.stages)
        if not self.launch.speaks:
            return
        found = measured(stages, self.micro_batches)
        if self.state.global_step + 1 < self.schedule_step:
            self.planned = plan_from(found)
        else:
            write_schedule(Path(self.args.output_dir), self.planned, found)

    def loader(self, dataset: Any, shard: Any) -> Any:
        """Batches of `shard` of `dataset`, on the CPU."""
        args = self.args
        return loader(dataset, shard, self.collator, args.dataloader_num_workers, args.seed, self.device.type == "cuda")

    def _log_evaluate_save(self) -> None:
        """What the callbacks have asked for, in the Trainer's order."""
        args, state = self.args, self.state
        if self.control.should_log and state.global_step > self._logged_step:
            steps = state.global_step - self._logged_step
            logs = {"loss": float(self._loss) / steps}
            if self._grad_norm is not None:
                logs["grad_norm"] = float(self._grad_norm)
            logs["learning_rate"] = self._learning_rate
            self._total_loss = self._total_loss + self._loss
            self._loss, self._logged_step = 0.0, state.global_step
            logs |= self.speed.window(self._sum_over_ranks)
            logs |= self.nan_guard.window(state.global_step, logs["loss"]) if self.nan_guard else {}
            self.log(logs)
        if self.control.should_evaluate:
            is_best = note_best(self.args, self.state, self.evaluate())
            if args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
        if self.control.should_save:
            self._save()
            self.control = self.handler.on_save(args, state, self.control)

    def log(self, logs: dict[str, Any]) -> None:
        """Tell the callbacks: a file, the terminal, a tracker."""
        logs = {**logs, "epoch": self.state.epoch} if self.state.epoch is not None else logs
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.handler.on_log(self.args, self.state, self.control, logs)

    def evaluate(self) -> dict[str, float]:
        """The whole evaluation set, each sample once, through the pipeline; the same figures on every rank."""
        start = time.monotonic()
        sums, batches = whole_set(self)
        metrics = self.compute_metrics(EvalPrediction(predictions=sums, label_ids=None))
        metrics = {f"eval_{name}": value for name, value in metrics.items()}
        metrics |= speed_metrics("eval", wall_clock(start), num_samples=len(self.eval_dataset), num_steps=batches)
        self.log(metrics)
        self.control = self.handler.on_evaluate(self.args, self.state, self.control, metrics)
        return {**metrics, "epoch": self.state.epoch} if self.state.epoch is not None else metrics

    def forward_again(self, batches: list[dict[str, Any]]) -> None:
        """The micro-batches of a step through the pipeline, without a step; on all ranks."""
        forward(self, batches)

    def roll_back(self, folder: Path) -> None:
        """Weights and optimizer of a checkpoint; the schedule, the random states and the data go on from here."""
        schedule, states = self.scheduler.state_dict(), rng_state()
        self.checkpoints.load(folder, read_record(folder))
        self.checkpoints.load_schedule(schedule)
        set_rng_state(states)

    def _save(self) -> None:
        """A checkpoint, whole or not at all; and what --save_total_limit no longer keeps goes."""
        state, folder = self.state, Path(self.args.output_dir)
        place = folder / f"checkpoint-{state.global_step}"
        note_place_of_best(state, place)
        self.running_loss.sums, self.running_loss.total = [float(self._loss)], float(self._total_loss)
        self.running_loss.logged_step = self._logged_step
        kept = [callback for callback in self.handler.callbacks if isinstance(callback, ExportableState)]
        state.stateful_callbacks = {type(callback).__name__: callback.state() for callback in kept}
        self.checkpoints.save(place, state, self.global_batch_size, weights_only=self.args.save_only_model)
        if self.launch.speaks:
            self.keeper.trust(place)
            self.keeper.rotate(self.args.save_total_limit, place, state.best_model_checkpoint)

    def _resume(self, folder: Path) -> TrainerState:
        """Go on from a checkpoint, of whatever layout. Raises RequestError where the global batch is another."""
        with loadable(folder, self) as found:
            record = read_record(found)
            batch = record["global_batch_size"]
            if batch != self.global_batch_size:
                raise RequestError(
                    f"--resume: {folder} was trained with a global batch of {batch}, but this run makes "
                    f"{self.args.train_batch_size} x {self.micro_batches} x {self.pipelines} = "
                    f"{self.global_batch_size} (micro-batch x accumulation x pipelines). Change "
                    "--gradient_accumulation_steps or --per_device_train_batch_size so that they agree."
                )
            self.checkpoints.load(found, record)
        state = TrainerState.load_from_json(str(folder / STATE_FILE))
        restore_callbacks(self.handler.callbacks, state, self.args.restore_callback_states_from_checkpoint)
        if self.launch.speaks:
            self.keeper.go_on_from(folder, state.global_step)
        return state

    def _load_best(self) -> None:
        best = best_to_load(Path(self.args.output_dir), self.state.best_model_checkpoint)
        if best is not None:
            self.checkpoints.load_weights(best)

    def save_model(self, output_dir: str | None = None) -> None:
        """The weights as the final model into the run folder: in fp32, one part a stage, with config and tokenizer."""
        self.checkpoints.save_model(Path(output_dir or self.args.output_dir))

    def save_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """`train_results.json` or `eval_results.json`, and both in all_results.json, as the Trainer does."""
        if self.launch.speaks:
            folder = Path(self.args.output_dir)
            write_json(folder / f"{split}_results.json", metrics)
            write_json(folder / "all_results.json", {**results_of(folder), **metrics})

    def save_state(self) -> None:
        """`trainer_state.json` in the run folder."""
        if self.launch.speaks:
            self.state.save_to_json(str(Path(self.args.output_dir) / STATE_FILE))

    def peak_memory_gib_per_rank(self) -> list[float]:
        """In GiB."""
        peaks: list[Any] = [None] * self.launch.world_size
        distributed.all_gather_object(peaks, round(peak_memory_bytes() / 2**30, 3))
        return peaks

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        distributed.all_reduce(tensor)
        return tensor.cpu()
