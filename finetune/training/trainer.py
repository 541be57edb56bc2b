"""Any Hugging Face Trainer with seven changes: which samples make a step, what is counted, the optimizer's groups and
offload, what ranks send one another, how a run stops early, how it is saved and resumed, and when it is pushed.

    class Seq2Seq(FinetuneMixin, Seq2SeqTrainer): ...
    class SFT(FinetuneMixin, trl.SFTTrainer): ...

tests/upstream/ lists every override with its reason; a test checks them against new releases."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import SaveStrategy

from finetune.data.changes import UnchangedFiles, mapped_files
from finetune.data.packing import REAL_TOKENS
from finetune.data.sampling import GlobalBatchSampler, sampler_of
from finetune.data.streaming import TextStream
from finetune.dsconfig.load import wants_cpu_adam, wants_trainer_clipping
from finetune.errors import InterruptedRunError, RequestError
from finetune.models.experts import WATCHED
from finetune.models.multiplied import multiplied_parameters
from finetune.run.flags.compression import CompressionArguments
from finetune.run.flags.guards import GuardArguments
from finetune.training.checkpoints.choice import newest_verified
from finetune.training.checkpoints.identity import Identity
from finetune.training.checkpoints.saves import Saves
from finetune.training.checkpoints.trainer_adapter import TrainerSaved
from finetune.training.compression import Compression, OneBitAdam
from finetune.training.distilling import Teacher
from finetune.training.evaluation import EvaluatingMixin
from finetune.training.expert_parallel import ExpertParallel
from finetune.training.guards.nan_guard import NanGuard, poisoned
from finetune.training.guards.trainer_adapter import TrainerSuspect
from finetune.training.interruption import StopOnSignal, close_trackers, deaf_to_sigterm
from finetune.training.loss import settle_trainer
from finetune.training.reshard.resuming import Reshard
from finetune.training.resuming import Epochs, GoOn, OwnSettings, SavesLast
from finetune.training.running_loss import RunningLoss
from finetune.training.runtime import cpu_adam, settle_fsdp
from finetune.training.saving import SavingMixin, check_push
from finetune.training.schedules import OURS, make_schedule
from finetune.training.sequence_parallel import SequenceParallel
from finetune.training.speed import FLOPS_PER_PARAM_AND_TOKEN, SpeedMeter, by_steady_clock, peak_memory_bytes
from finetune.training.touched_rows import TouchedRows
from finetune.training.watch import watching


class FinetuneMixin(EvaluatingMixin, SavingMixin):
    """List it before the Trainer's class. `lengths` are those of the training samples in tokens, to group by; None for
    a plain shuffle."""

    lr_scheduler: Any  # the Trainer's

    def __init__(
        self,
        *args: Any,
        lengths: Any = None,
        compression: CompressionArguments | None = None,
        guards: GuardArguments | None = None,
        sequence_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sequence = SequenceParallel(sequence_parallel_size, self.args, self.accelerator)
        self.expert_parallel = ExpertParallel(expert_parallel_size, self) if expert_parallel_size > 1 else None
        self.guards = guards or GuardArguments(hang_timeout=0.0, on_nan="off", stop_grace=0.0, async_save="off")
        self.data_files, self.began = UnchangedFiles(()), 0.0
        self.progress: Callable[[], None] = lambda: None  # called when a batch is done
        settle_fsdp(self)
        # As views of DDP's buckets, gradients are not kept twice and not copied back (torch 2.13, reducer.cpp).
        self.accelerator.ddp_handler.gradient_as_bucket_view = True
        check_push(self.args)
        if super().compute_loss.__func__ is Trainer.compute_loss:  # TRL's trainers have their own losses
            settle_trainer(self)
        self.lengths = lengths
        self.teacher: Teacher | None = None  # its divergence is part of the training loss
        self.global_batch_size = self.get_total_train_batch_size(self.args)
        if isinstance(self.train_dataset, TextStream):
            self.train_dataset.global_batch_size = self.global_batch_size
        self.multiplied_parameters = multiplied_parameters(self.model)
        self.speed = SpeedMeter(self.multiplied_parameters, self.args.world_size, self.sequence.size)
        self.saves = Saves(self, TrainerSaved(self))
        self.running_loss, self.clips_itself = RunningLoss(getattr(self.model, WATCHED, None)), False
        self.stop = StopOnSignal(self.guards.stop_grace)
        self.own_norm: torch.Tensor | None = None  # of the gradients, if `clips_itself`
        if self.is_deepspeed_enabled:
            self._settle_deepspeed(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        self.reshard: Reshard | None = None
        self.identity: Identity | None = None  # what checkpoints record about the run
        self.own_settings: OwnSettings | None = None  # of the optimizer, if the run is resumed
        self.sampler: GlobalBatchSampler | None = None
        self.suspect = TrainerSuspect(self) if self.guards.on_nan != "off" else None
        self.nan_guard = NanGuard(self.guards, self.suspect) if self.suspect else None
        self.comm_hook = Compression(compression, self) if compression and compression.is_on else None
        if compression and compression.ddp_comm_hook == "onebit_adam":
            self.optimizer_cls_and_kwargs = OneBitAdam, self.get_optimizer_cls_and_kwargs(self.args)[1]
        always = (self.sequence, self.speed, self.running_loss, GoOn(self), self.saves.beside, SavesLast(), self.stop)
        for callback in filter(None, (*always, TouchedRows(self), self.nan_guard, self.comm_hook)):
            self.add_callback(callback)

    def _settle_deepspeed(self, config: dict[str, Any]) -> None:
        """Settle what the Trainer does instead of DeepSpeed."""
        # accelerate 1.15 would set it to DeepSpeed's itself, with a warning: the Trainer tells it 1 (5.23, trainer.py).
        self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps
        if wants_trainer_clipping(config):
            self.clips_itself = True
            config["gradient_clipping"] = 0.0  # once is enough
        # Ranks have agreed on the step, which the tag is made of.
        config.setdefault("checkpoint", {}).setdefault("tag_validation", "Ignore")
        if wants_cpu_adam(config):
            self.optimizer_cls_and_kwargs = cpu_adam(self.args)
            # accelerate 1.15 would rebuild it as Adam, which decays weights through the gradient: it only recognizes
            # torch's class as AdamW (utils/deepspeed.py, map_pytorch_optim_to_deepspeed).
            config["zero_force_ds_cpu_optimizer"] = False

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """Around a whole run; does nothing, as `train` watches its own ranks."""
        return contextlib.nullcontext()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's; True means the newest checkpoint that verifies. A killed rank is named, and a signal
        stops all ranks after a checkpoint."""
        run_folder, guards = Path(self.args.output_dir), self.guards
        checkpoint = newest_verified(run_folder) if resume_from_checkpoint is True else resume_from_checkpoint
        self.data_files, self.began = mapped_files(), time.monotonic()
        if self.args.save_strategy != SaveStrategy.NO:
            self.saves.check_space("before the first step")
            self.saves.beside.choose(self.guards.async_save)
        self.saves.chosen = self.reshard = self.evaluated = None
        if checkpoint:
            self.saves.chosen = Path(checkpoint)
            self.reshard = Reshard(self, self.saves.chosen)
            self.add_callback(self.reshard)
        try:
            watched = watching(
                lambda rank: f"rank {rank}", self.stop, run_folder, guards.hang_timeout, guards.hang_blame
            )
            with self.sequence.attending(self.model), watched as self.progress:
                output = super().train(str(self.reshard.folder) if self.reshard else None, *args, **kwargs)
            return output._replace(training_loss=output.metrics["train_loss"])  # over all launches, as in `log`
        except RuntimeError:
            self.data_files.check()  # a data loader's worker dies if its file was truncated
            raise
        except InterruptedRunError:
            close_trackers(self.callback_handler, self.args, self.state, self.control)
            raise
        finally:
            self.saves.beside.close(gives_time=True)
            self.stop.end_grace()

    def create_optimizer(self, model: Any = None) -> Any:
        is_new = self.optimizer is None  # the Trainer calls it more than once
        optimizer = super().create_optimizer(model)
        if self.expert_parallel:
            self.expert_parallel.split_groups(optimizer)
        if is_new and self.clips_itself:
            optimizer.register_step_pre_hook(self._clip)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Like the Trainer's, which calls it between building the optimizer and loading a checkpoint into it."""
        if self.reshard:
            self.own_settings = OwnSettings.of(optimizer or self.optimizer)
        if self.lr_scheduler is None and self.args.lr_scheduler_type in OURS:
            self.lr_scheduler = make_schedule(self.args, optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Like the Trainer's, but ranks that share a text count once."""
        return int(super().get_total_train_batch_size(args)) // self.sequence.size

    def _clip(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """DeepSpeed's engine steps inside its backward pass; the Trainer asks for the norm after that."""
        gradients = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.own_norm = torch.nn.utils.clip_grad_norm_(gradients, self.args.max_grad_norm or float("inf"))
        if self.suspect and self.suspect.saw(self.own_norm):
            optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Steps that do not depend on the number of processes (see GlobalBatchSampler); nothing for a stream."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return None
        if self.lengths is not None and len(self.lengths) != len(dataset):
            raise RequestError(
                f"lengths are of {len(self.lengths)} samples, but the training set has {len(dataset)}: it was packed "
                "or filtered after they were measured. Leave them out, or measure the final training set."
            )
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = sampler_of(dataset, self.global_batch_size, seed, self.lengths)
        self.add_callback(Epochs(sampler, dataset))
        self.sampler = sampler
        return self.sequence.sampler(sampler)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        own = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
        own.collate_fn = self.sequence.collator(own.collate_fn)
        own.worker_init_fn = functools.partial(deaf_to_sigterm, own.worker_init_fn)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        self.data_files.look()
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.suspect:
            self.suspect.begin(samples, items)
        return samples, items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.sequence.begin(inputs, self.model)
        model = beside.beside(model) if (beside := self.teacher or self.running_loss.sources) else model
        given = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return poisoned(given) if self.suspect and not return_outputs and torch.is_grad_enabled() else given

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.clips_itself:
            return None if self.own_norm is None else self.own_norm.item()
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.suspect and not self.is_deepspeed_enabled and self.suspect.saw(norm) and not self.suspect.is_scaled():
            self.optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing
        return norm

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a forward pass is collective: under ZeRO-3, FSDP and expert parallelism."""
        return bool(self.is_fsdp_enabled or is_deepspeed_zero3_enabled() or self.expert_parallel)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Like the Trainer's, but float labels keep their precision: under DeepSpeed with bf16 or fp16 every float is
        cast (transformers 5.23, Trainer._prepare_input), and 1234 would become 1232."""
        labels = inputs.get("labels")
        prepared = super()._prepare_inputs({name: value for name, value in inputs.items() if name != REAL_TOKENS})
        if labels is not None and labels.is_floating_point():
            prepared["labels"] = labels.to(self.args.device)
        return dict(prepared)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.progress()
        self.speed.count(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.running_loss.add(loss, self.state.global_step, self.args.logging_nan_inf_filter)
        if self.suspect:
            self.suspect.losses.append(loss)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Like the Trainer's, but the parameters are counted once, not before every step."""
        read = inputs["input_ids"].numel() if "input_ids" in inputs else find_batch_size(inputs) or 0
        return FLOPS_PER_PARAM_AND_TOKEN * int(read) * self.multiplied_parameters

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the speed since the last log, and to the closing log that of the whole run. Called on every rank, because
        it sums over ranks. Changes `logs` in place, because the Trainer returns the closing one from `train`."""
        if "loss" in logs:
            logs["loss"] = self.running_loss.window(self.state.global_step, self.accelerator.gather)
            logs.update(self.running_loss.window_of_sources(self.accelerator.gather))
            logs.update(self.speed.window(self._sum_over_ranks))
            logs.update(self.teacher.window(self._sum_over_ranks) if self.teacher else {})
            logs.update(self.comm_hook.figures("window") if self.comm_hook else {})
            logs.update(self.nan_guard.window(self.state.global_step, logs["loss"]) if self.nan_guard else {})
        elif "train_runtime" in logs:
            logs.update(by_steady_clock(logs, time.monotonic() - self.began))
            logs.update(self.speed.summary(self._sum_over_ranks))
            logs.update(self.comm_hook.figures("", "compressed_") if self.comm_hook else {})
            logs["train_loss"] = self.running_loss.mean(self.state.global_step, self.accelerator.gather)
            logs["peak_memory_gib"] = max(self.peak_memory_gib_per_rank())
        super().log(logs, start_time)

    def peak_memory_gib_per_rank(self) -> list[float]:
        """The peak memory of each rank, in GiB; every rank must call it."""
        own = torch.tensor([peak_memory_bytes() / 2**30], dtype=torch.float32, device=self.args.device)
        return [round(float(peak), 3) for peak in self.accelerator.gather(own).tolist()]

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor.float(), reduction="sum").double().cpu()


class FinetuneTrainer(FinetuneMixin, Trainer):
    """The Trainer that recipes use."""
