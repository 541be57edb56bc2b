"""Train a few steps on synthetic tokens, and record their memory and time.

    deepspeed --num_gpus 2 --module finetune.measure --model_config config.json --sequence_tokens 128 --result_dir o \\
        --deepspeed zero2 --per_device_train_batch_size 4

Flags, defaults and code are the recipes': `start`, the Trainer, the DeepSpeed config and its check, and with
--pipeline_parallel_size the pipeline trainer. Each rank writes OUT/rank-N.json. The first steps run under
`Allocations`; the rest run without it, and only they are timed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from finetune.entry.main import run_recipe
from finetune.errors import RequestError
from finetune.measure.memory import Allocations
from finetune.measure.models import build_adapted, config_of, samples
from finetune.measure.recipe import TRIAL, TrialArguments
from finetune.measure.train import train, train_pipeline
from finetune.measure.watch import OBSERVED_STEPS, WARM_STEPS, Watch
from finetune.models.chunked_loss import use_chunked_loss
from finetune.models.gptlite_pipeline import gptlite_pipeline
from finetune.models.tiled_mlp import use_tiled_mlp
from finetune.plan.families.parts import CLASSES
from finetune.run.flags.common import RunArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.sequence_parallel import TileArguments
from finetune.run.run import Run
from finetune.training.loss import settle_loss_scaling
from finetune.training.start import Session, start

Samples = list[dict[str, torch.Tensor]]


def main(run: Run) -> None:
    session = start(run)
    trial, training, is_pipeline = session[TrialArguments], session.training, run.stages is not None
    if trial.planned_device not in ("", training.device.type):
        raise RequestError(
            f"this was planned for {trial.planned_device}, but torch {torch.__version__} runs on "
            f"{training.device.type} here. Plan for that: give --gpu cpu, or this machine's profile."
        )
    training.max_steps = OBSERVED_STEPS + WARM_STEPS + trial.timed_steps
    config = json.loads(Path(trial.model_config).read_text())
    many = training.max_steps * training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    is_shared = run.sequence_parallel_size > 1
    kinds = is_pipeline, is_shared, trial.document_mask
    data = [samples(config, trial.head, trial.sequence_tokens, *kinds)] * many
    memory = Allocations(training.device.type)
    watch = Watch(memory)
    memory.__enter__()  # Watch exits it
    set_seed(training.seed)
    run_it = _pipeline if is_pipeline else _trainer
    with training.device:  # where weights are filled the fastest
        run_it(session, config, data, watch)
    _write(session, trial, watch)


def _trainer(session: Session, config: dict[str, Any], data: Samples, watch: Watch) -> None:
    trial = session[TrialArguments]
    base, model = build_adapted(config, trial.head, trial.attn_implementation, trial.adapter)
    if trial.loss_chunk_tokens:
        base.accepts_loss_kwargs = True  # see use_chunked_loss
        use_chunked_loss(model, trial.loss_chunk_tokens)
    else:
        settle_loss_scaling(base, label_per_token=trial.head != CLASSES)
    if shards := session[TileArguments].tiled_mlp_num_shards:
        use_tiled_mlp(model, shards)
    train(session, model, data, watch)


def _pipeline(session: Session, config: dict[str, Any], data: Samples, watch: Watch) -> None:
    interval = session[RunArguments].activation_checkpoint_interval or 0
    chunk, tiles = session[TrialArguments].loss_chunk_tokens, session[TileArguments].tiled_mlp_num_shards
    model = gptlite_pipeline(config_of(config), session.training.seed, chunk, tiles=tiles)
    train_pipeline(session, model, session[PipelineArguments], data, interval, watch)


def _write(session: Session, trial: TrialArguments, watch: Watch) -> None:
    figures = {
        "between_steps_bytes": watch.between_steps[-1],
        "step_peaks_bytes": watch.settled_peaks,
        "seconds": watch.seconds,
        "bounds": watch.bounds,
        **watch.allocator,
    }
    folder = Path(trial.result_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{session.launch.rank}.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    run_recipe(TRIAL, main)
