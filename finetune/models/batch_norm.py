"""Batch norm with a batch spread over ranks: synchronized across them, or frozen at a trained model's statistics.

Batch norm normalizes by the mean and variance of one rank's pictures in one micro-batch. So the model's output depends
on the number of ranks and accumulation steps, and averaging gradients does not correct that (docs/images.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_reduce

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The modules whose statistics depend on the batch, including torch's SyncBatchNorm."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


class FullPrecisionStatistics(nn.modules.batchnorm._BatchNorm):
    """Batch norm of a bf16 or fp16 model with statistics in fp32, since a step adds only a tenth of the new values.
    DeepSpeed casts weights but not statistics (0.19.8, runtime/engine.py, _cast_module_mixed_precision), and torch
    requires both in one precision, which may differ from the input's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` is (B, C, ...); the result has its precision."""
        if self.training:
            self.num_batches_tracked.add_(1)
        weight, bias = self.weight.float(), self.bias.float()
        kept = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, *kept, weight, bias, self.training, self.momentum, self.eps)


def keep_statistics_in_fp32(model: nn.Module) -> None:
    """For a model that may be cast. ZeRO-3 builds it in bf16 or fp16, statistics included (deepspeed 0.19.8,
    runtime/zero/partition_parameters.py, zero.Init)."""
    for module in batch_norms(model):
        if not (module.affine and module.track_running_stats and module.momentum is not None):
            continue  # torch handles these in its own way
        module.running_mean, module.running_var = module.running_mean.float(), module.running_var.float()
        if type(module) in PLAIN:
            module.__class__ = FullPrecisionStatistics


class AllRanksBatchNorm(FullPrecisionStatistics):
    """Normalizes over the pictures of all ranks, with two all-reduces, on any device. torch's SyncBatchNorm does not
    run on CPU, and DDP on CPU refuses that class (torch 2.13, nn/parallel/distributed.py,
    _passing_sync_batchnorm_handle)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` is (B, C, ...). Every rank must call it; gradients flow through the sums over all ranks."""
        if not self.training:
            return super().forward(input)
        x = input.float()
        others = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1] + [1] * (x.dim() - 2)  # broadcasts per-channel values over x
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
    """The model with batch norm over all ranks, on any device: a machine with a GPU may train on its CPU. Parameters
    stay the same objects. With a single rank, the model is unchanged."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return model
    for module in model.modules():
        if type(module) in PLAIN:
            module.__class__ = AllRanksBatchNorm
    return model


def freeze_batch_norm(model: nn.Module) -> None:
    """Normalize by a trained model's running statistics during training, too, and do not update them. Scale and shift
    are still learned. The Trainer puts the model into training mode before each step, so a hook resets its batch
    norms."""

    def as_in_evaluation(module: nn.Module, _: Any) -> None:
        module.training = False

    for module in batch_norms(model):
        module.register_forward_pre_hook(as_in_evaluation)
