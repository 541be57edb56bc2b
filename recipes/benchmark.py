"""Run one cell of a benchmark: train on synthetic samples for a few steps, and measure speed and memory.

    deepspeed --num_gpus 2 recipes/benchmark.py --model deep --scale 0.05 --deepspeed zero1
    torchrun --nproc_per_node 2 recipes/benchmark.py --model gptlite --scale 0.2 --per_device_train_batch_size 4
    deepspeed --num_gpus 2 recipes/benchmark.py --model wide --scale 0.05 --pipeline_parallel_size 2 \\
        --gradient_accumulation_steps 8

`finetune bench GRID.yaml` runs it for each cell of a grid; docs/bench.md explains the results. Samples and weights have
their own seeds, so losses are the same in every layout with the same global batch.
"""

import json
from pathlib import Path

from finetune.bench.recipe import BENCHMARK, BenchmarkArguments
from finetune.entry.main import run_recipe
from finetune.errors import RequestError
from finetune.run.flags.common import RunArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.profiling import ProfileArguments


def main(run):
    asked, is_pipeline = run[BenchmarkArguments], run.stages is not None
    if asked.measured_steps < 1 or asked.unmeasured_steps < 0:
        raise RequestError("--measured_steps must be 1 or more, and --unmeasured_steps 0 or more.")
    from transformers import set_seed

    from finetune.bench.data import MadeUp, build, build_stages
    from finetune.bench.meter import Meter
    from finetune.bench.models import TEXT, find_model
    from finetune.measure.memory import Allocations
    from finetune.measure.train import train, train_pipeline
    from finetune.measure.watch import OBSERVED_STEPS
    from finetune.training.loss import settle_loss_scaling
    from finetune.training.profiling.callback import profiling
    from finetune.training.start import start

    # Start: set up the machine, connect the ranks, check the layout.
    session = start(run)
    training = session.training

    # Data: as many samples as the steps take, generated when they are read.
    what = find_model(asked.model, asked.scale, changes_of(asked.model_changes))
    training.max_steps = OBSERVED_STEPS + asked.unmeasured_steps + asked.measured_steps
    ranks = session.launch.world_size // (run.stages or 1)  # those that read different samples
    global_batch = training.train_batch_size * training.gradient_accumulation_steps * ranks
    data = MadeUp(what, training.max_steps * global_batch, training.seed, is_pipeline)

    # Model and training, all watched by `memory`, which the meter switches off before it times steps.
    memory = Allocations(training.device.type)
    meter = Meter(memory, asked.unmeasured_steps)
    memory.__enter__()
    set_seed(training.seed)
    if is_pipeline:
        stages, interval = build_stages(what, training.seed), session[RunArguments].activation_checkpoint_interval or 0
        watched = profiling(session[ProfileArguments])
        train_pipeline(session, stages, session[PipelineArguments], data, interval, meter, *watched)
    else:
        model = build(what, training.seed)
        settle_loss_scaling(model, label_per_token=what.name in TEXT and what.name != "distilbert")
        train(session, model, data, meter, *profiling(session[ProfileArguments]))

    # Report
    figures = meter.figures()
    if asked.result_dir:
        folder = Path(asked.result_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{session.launch.rank}.json").write_text(json.dumps(figures))
    median = sorted(figures["seconds"])[len(figures["seconds"]) // 2]
    session.say(
        f"{global_batch / median:,.1f} samples/s, {median * 1e3:,.1f} ms a step; rank 0: peak "
        f"{figures['peak_bytes'] / 2**20:,.1f} MiB, on average {figures['average_bytes'] / 2**20:,.1f} MiB, by "
        f"{figures['measured_by']}; last loss {figures['losses'][-1]:.4f}",
        *(f"  {kind}: {size / 2**20:,.1f} MiB" for kind, size in figures["by_kind"].items()),
    )


def changes_of(text):
    try:
        changes = json.loads(text)
    except ValueError as error:
        raise RequestError(f"--model_changes {text}: is not valid JSON ({error}).") from error
    if not isinstance(changes, dict):
        raise RequestError(f'--model_changes {text}: give an object, such as {{"layers": 4}}.')
    return changes


if __name__ == "__main__":
    run_recipe(BENCHMARK, main)
