"""Gradients compressed between ranks, by DDP's communication hooks: torch's fp16, bf16 and PowerSGD, and 1-bit Adam.

1-bit Adam (arXiv 2102.02888, algorithm 1) is AdamW until a step. Then its variance stays, DDP's hook sends nothing,
each rank puts its own gradient into the momentum, and `OneBitAdam.step` averages that in two compressed stages. Not in
the paper: a scale for each 64 elements, and a bound on gradients and steps (docs/compression.md).
"""
# No `annotations` of the future: DDP compares a hook's with the classes themselves (torch 2.13, _check_comm_hook).

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
BLOCK = 64  # elements that share a scale, a bfloat16: 1 + 16/64 = 1.25 bits an element are sent, 1/25.6 of fp32
BLOCK_BYTES = BLOCK // 8 + 2
GATHER = sum(1 << (56 - 7 * i) for i in range(8))  # eight bytes of 0 or 1 times this: the bits of the highest byte


def encode(values: torch.Tensor) -> torch.Tensor:
    """Bytes (R, N / 64 * 10) of float32 values (R, N), N a multiple of 64: all signs, bit i % 8 of byte i / 8 set for
    0 or more; then the mean absolute value of each block, which of all scales leaves the least error."""
    scales = values.view(len(values), -1, BLOCK).abs().mean(dim=2).to(torch.bfloat16)
    signs = (((values >= 0).view(torch.uint8).view(torch.int64) * GATHER) >> 56).to(torch.uint8)
    return torch.cat([signs, scales.view(torch.uint8)], dim=1)


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """Float32 values (R, N) of `encode`'s bytes."""
    size = encoded.shape[1] // BLOCK_BYTES * (BLOCK // 8)
    every = torch.arange(256, device=encoded.device)[:, None] >> torch.arange(8, device=encoded.device)
    signs = ((every & 1).float() * 2 - 1)[encoded[:, :size].int()]  # (R, N / 8, 8)
    scales = encoded[:, size:].contiguous().view(torch.bfloat16).float()
    return (signs.view(len(encoded), -1, BLOCK) * scales[:, :, None]).view(len(encoded), -1)


