"""The Hugging Face Trainer with seven things mended: which samples make a step, what is counted, the optimizer that
offload wants, what ranks send one another, how a run ends before its time, how it is saved and goes on, and when it is
pushed. Everything else is the Trainer's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PredictionOutput, SaveStrategy

from finetune.data.changes import UnchangedFiles, mapped_files
from finetune.data.packing import REAL_TOKENS
from finetune.data.sampling import GlobalBatchSampler
from finetune.data.streaming import TextStream
from finetune.dsconfig.load import wants_cpu_adam
from finetune.errors import InterruptedRunError
from finetune.run.flags.compression import CompressionArguments
from finetune.run.flags.guards import GuardArguments
from finetune.run.launch import accelerate_uses_fsdp
from finetune.training.checkpoints.best import best_to_load
from finetune.training.checkpoints.final import save_final
from finetune.training.checkpoints.trainer_adapter import TrainerSaves
from finetune.training.checkpoints.writing import outer_of
from finetune.training.comm_hooks.callback import CommHook
from finetune.training.epochs import Epochs
from finetune.training.guards.nan_guard import NanGuard, poisoned
from finetune.training.guards.trainer_adapter import TrainerSuspect
from finetune.training.hub import open_repo
from finetune.training.interruption import DeafToSigterm, StopOnSignal, close_trackers
from finetune.training.offload import clips_in_trainer, cpu_adam
from finetune.training.reshard.for_trainer import Reshard, load_best
from finetune.training.resuming import GoOn, RunningLoss, SavesLast, ended_early, kept_random_states, restore_callbacks
from finetune.training.saved_arguments import write_arguments
from finetune.training.speed import (
    FLOPS_PER_PARAM_AND_TOKEN,
    SpeedMeter,
    by_steady_clock,
    multiplied_parameters,
    peak_memory_bytes,
)
from finetune.training.watch import watching


class FinetuneTrainer(Trainer):
    """`lengths` are those of the training samples in tokens, to group by; None for a plain shuffle."""

    def __init__(
        self,
        *args: Any,
        lengths: Any = None,
        compression: CompressionArguments | None = None,
        guards: GuardArguments | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.guards = guards or GuardArguments(hang_timeout=0.0, on_nan="off", stop_grace=0.0)
        self.data_files, self.began = UnchangedFiles(()), 0.0
        self.progress: Callable[[], None] = lambda: None  # to be called when a batch is done
        wants_fsdp = self.args.fsdp or accelerate_uses_fsdp()
        assert self.is_fsdp_enabled or not wants_fsdp, "FSDP was asked for, and Accelerate would run DDP"
        self.lengths = lengths
        self.global_batch_size = self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        if isinstance(self.train_dataset, TextStream):
            self.train_dataset.global_batch_size = self.global_batch_size
        self.multiplied_parameters = multiplied_parameters(self.model)
        self.speed = SpeedMeter(self.multiplied_parameters, self.args.world_size)
        self.add_callback(self.speed)
        self.saves = TrainerSaves(self)
        self.running_loss = RunningLoss()
        self.add_callback(self.running_loss)
        self.add_callback(GoOn(self))
        self.add_callback(SavesLast())
        self.stop = StopOnSignal(self.guards.stop_grace)
        self.add_callback(self.stop)
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        config = plugin.deepspeed_config if plugin is not None else None
        self.clips_itself = config is not None and clips_in_trainer(config)
        if config is not None and wants_cpu_adam(config):
            self.optimizer_cls_and_kwargs = cpu_adam(self.args, config)
        self.reshard: Reshard | None = None
        self.global_batches: GlobalBatchSampler | None = None
        self.suspect = TrainerSuspect(self) if self.guards.on_nan != "off" else None
        self.nan_guard = NanGuard(self.guards, self.suspect) if self.suspect else None
        if self.nan_guard:
            self.add_callback(self.nan_guard)
        self.comm_hook = CommHook(self, compression) if compression and compression.is_on else None
        if self.comm_hook:
            self.add_callback(self.comm_hook)
            self.optimizer_cls_and_kwargs = self.comm_hook.optimizer or self.optimizer_cls_and_kwargs

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """Around a whole run. Training watches over its own ranks."""
        return contextlib.nullcontext()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. A rank that is killed is named, and a signal stops all ranks after a checkpoint."""
        checkpoint = kwargs.get("resume_from_checkpoint")
        if self.comm_hook:
            self.comm_hook.checkpoint = checkpoint
        self.data_files, self.began = mapped_files(), time.monotonic()
        if self.args.save_strategy != SaveStrategy.NO:
            self.saves.check_space("before the first step")
        if checkpoint:
            self.saves.chosen = Path(checkpoint)
            self.reshard = Reshard(self, Path(checkpoint))
            self.add_callback(self.reshard)
            kwargs["resume_from_checkpoint"] = str(self.reshard.folder)
        try:
            folder, patience = Path(self.args.output_dir), self.guards.hang_timeout
            with watching(lambda rank: f"rank {rank}", self.stop, folder, patience) as self.progress:
                return super().train(*args, **kwargs)
        except RuntimeError:
            self.data_files.check()  # a data loader's worker that met the end of a file has died of it
            raise
        except InterruptedRunError:
            close_trackers(self.callback_handler, self.args, self.state, self.control)
            raise

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            open_repo(self, lambda: super(FinetuneTrainer, self).init_hf_repo(*args, **kwargs))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The run's own card stays (finetune.training.model_card), where the Trainer would write its draft over it."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        write_arguments(Path(output_dir or self.args.output_dir), self.args)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, which would push here already, without the card (transformers 5.23, Trainer.save_model)."""
        run_folder = Path(self.args.output_dir)
        if output_dir is None or Path(output_dir) == run_folder:
            write = super().save_model
            save_final(run_folder, lambda folder: write(str(folder), _internal_call=True))
            return
        super().save_model(output_dir, _internal_call=True)
        if self.comm_hook and _internal_call and not self.args.save_only_model:
            self.comm_hook.save(Path(output_dir))  # a checkpoint

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.running_loss.note(self)
        self.saves.save(lambda: super(FinetuneTrainer, self)._save_checkpoint(model, trial))

    def _get_output_dir(self, trial: Any) -> str:
        """Where the Trainer may write and delete checkpoints: beside the one that is being written it finds none, so
        that rotation is left to ours, also at the end of the training (transformers 5.23, _finalize_training)."""
        return str(outer_of(self.saves.place))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Once, at the end of the run (finetune.training.hub)."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As the Trainer's, which has just let DeepSpeed load; and what DeepSpeed leaves out at another layout."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.reshard and checkpoint:
            self.reshard.mend()

    def _load_best_model(self) -> None:
        """As the Trainer's, of a checkpoint that verifies; and it may be of another layout."""
        best = best_to_load(Path(self.args.output_dir), self.state.best_model_checkpoint)
        if best is not None:
            self.state.best_model_checkpoint = str(best)
            if not load_best(self, best):
                super()._load_best_model()

    def create_optimizer(self, model: Any = None) -> Any:
        is_new = self.optimizer is None  # the Trainer asks more than once
        optimizer = super().create_optimizer(model)
        if is_new and self.clips_itself:
            optimizer.register_step_pre_hook(self._clip)
        return optimizer

    def _clip(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Clip, and leave the norm where DeepSpeed's engine looks for it after a step (engine.py, _take_model_step)."""
        gradients = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        optimizer._global_grad_norm = torch.nn.utils.clip_grad_norm_(gradients, self.args.max_grad_norm or float("inf"))
        if self.suspect and self.suspect.saw(optimizer._global_grad_norm):
            optimizer.zero_grad(set_to_none=True)  # without gradients it changes nothing

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Steps that do not depend on the number of processes (see GlobalBatchSampler); nothing for a stream."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return None
        args = self.args
        seed = args.data_seed if args.data_seed is not None else args.seed
        sampler = GlobalBatchSampler(len(dataset), self.global_batch_size, seed, self.lengths)
        self.add_callback(Epochs(sampler, dataset))
        self.global_batches = sampler
        return sampler

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        own = getattr(loader, "base_dataloader", loader)  # accelerate's stands around it
        own.worker_init_fn = DeafToSigterm(own.worker_init_fn)
        return loader

    def _load_callback_state(self) -> None:
        restore_callbacks(
            self.callback_handler.callbacks, self.state, self.args.restore_callback_states_from_checkpoint
        )

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """As the Trainer's, but no epoch is left where --max_steps have been had, or early stopping has stopped: a run
        that is resumed at its end would take a step more (transformers 5.23, Trainer._run_epoch looks at the number of
        steps after each of them)."""
        began = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        resumed = resume_from_checkpoint is not None
        self.state.compute_steps(self.args, max_steps)  # which the checkpoint's have overruled
        if resumed and self.is_world_process_zero():
            self.saves.go_on()
            print(f"going on from {self.saves.chosen}, after step {self.state.global_step}", flush=True)
        is_over = self.state.global_step >= max_steps or ended_early(self.callback_handler.callbacks)
        return (epochs, 0) if resumed and is_over else began

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; what is learnt after it does not depend on it."""
        with kept_random_states():
            return super().evaluation_loop(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        self.data_files.look()
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.suspect:
            self.suspect.begin(samples, items)
        return samples, items

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        given = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        return poisoned(given) if self.suspect and not return_outputs and torch.is_grad_enabled() else given

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.suspect and not self.is_deepspeed_enabled and self.suspect.saw(norm) and not self.suspect.is_scaled():
            self.optimizer.zero_grad(set_to_none=True)  # without gradients it changes nothing
        return norm

    @property
    def shards_weights(self) -> bool:
        """True under ZeRO-3 and FSDP."""
        return bool(self.is_fsdp_enabled or is_deepspeed_zero3_enabled())

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As the Trainer's, but labels that are numbers keep their digits: under DeepSpeed with bf16 or fp16 every
        float is cast (transformers 5.23, Trainer._prepare_input), and 1234 would be learnt as 1232."""
        labels = inputs.get("labels")
        prepared = super()._prepare_inputs({name: value for name, value in inputs.items() if name != REAL_TOKENS})
        if labels is not None and labels.is_floating_point():
            prepared["labels"] = labels.to(self.args.device)
        return dict(prepared)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """As the Trainer's; of a language model the figures of each row alone, for labels of all tokens of a large
        evaluation set would be kept on the device to its end."""
        self.progress()
        self.data_files.look()
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if self.preprocess_logits_for_metrics is not None and logits is not None and labels is not None:
            return loss, self.preprocess_logits_for_metrics(logits, labels), labels[:, :1]
        return loss, logits, labels

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.progress()
        self.speed.count(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.suspect:
            self.suspect.losses.append(loss)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the Trainer's, but the parameters are counted once, not before every step."""
        read = inputs["input_ids"].numel() if "input_ids" in inputs else len(inputs[self.model.main_input_name])
        return FLOPS_PER_PARAM_AND_TOKEN * int(read) * self.multiplied_parameters

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the speed since the last log, and to the closing one that of the whole run. Called on every rank, as the
        sums over ranks need. `logs` is added to in place, for the Trainer returns the closing one from `train`."""
        if "loss" in logs:
            logs.update(self.speed.window(self._sum_over_ranks))
            logs.update(self.comm_hook.window() if self.comm_hook else {})
            logs.update(self.nan_guard.window(self.state.global_step, logs["loss"]) if self.nan_guard else {})
        elif "train_runtime" in logs:
            logs.update(by_steady_clock(logs, time.monotonic() - self.began))
            logs.update(self.speed.summary(self._sum_over_ranks))
            logs.update(self.comm_hook.summary() if self.comm_hook else {})
            if self.running_loss.logged_step >= 0:  # of all steps, whichever launch took them
                logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
            logs["peak_memory_gib"] = max(self.peak_memory_gib_per_rank())
        super().log(logs, start_time)

    def peak_memory_gib_per_rank(self) -> list[float]:
        """In GiB; every rank must call it."""
        own = torch.tensor([peak_memory_bytes() / 2**30], dtype=torch.float32, device=self.args.device)
        return [round(float(peak), 3) for peak in self.accelerator.gather(own).tolist()]

    def predict_in_input_order(self, dataset: Any, metric_key_prefix: str = "predict") -> PredictionOutput:
        """As `predict`, with batches of like length inside, and rows out in the order in which they came in."""
        order = np.argsort(-np.asarray(dataset["length"]), kind="stable")
        output = self.predict(dataset.select(order), metric_key_prefix=metric_key_prefix)
        back = np.argsort(order)
        first = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        truth = None if output.label_ids is None else output.label_ids[back]
        return PredictionOutput(first[back], truth, output.metrics)

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor.float(), reduction="sum").double().cpu()


def early_stopping(arguments: Any) -> list[TrainerCallback]:
    """What --early_stopping_patience asks for."""
    patience = arguments.early_stopping_patience
    return [EarlyStoppingCallback(patience)] if patience else []
