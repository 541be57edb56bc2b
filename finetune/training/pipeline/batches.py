"""Which samples each pipeline reads: the same global batches as with the Trainer, distributed by micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from finetune.data.sampling import GlobalBatchSampler
from finetune.training.interruption import deaf_to_sigterm


class TrainingShard:
    """Index lists, one per micro-batch, for pipeline `pipeline` of `pipelines`, from step `first_step` of the epoch.

    Micro-batch i of a global batch goes to pipeline i modulo `pipelines`, as accelerate's BatchSamplerShard does with
    ranks. The first and the last stage of a pipeline use the same arguments, so they agree on every sample."""

    def __init__(
        self, sampler: GlobalBatchSampler, micro_batch_size: int, pipeline: int, pipelines: int, first_step: int
    ) -> None:
        self.sampler, self.size = sampler, micro_batch_size
        self.pipeline, self.pipelines = pipeline, pipelines
        self.first_step = first_step

    def __iter__(self) -> Iterator[list[int]]:
        indices = islice(iter(self.sampler), self.first_step * self.sampler.global_batch_size, None)
        for number in range(len(self) * self.pipelines):
            some = list(islice(indices, self.size))
            if number % self.pipelines == self.pipeline:
                yield some

    def __len__(self) -> int:
        left = len(self.sampler) - self.first_step * self.sampler.global_batch_size
        return left // (self.size * self.pipelines)


class EvaluationShard:
    """Index lists over `size` samples in order, one per micro-batch, equally many for each pipeline. Short ones are
    padded with sample 0; `real_rows` holds each list's number of real samples."""

    def __init__(self, size: int, micro_batch_size: int, pipeline: int, pipelines: int) -> None:
        rounds = -(-size // (micro_batch_size * pipelines))
        starts = [(r * pipelines + pipeline) * micro_batch_size for r in range(rounds)]
        parts = [list(range(min(start, size), min(start + micro_batch_size, size))) for start in starts]
        self.real_rows = [len(part) for part in parts]
        self.indices = [part + [0] * (micro_batch_size - len(part)) for part in parts]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def loader(trainer: Any, dataset: Any, shard: TrainingShard | EvaluationShard) -> Any:
    """Collated micro-batches of a shard, in its order, on the CPU. A loader draws a seed for its workers from a
    separate generator, so that a resumed run draws the same dropout masks."""
    return DataLoader(
        dataset,
        batch_sampler=shard,
        collate_fn=trainer.collator,
        num_workers=trainer.args.dataloader_num_workers,
        generator=torch.Generator().manual_seed(trainer.args.seed),
        pin_memory=trainer.device.type == "cuda",
        worker_init_fn=functools.partial(deaf_to_sigterm, None),
    )
