"""One of two ranks, for test_batch_norm.py: `torchrun --nproc_per_node 2 batch_norm_ranks.py FOLDER`. Its part of the
batch goes through batch norm over all ranks, and apart through that of a rank alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from transformers import ResNetConfig, ResNetForImageClassification

from finetune.models.batch_norm import keep_statistics_in_fp32, synchronise_batch_norm
from finetune.training.image_trainers import SharedStatistics

SHAPE = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
ROWS = 8


def a_model() -> ResNetForImageClassification:
    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(**SHAPE))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 3, 32, 32) * torch.linspace(0.2, 3, ROWS).view(-1, 1, 1, 1), torch.arange(ROWS) % 3


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    pictures, labels = batch()
    own = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    nn.parallel.DistributedDataParallel(synchronise_batch_norm(a_model()))  # which refuses SyncBatchNorm on a CPU
    torch.cuda.is_available = lambda: True  # a machine with a GPU, of which --use_cpu True makes no use
    model = synchronise_batch_norm(a_model())
    keep_statistics_in_fp32(model)
    loss = model(pictures[own], labels=labels[own]).loss
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= 2
    alone = a_model()
    statistics = SharedStatistics(alone)
    alone.double().float()  # its buffers are others now, as after a move to a GPU
    alone(pictures[own])
    statistics.on_step_end(None, None, None)
    if rank == 0:
        found = {"loss": loss.detach(), "grads": [p.grad for p in model.parameters()], "state": model.state_dict()}
        torch.save({**found, "alone": alone.state_dict()}, folder / "found.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
