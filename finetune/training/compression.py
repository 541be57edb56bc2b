"""Gradient compression between ranks with DDP's communication hooks: torch's fp16, bf16 and PowerSGD, and 1-bit Adam.

1-bit Adam (arXiv 2102.02888, algorithm 1) is AdamW up to a freeze step. After it the variance is frozen, DDP's hook
sends nothing, each rank adds its own gradient to the momentum, and `OneBitAdam.step` averages the momentum in two
compressed stages. Not in the paper: one scale per 64 elements, and a bound on gradients and steps
(docs/compression.md).
"""
# No `from __future__ import annotations`: DDP compares hooks' annotations with classes (torch 2.13, _check_comm_hook).

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from finetune.run.flags.compression import CompressionArguments, check_freeze
from finetune.training.checkpoints.writing import every

CASTS: dict[str, Any] = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
KEPT = {"powersgd": ("error_dict", "p_memory_dict", "q_memory_dict"), "onebit_adam": ("worker", "server", "longer")}
HALF_BYTES, FP32_BYTES = 2, 4
BLOCK = 64  # elements per bfloat16 scale: 1 + 16/64 = 1.25 bits per element are sent, 1/25.6 of fp32
BLOCK_BYTES = BLOCK // 8 + 2
GATHER = sum(1 << (56 - 7 * i) for i in range(8))  # eight bytes of 0 or 1, times this: the highest byte has their bits


def encode(values: torch.Tensor) -> torch.Tensor:
    """Encode float32 values (R, N), N a multiple of 64, as bytes (R, N / 64 * 10): first all signs, bit i % 8 of byte
    i / 8 set for values >= 0; then each block's mean absolute value, the scale with the least squared error."""
    scales = values.view(len(values), -1, BLOCK).abs().mean(dim=2).to(torch.bfloat16)
    signs = (((values >= 0).view(torch.uint8).view(torch.int64) * GATHER) >> 56).to(torch.uint8)
    return torch.cat([signs, scales.view(torch.uint8)], dim=1)


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """Float32 values (R, N) from `encode`'s bytes."""
    size = encoded.shape[1] // BLOCK_BYTES * (BLOCK // 8)
    every = torch.arange(256, device=encoded.device)[:, None] >> torch.arange(8, device=encoded.device)
    signs = ((every & 1).float() * 2 - 1)[encoded[:, :size].int()]  # (R, N / 8, 8)
    scales = encoded[:, size:].contiguous().view(torch.bfloat16).float()
    return (signs.view(len(encoded), -1, BLOCK) * scales[:, :, None]).view(len(encoded), -1)


