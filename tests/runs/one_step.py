"""Run by test_launches.py: two steps of many small tensors, the second under torch's profiler, and what it launched."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import TrainerCallback, default_data_collator

from finetune.entry.main import run_recipe
from finetune.models.mlp import MLPConfig, MLPForClassification
from finetune.run.flags.common import RunArguments
from finetune.run.recipe import Recipe
from finetune.run.run import Run
from finetune.training.start import start
from finetune.training.trainer import FinetuneTrainer

LAYERS, WIDTH = 64, 64  # 270,000 elements: six buckets of the published study's 5e4


class Counted(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.profile.__exit__(None, None, None)
            print("COUNTS " + json.dumps({event.key: event.count for event in self.profile.key_averages()}))


ONE_STEP = Recipe(name="one_step", groups=(RunArguments,), defaults={})


def main(run: Run) -> None:
    session = start(run)
    model = MLPForClassification(MLPConfig(width=WIDTH, layers=LAYERS, num_labels=4))
    model.accepts_loss_kwargs = False
    data = [{"inputs": torch.ones(WIDTH), "labels": torch.tensor(0)}] * 8
    FinetuneTrainer(
        model=model,
        args=session.training,
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[Counted()],
    ).train()


if __name__ == "__main__":
    run_recipe(ONE_STEP, main)
