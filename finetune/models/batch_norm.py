"""Batch norm where a batch is spread over ranks: taken over all of them, or left as a trained model has it.

Batch norm normalises by the mean and variance of the pictures that one rank has in one micro-batch. So with other
ranks or other accumulation steps the model computes something else, which no averaging of gradients mends
(docs/images.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_reduce

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The modules whose statistics depend on the batch, torch's SyncBatchNorm among them."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


class FullPrecisionStatistics(nn.modules.batchnorm._BatchNorm):
    """Batch norm of a model in bf16 or fp16, with statistics in fp32, to which a step adds a tenth of what is new.
    DeepSpeed casts weights and leaves statistics (0.19.8, runtime/engine.py, _cast_module_mixed_precision), and torch
    takes both in one precision alone: it may be another than the input's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` (B, C, ...), in whose precision the result is."""
        if self.training:
            self.num_batches_tracked.add_(1)
        weight, bias = self.weight.float(), self.bias.float()
        kept = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, *kept, weight, bias, self.training, self.momentum, self.eps)


def keep_statistics_in_fp32(model: nn.Module) -> None:
    """In a model that may be cast. Under ZeRO-3 it is built in bf16 or fp16 (deepspeed 0.19.8, runtime/zero/
    partition_parameters.py, zero.Init), its statistics with it."""
    for module in batch_norms(model):
        if not (module.affine and module.track_running_stats and module.momentum is not None):
            continue  # torch's ways for these are left to torch
        module.running_mean, module.running_var = module.running_mean.float(), module.running_var.float()
        if type(module) in PLAIN:
            module.__class__ = FullPrecisionStatistics


class AllRanksBatchNorm(FullPrecisionStatistics):
    """Over the pictures of all ranks, by two all-reduces on any device. torch's SyncBatchNorm refuses a CPU, and DDP
    there any module of that class (torch 2.13, nn/parallel/distributed.py, _passing_sync_batchnorm_handle)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` (B, C, ...). Every rank must call it; gradients go through the sums of all ranks."""
        if not self.training:
            return super().forward(input)
        x = input.float()
        others = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1] + [1] * (x.dim() - 2)  # of what each channel has, beside x
        count = torch.full((1,), x.numel() / x.shape[1], device=x.device)
        sums = all_reduce(torch.cat([x.sum(dim=others), count]))  # (C + 1)
        total = sums[-1]
        mean = sums[:-1] / total
        centred = x - mean.view(shape)
        variance = all_reduce((centred**2).sum(dim=others)) / total
        self._track(mean.detach(), variance.detach() * (total / (total - 1)).detach())
        scale = torch.rsqrt(variance + self.eps) * self.weight
        return (centred * scale.view(shape) + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), self.momentum)


def synchronise_batch_norm(model: Any) -> Any:
    """The model with statistics over all ranks, wherever its pictures are: a machine with a GPU may train on its CPU.
    Parameters stay the same objects. Without other ranks the model stays as it is."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return model
    for module in model.modules():
        if type(module) in PLAIN:
            module.__class__ = AllRanksBatchNorm
    return model


def freeze_batch_norm(model: nn.Module) -> None:
    """Normalise by a trained model's running statistics in training, too, and leave them as they are. Scale and shift
    are still learnt. The Trainer puts the model into training mode before each step; a hook takes its batch norms
    out."""

    def as_in_evaluation(module: nn.Module, _: Any) -> None:
        module.training = False

    for module in batch_norms(model):
        module.register_forward_pre_hook(as_in_evaluation)
