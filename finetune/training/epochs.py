"""Which epoch it is, told to those who draw by it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from finetune.data.image_samples import Pictures
from finetune.data.sampling import GlobalBatchSampler


class Epochs(TrainerCallback):
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
