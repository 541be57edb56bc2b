"""The Hugging Face Trainer with six things mended: which samples make a step, what is counted, the optimizer that
offload wants, what ranks send one another, how a run ends before its time, and when it is pushed. Everything else is
the Trainer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_utils import PredictionOutput

from finetune.data.image_samples import Pictures
from finetune.data.packing import REAL_TOKENS
from finetune.data.sampling import GlobalBatchSampler
from finetune.data.streaming import TextStream
from finetune.dsconfig.load import wants_cpu_adam, wants_trainer_clipping
from finetune.errors import InterruptedRunError
from finetune.training.comm_hooks.arguments import CompressionArguments
from finetune.training.comm_hooks.callback import CommHook
from finetune.training.engine import accelerate_uses_fsdp
from finetune.training.hub import open_repo
from finetune.training.interruption import DeafToSigterm, StopOnSignal, close_trackers
from finetune.training.speed import FLOPS_PER_PARAM_AND_TOKEN, SpeedMeter, multiplied_parameters, peak_memory_bytes
from finetune.training.watch import watching


class FinetuneTrainer(Trainer):
    """`lengths` are those of the training samples in tokens, to group by; None for a plain shuffle."""

    def __init__(
        self, *args: Any, lengths: Any = None, compression: CompressionArguments | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        wants_fsdp = self.args.fsdp or accelerate_uses_fsdp()
        assert self.is_fsdp_enabled or not wants_fsdp, "FSDP was asked for, and Accelerate would run DDP"
        self.lengths = lengths
        self.global_batch_size = self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        if isinstance(self.train_dataset, TextStream):
            self.train_dataset.global_batch_size = self.global_batch_size
        self.multiplied_parameters = multiplied_parameters(self.model)
        self.speed = SpeedMeter(self.multiplied_parameters, self.args.world_size)
        self.add_callback(self.speed)
        self.stop = StopOnSignal()
        self.add_callback(self.stop)
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        config = plugin.deepspeed_config if plugin is not None else None
        self.clips_itself = config is not None and wants_trainer_clipping(config)
        if config is not None and self.clips_itself:
            config["gradient_clipping"] = 0.0  # once is enough
        if config is not None and wants_cpu_adam(config):
            self.optimizer_cls_and_kwargs = _cpu_adam(self.args)
        self.comm_hook = CommHook(self, compression) if compression and compression.is_on else None
        if self.comm_hook:
            self.add_callback(self.comm_hook)
            self.optimizer_cls_and_kwargs = self.comm_hook.optimizer or self.optimizer_cls_and_kwargs

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. A rank that is killed is named, and a signal stops all ranks after a checkpoint."""
        if self.comm_hook:
            self.comm_hook.checkpoint = kwargs.get("resume_from_checkpoint")
        try:
            with watching(lambda rank: f"rank {rank}", self.stop):
                return super().train(*args, **kwargs)
        except InterruptedRunError:
            close_trackers(self.callback_handler, self.args, self.state, self.control)
            raise

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            open_repo(self, lambda: super(FinetuneTrainer, self).init_hf_repo(*args, **kwargs))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The run's own card stays (finetune.training.model_card), where the Trainer would write its draft over it."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, which would push here already, without the card (transformers 5.23, Trainer.save_model)."""
        super().save_model(output_dir, _internal_call=True)
        if self.comm_hook and _internal_call and output_dir and not self.args.save_only_model:
            self.comm_hook.save(Path(output_dir))  # a checkpoint, before the file that says it is whole

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

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Steps that do not depend on the number of processes (see GlobalBatchSampler); nothing for a stream."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return None
        args = self.args
        seed = args.data_seed if args.data_seed is not None else args.seed
        sampler = GlobalBatchSampler(len(dataset), self.global_batch_size, seed, self.lengths)
        self.add_callback(_Epochs(sampler, dataset))
        return sampler

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        own = getattr(loader, "base_dataloader", loader)  # accelerate's stands around it
        own.worker_init_fn = DeafToSigterm(own.worker_init_fn)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """No batches where --max_steps have been had: a run that is resumed at its end would take a step more
        (transformers 5.23, Trainer._run_epoch looks at the number of steps after each of them)."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return samples, items

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
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if self.preprocess_logits_for_metrics is not None and logits is not None and labels is not None:
            return loss, self.preprocess_logits_for_metrics(logits, labels), labels[:, :1]
        return loss, logits, labels

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.speed.count(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

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
        elif "train_runtime" in logs:
            logs.update(self.speed.summary(self._sum_over_ranks))
            logs.update(self.comm_hook.summary() if self.comm_hook else {})
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


class _Epochs(TrainerCallback):
    """Tells the sampler which epoch it is, and pictures that change with it. accelerate 1.15 does not reach the sampler
    in a run of several ranks that is resumed inside an epoch: SkipBatchSampler and BatchSamplerShard both stand between
    (data_loader.py, DataLoaderShard)."""

    def __init__(self, sampler: GlobalBatchSampler, dataset: Any) -> None:
        self.sampler, self.dataset = sampler, dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int(state.epoch or 0)
        self.sampler.set_epoch(epoch)
        if isinstance(self.dataset, Pictures):
            self.dataset.begin_epoch(epoch)


def _cpu_adam(args: Any) -> tuple[Any, dict[str, Any]]:
    """DeepSpeed's AdamW for states in CPU memory, with the Trainer's weight-decay groups: a section in the JSON would
    put weight decay on biases and norms too (transformers, integrations/deepspeed.py, deepspeed_optim_sched)."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    betas = (args.adam_beta1, args.adam_beta2)
    return DeepSpeedCPUAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "adamw_mode": True}