class OneBitAdam(torch.optim.AdamW):
    """AdamW for `freeze_step` steps (None: not yet known), then 1-bit Adam over the ranks that there are."""

    freeze_step: int | None = None
    longer: Any = 1.0  # a rank's gradient than the mean over ranks; what is clipped after the freeze is shortened by it
    steps_taken = 0
    momentum: torch.Tensor | None = None  # of all parameters, in fp32; those in the state are views of it
    worker: torch.Tensor | None = None  # (ranks, chunk): what this rank has not said yet
    server: torch.Tensor | None = None  # (1, chunk): likewise, as the one that averages a chunk and tells all

    @property
    def is_frozen(self) -> bool:
        """True where the next step is one by the frozen variance."""
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
        """Momentum, and beside it sqrt(v) / sqrt(1 - b2^T) + eps, of all parameters that had a gradient."""
        every = [(p, group) for group in self.param_groups for p in group["params"] if p in self.state]
        pairs = [(p, group) for p, group in every if self.state[p]["exp_avg_sq"].any()]
        flat = torch.cat([self.state[p]["exp_avg"].reshape(-1).float() for p, _ in pairs])
        self._parts = []
        for (p, group), momentum in zip(pairs, flat.split([p.numel() for p, _ in pairs]), strict=True):
            state, beta = self.state[p], group["betas"][1]
            known = 1 - beta ** int(self.freeze_step or 0)
            variance = state["exp_avg_sq"].reshape(-1).float() / known
            # 0 without a gradient until now (a word not met), and any momentum over that is without bounds.
            root = torch.where(variance > 0, variance, variance.mean()).sqrt_().add_(group["eps"])
            state["exp_avg"] = momentum.view_as(state["exp_avg"])
            # In Adam a gradient is at most so many roots of the variance, which holds its square.
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
        """Make flat float32 `values` their mean over ranks, at a bit an element each way."""
        ranks, elements = distributed.get_world_size(), values.numel()
        if self.worker is None or self.server is None:
            chunk = -(-elements // (BLOCK * ranks)) * BLOCK
            self.worker, self.server = values.new_zeros(ranks, chunk), values.new_zeros(1, chunk)
        flat = self.worker.view(-1)
        flat[:elements] += values
        if tail := elements % BLOCK:  # what fills up the last block must not lower its scale
            flat[elements : elements - tail + BLOCK] = flat[elements - tail : elements].abs().mean()
        sent = encode(self.worker)
        self.worker -= decode(sent)
        flat[elements:] = 0.0  # nobody's
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        self.server += decode(received).mean(dim=0)
        answer = encode(self.server)
        self.server -= decode(answer)
        # Not all_gather_into_tensor, which torch 2.13 warns of, nor its new name, which torch 2.6 lacks.
        distributed.all_gather(list(received), answer[0])
        values.copy_(decode(received).view(-1)[:elements])

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().state_dict()
        freeze = self.freeze_step if self.is_frozen else None
        found["param_groups"][0] |= {"longer": float(self.longer), "freeze_step": freeze}  # of rank 0
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps_taken = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        self.momentum = None
        group = self.param_groups[0]
        self.longer, self.freeze_step = group.pop("longer", 1.0), group.pop("freeze_step", None)


class Compression(TrainerCallback):
    """What the hook of one model sends, keeps and counts."""

    def __init__(self, arguments: CompressionArguments, trainer: Any = None) -> None:
        self.arguments, self.hook, self.trainer = arguments, arguments.ddp_comm_hook, trainer
        self.steps = self.start = 0  # steps done, and those that send whole gradients
        self.keeper: Any = None
        self._own: list[torch.Tensor] = []  # sums of squares of gradients by bucket, this rank's and the mean's
        self._mean: list[torch.Tensor] = []
        self._counts: dict[str, Counter[str]] = {period: Counter() for period in ("window", "", "compressed_")}
        if self.hook == "powersgd" and trainer:
            # Else DDP makes its buckets anew after the first step, and torch keeps by their number what was not sent.
            trainer.accelerator.ddp_handler.find_unused_parameters = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is wrapped and a checkpoint loaded."""
        check_freeze(self.arguments, state.max_steps, args.get_warmup_steps(state.max_steps))
        outer = self.trainer.optimizer  # accelerate's stands around the Trainer's
        self.attach(self.trainer.model_wrapped, getattr(outer, "optimizer", outer), state.max_steps)
        checkpoint = self.trainer.saves.chosen
        said = self.restore(checkpoint, state.global_step) if checkpoint else ""
        if state.is_world_process_zero:
            matrices = f"as matrices of rank {self.arguments.powersgd_rank}"
            later = "momentum, a bit an element" if self.onebit else matrices
            form = f"whole until step {self.start}, then {later}" if self.keeper is not None else self.hook
            print(said + "\n" * bool(said) + f"gradients: {form} (--ddp_comm_hook {self.hook})", flush=True)

    def attach(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, max_steps: int) -> None:
        """Of `onebit_adam` the optimizer must be an OneBitAdam; of the others any will do."""
        self.start, self.device = self.arguments.start_step(max_steps), next(model.parameters()).device
        self.onebit = optimizer if isinstance(optimizer, OneBitAdam) else None
        if self.hook == "powersgd":
            # Without the epsilon a column of zeros, of a parameter without gradient, would become NaN.
            self.keeper = PowerSGDState(None, self.arguments.powersgd_rank, 2, orthogonalization_epsilon=1e-8)
            self.keeper.iter = 2  # whole gradients are not its business
        if self.onebit:
            self.keeper = self.onebit
            if self.onebit.freeze_step is None:  # in a checkpoint: freeze as asked, or where AdamW stands
                self.onebit.freeze_step = max(self.start, self.onebit.steps_taken)
            self.start = self.onebit.freeze_step
        model.register_comm_hook(self, Compression.exchange)

    def exchange(self, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A future of what takes the place of the bucket's gradients."""
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
        # Gloo's own threads would start the later messages of several buckets, in an order that differs between ranks.
        return _done(future.wait()) if distributed.get_backend() == "gloo" else future

    def _measured(self, future: Any) -> torch.Tensor:
        mean: torch.Tensor = future.value()[0]
        self._mean.append(mean.float().square().sum())
        return mean

    def _count(self, elements: int, sent: float) -> None:
        """So many elements were exchanged as so many bytes, of which a rank of a ring sends 2 (N-1)/N."""
        ring = 2 * (distributed.get_world_size() - 1) / distributed.get_world_size()
        for period in self._periods():
            self._counts[period].update(sent=ring * sent, whole=ring * elements * FP32_BYTES)

    def _periods(self) -> list[str]:
        return ["window", ""] + ["compressed_"] * (self.steps >= self.start)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Once the optimizer has stepped."""
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
        """What a rank has sent since the last call ("window"), in all (""), and after the start ("compressed_")."""
        found = {}
        for period in periods:
            name, counts = "comm_" + period.replace("window", ""), self._counts[period]
            if counts["steps"]:
                found[name + "bytes_per_step"] = counts["sent"] / counts["steps"]
                found[name + "share_of_fp32"] = counts["sent"] / counts["whole"]
        self._counts["window"] = Counter()
        return found

    def _file(self) -> str:
        """Found again only by the same hook on as many ranks, of which each has errors of its own."""
        rank = f"-{self.arguments.powersgd_rank}" if self.hook == "powersgd" else ""
        return f"comm_hook_{self.hook}{rank}_{distributed.get_rank()}_of_{distributed.get_world_size()}.pt"

    def save(self, checkpoint: Path) -> None:
        if self.keeper is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            kept = {name: getattr(self.keeper, name) for name in KEPT[self.hook]}
            torch.save({"start": self.start, "kept": kept}, checkpoint / self._file())

    def restore(self, checkpoint: Path, step: int) -> str:
        """Go on at `step` as the checkpoint has it. Returns what is to be said where that cannot be: all ranks then
        begin without errors, for one that did not would step elsewhere."""
        self.steps, path = step, checkpoint / self._file()
        if self.keeper is None:
            return ""
        there = every(path.is_file())
        if not all(there):
            what = f"--ddp_comm_hook {self.hook} on {len(there)} ranks"
            return f"{checkpoint} has no errors of {what}: what earlier steps did not send is left out."
        found = torch.load(path, weights_only=True, map_location=self.device)
        if found["start"] <= step:  # compressed already, however many steps there are now
            self.start = found["start"]
        for name, value in found["kept"].items():
            setattr(self.keeper, name, value)
        return ""


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has come already."""
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future