class OneBitAdam(torch.optim.AdamW):
    """AdamW for `freeze_step` steps (None: not yet known), then 1-bit Adam over all ranks."""

    freeze_step: int | None = None
    longer: Any = 1.0  # own gradient's norm / the mean gradient's; divides what is clipped after the freeze
    steps_taken = 0
    momentum: torch.Tensor | None = None  # of all parameters, in fp32; the optimizer state holds views of it
    worker: torch.Tensor | None = None  # (ranks, chunk): compression error of what this rank sends
    server: torch.Tensor | None = None  # (1, chunk): compression error of the chunk that this rank averages for all

    @property
    def is_frozen(self) -> bool:
        """True if the next step uses the frozen variance."""
        return self.freeze_step is not None and self.steps_taken >= self.freeze_step

    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the Trainer gives none, and a second backward pass would be exchanged, too"
        if self.is_frozen:
            with torch.no_grad():
                self._step_by_frozen_variance()
        else:
            super().step()
        self.steps_taken += 1

    def _freeze(self) -> torch.Tensor:
        """Return the flat momentum of all parameters that had a gradient; keep sqrt(v / (1 - b2^T)) + eps of each."""
        every = [(p, group) for group in self.param_groups for p in group["params"] if p in self.state]
        pairs = [(p, group) for p, group in every if self.state[p]["exp_avg_sq"].any()]
        flat = torch.cat([self.state[p]["exp_avg"].reshape(-1).float() for p, _ in pairs])
        self._parts = []
        for (p, group), momentum in zip(pairs, flat.split([p.numel() for p, _ in pairs]), strict=True):
            state, beta = self.state[p], group["betas"][1]
            known = 1 - beta ** int(self.freeze_step or 0)
            variance = state["exp_avg_sq"].reshape(-1).float() / known
            # Elements without a gradient so far (a word not seen yet) have variance 0; dividing by it is unbounded.
            root = torch.where(variance > 0, variance, variance.mean()).sqrt_().add_(group["eps"])
            state["exp_avg"] = momentum.view_as(state["exp_avg"])
            # In Adam |gradient| <= sqrt(v) / sqrt(1 - b2), because v includes the gradient's square.
            self._parts.append((p, group, momentum, root, math.sqrt(known / (1 - beta))))
        return flat

    def _step_by_frozen_variance(self) -> None:
        if self.momentum is None:
            self.momentum = self._freeze()
        for p, group, momentum, root, longest in self._parts:
            momentum.mul_(group["betas"][0])
            if p.grad is not None:
                bound, gradient = root * longest, p.grad.reshape(-1).float() * self.longer
                momentum.add_(gradient.clamp_(-bound, bound), alpha=1 - group["betas"][0])
        if distributed.is_initialized():
            self.exchange(self.momentum)
        for p, group, momentum, root, longest in self._parts:
            self.state[p]["step"] += 1
            unbiased = (momentum / root).div_(1 - group["betas"][0] ** (self.steps_taken + 1))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(unbiased.clamp_(-longest, longest).view_as(p).to(p.dtype), alpha=float(group["lr"]))

    def exchange(self, values: torch.Tensor) -> None:
        """Replace the flat float32 `values` by their mean over ranks, sending one bit per element each way."""
        ranks, elements = distributed.get_world_size(), values.numel()
        if self.worker is None or self.server is None:
            chunk = -(-elements // (BLOCK * ranks)) * BLOCK
            self.worker, self.server = values.new_zeros(ranks, chunk), values.new_zeros(1, chunk)
        flat = self.worker.view(-1)
        flat[:elements] += values
        if tail := elements % BLOCK:  # padding must not lower the last block's scale
            flat[elements : elements - tail + BLOCK] = flat[elements - tail : elements].abs().mean()
        sent = encode(self.worker)
        self.worker -= decode(sent)
        flat[elements:] = 0.0  # padding has no error to carry over
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        self.server += decode(received).mean(dim=0)
        answer = encode(self.server)
        self.server -= decode(answer)
        # Not all_gather_into_tensor: torch 2.13 deprecates the name, and torch 2.6 lacks the new one.
        distributed.all_gather(list(received), answer[0])
        values.copy_(decode(received).view(-1)[:elements])

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().state_dict()
        freeze = self.freeze_step if self.is_frozen else None
        found["param_groups"][0] |= {"longer": float(self.longer), "freeze_step": freeze}  # rank 0's values
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps_taken = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        self.momentum = None
        group = self.param_groups[0]
        self.longer, self.freeze_step = group.pop("longer", 1.0), group.pop("freeze_step", None)


class Compression(TrainerCallback):
    """The communication hook of one model: what it sends, keeps and counts."""

    def __init__(self, arguments: CompressionArguments, trainer: Any = None) -> None:
        self.arguments, self.hook, self.trainer = arguments, arguments.ddp_comm_hook, trainer
        self.steps = self.start = 0  # steps done, and the number of steps that send uncompressed gradients
        self.keeper: Any = None
        self._own: list[torch.Tensor] = []  # squared gradient norms by bucket: this rank's, and below the mean's
        self._mean: list[torch.Tensor] = []
        self._counts: dict[str, Counter[str]] = {period: Counter() for period in ("window", "", "compressed_")}
        if self.hook == "powersgd" and trainer:
            # Otherwise DDP rebuilds its buckets after the first step, but torch stores errors by bucket number.
            trainer.accelerator.ddp_handler.find_unused_parameters = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """By now the model is wrapped and any checkpoint loaded."""
        check_freeze(self.arguments, state.max_steps, args.get_warmup_steps(state.max_steps))
        outer = self.trainer.optimizer  # accelerate wraps the Trainer's optimizer
        self.attach(self.trainer.model_wrapped, getattr(outer, "optimizer", outer), state.max_steps)
        checkpoint = self.trainer.saves.chosen
        said = self.restore(checkpoint, state.global_step) if checkpoint else ""
        if state.is_world_process_zero:
            matrices = f"as matrices of rank {self.arguments.powersgd_rank}"
            later = "momentum, one bit per element" if self.onebit else matrices
            form = f"uncompressed until step {self.start}, then {later}" if self.keeper is not None else self.hook
            print(said + "\n" * bool(said) + f"gradients: {form} (--ddp_comm_hook {self.hook})", flush=True)

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, max_steps: int) -> None:
        """With `onebit_adam` the optimizer must be a OneBitAdam; the other hooks take any."""
        self.start, self.device = self.arguments.start_step(max_steps), next(model.parameters()).device
        self.onebit = optimizer if isinstance(optimizer, OneBitAdam) else None
        if self.hook == "powersgd":
            # Without the epsilon a column of zeros (a parameter without a gradient) would become NaN.
            self.keeper = PowerSGDState(None, self.arguments.powersgd_rank, 2, orthogonalization_epsilon=1e-8)
            self.keeper.iter = 2  # `exchange` sends the uncompressed gradients of the first steps itself
        if self.onebit:
            self.keeper = self.onebit
            if self.onebit.freeze_step is None:  # no checkpoint had one: as asked, or now if that is later
                self.onebit.freeze_step = max(self.start, self.onebit.steps_taken)
            self.start = self.onebit.freeze_step
        model.register_comm_hook(self, Compression.exchange)

    def exchange(self, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook: a future whose result replaces the bucket's gradients."""
        buffer = bucket.buffer()
        if self.hook in CASTS:
            self._count(buffer.numel(), HALF_BYTES * buffer.numel())
            return CASTS[self.hook](distributed.group.WORLD, bucket)
        if not self.onebit.is_frozen if self.onebit else self.steps < self.start:
            self._count(buffer.numel(), buffer.nbytes)
            self._own.append(buffer.float().square().sum())
            work = distributed.all_reduce(buffer.div_(distributed.get_world_size()), async_op=True)
            return work.get_future().then(self._measured)
        if self.onebit:
            return _done(buffer.div_(self.onebit.longer))  # this rank's own; OneBitAdam.step exchanges
        before = self.keeper.total_numel_after_compression
        future = powerSGD_hook(self.keeper, bucket)
        self._count(buffer.numel(), (self.keeper.total_numel_after_compression - before) * buffer.element_size())
        # Gloo's threads would start the second round of several buckets in an order that differs between ranks.
        return _done(future.wait()) if distributed.get_backend() == "gloo" else future

    def _measured(self, future: Any) -> torch.Tensor:
        mean: torch.Tensor = future.value()[0]
        self._mean.append(mean.float().square().sum())
        return mean

    def _count(self, elements: int, sent: float) -> None:
        """Count elements exchanged and bytes of their encoding; a rank of a ring sends 2 (N-1)/N times these bytes."""
        ring = 2 * (distributed.get_world_size() - 1) / distributed.get_world_size()
        for period in self._periods():
            self._counts[period].update(sent=ring * sent, whole=ring * elements * FP32_BYTES)

    def _periods(self) -> list[str]:
        return ["window", ""] + ["compressed_"] * (self.steps >= self.start)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Called after the optimizer's step."""
        if self.onebit and not self._own and self.onebit.momentum is not None:
            self._count(self.onebit.momentum.numel(), self.keeper.worker.numel() / BLOCK * BLOCK_BYTES)
        elif self.onebit and self._own:
            longer = (sum(self._own) / sum(self._mean).clamp(min=1e-30)).sqrt().clamp(1, distributed.get_world_size())
            self.onebit.longer = longer.lerp(torch.as_tensor(self.onebit.longer).to(longer), 0.9 if self.steps else 0.0)
        self._own, self._mean = [], []
        for period in self._periods():
            self._counts[period]["steps"] += 1
        self.steps += 1

    def figures(self, *periods: str) -> dict[str, float]:
        """What a rank has sent since the last call ("window"), in total (""), and since compression began
        ("compressed_")."""
        found = {}
        for period in periods:
            name, counts = "comm_" + period.replace("window", ""), self._counts[period]
            if counts["steps"]:
                found[name + "bytes_per_step"] = counts["sent"] / counts["steps"]
                found[name + "share_of_fp32"] = counts["sent"] / counts["whole"]
        self._counts["window"] = Counter()
        return found

    def _file(self) -> str:
        """Each rank keeps its own errors; only the same hook on the same number of ranks can use them."""
        rank = f"-{self.arguments.powersgd_rank}" if self.hook == "powersgd" else ""
        return f"comm_hook_{self.hook}{rank}_{distributed.get_rank()}_of_{distributed.get_world_size()}.pt"

    def save(self, checkpoint: Path) -> None:
        if self.keeper is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            kept = {name: getattr(self.keeper, name) for name in KEPT[self.hook]}
            torch.save({"start": self.start, "kept": kept}, checkpoint / self._file())

    def restore(self, checkpoint: Path, step: int) -> str:
        """Continue at `step` with the checkpoint's errors. If any rank lacks its file, all ranks start without errors,
        as ranks must stay equal, and this returns a message to print."""
        self.steps, path = step, checkpoint / self._file()
        if self.keeper is None:
            return ""
        there = every(path.is_file())
        if not all(there):
            what = f"--ddp_comm_hook {self.hook} on {len(there)} ranks"
            return f"{checkpoint} has no compression errors of {what}: what earlier steps did not send is lost."
        found = torch.load(path, weights_only=True, map_location=self.device)
        if found["start"] <= step:  # already compressing: keep that start even if the number of steps has changed
            self.start = found["start"]
        for name, value in found["kept"].items():
            setattr(self.keeper, name, value)
        return ""


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that is already complete."""
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future
