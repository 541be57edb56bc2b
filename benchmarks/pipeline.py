"""Pipeline parallelism: efficiency compared with the formula, memory by stage, checkpointing, partitions, and the plan.

    python benchmarks/pipeline.py                        # all parts, about twelve minutes on two CPU cores
    python benchmarks/pipeline.py --parts efficiency     # one part only
    python benchmarks/pipeline.py --gpu                  # one GPU: one stage and the Trainer, and checkpointing

Writes docs/results/pipeline.md (pipeline_gpu.md on a GPU). A part starts two or four ranks with one thread each. Steps
of the variants are interleaved in the same processes, so that noise favors none. Four ranks share two cores, so only
their memory is measured, not time.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from releases import this_machine
from spread import spread

from finetune.measure.processes import DEEPSPEED, started

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
ACCUMULATIONS = (1, 2, 4, 8, 16)
TURNS = 5
SHAPE = {"num_hidden_layers": 6, "num_attention_heads": 6, "hidden_size": 384, "max_position_embeddings": 128}
VOCABULARY = 512
# A head of 16,384 x 256 weights outweighs a block of 12 x 256 x 256.
TOP_HEAVY = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 256, "max_position_embeddings": 128}
TOP_HEAVY_VOCABULARY = 16_384
LARGE_BATCH = {"num_hidden_layers": 12, "num_attention_heads": 4, "hidden_size": 256, "max_position_embeddings": 256}


def ranks(count: int, part: str, *words: str) -> dict:
    """The result, as JSON, that rank 0 prints when `count` ranks run `part` of this file."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCHMARK_RANK": "1"}
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(count), "--standalone"]
    command = [*torchrun, __file__, "--rank_part", part, *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    print(part, *words, lines[-1], flush=True)
    return json.loads(lines[-1].removeprefix("RESULT "))


class Bench:
    """A pipeline over this run's ranks on random tokens, with one accumulation and one partition."""

    def __init__(self, stages: int, accumulation: int, rows: int, shape: dict, vocabulary: int, **choices) -> None:
        import torch

        from finetune.models.gptlite import GPTLiteConfig
        from finetune.models.gptlite_pipeline import gptlite_pipeline
        from finetune.run.flags.common import RunArguments
        from finetune.run.flags.pipeline import PipelineArguments
        from finetune.training.pipeline.partition import partition
        from finetune.training.pipeline.trainer import PipelineTrainer
        from finetune.training.start import start

        folder = Path(tempfile.gettempdir()) / "pipeline_benchmark"
        flags = {
            "output_dir": folder,
            "do_train": True,
            "pipeline_parallel_size": stages,
            "partition_method": choices.get("method", "balanced"),
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": rows,
            "max_steps": 1000,
            "bf16": False,
            "report_to": "none",
            "schedule_step": 0,
        }
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        session = start((PipelineArguments, RunArguments), {}, words, scratch_defaults={})
        model = gptlite_pipeline(GPTLiteConfig(**shape, vocab_size=vocabulary, use_cache=False), seed=0)
        tokens = shape["max_position_embeddings"]
        ids = torch.randint(vocabulary, (64, tokens + 1), generator=torch.Generator().manual_seed(0))
        data = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in ids]
        interval = choices.get("interval", 0)
        stack = torch.utils.data.default_collate
        launch = session.launch
        self.parts = partition(model, session.arguments[0], session.training, launch, data, stack, interval)
        self.trainer = PipelineTrainer(
            model,
            self.parts,
            args=session.training,
            ds_config=session.ds_config,
            launch=launch,
            train_dataset=data,
            eval_dataset=data,
            data_collator=stack,
            processing_class=None,
            compute_metrics=None,
            checkpoint_interval=interval,
        )
        self.trainer.loss.items = accumulation * rows * tokens
        batch = stack([data[i % len(data)] for i in range(rows)])
        self.pairs = [model.split(batch)] * accumulation
        self.small = [model.split({name: tensor[:1, :4] for name, tensor in batch.items()})] * accumulation

    def step(self) -> float:
        """Seconds of one step, from a barrier to a barrier."""
        from torch import distributed

        distributed.barrier()
        begin = time.perf_counter()
        reads = self.trainer.is_first or self.trainer.is_last
        self.trainer.engine.train_batch(iter(self.pairs) if reads else None)
        distributed.barrier()
        return time.perf_counter() - begin


def tell(result: dict) -> None:
    from torch import distributed

    if distributed.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    distributed.barrier()


def rank_efficiency(accumulation: int) -> None:
    """Two stages, and the same ranks as two pipelines of one stage, which process twice the micro-batches per step."""
    two = Bench(2, accumulation, 4, SHAPE, VOCABULARY)
    one = Bench(1, accumulation, 4, SHAPE, VOCABULARY)
    times = [(two.step(), one.step()) for _ in range(TURNS + 2)][2:]
    tell({"two_stages": [a for a, _ in times], "one_stage": [b for _, b in times], "balance": two.parts.balance})


def rank_cut() -> None:
    methods = ("balanced", "uniform", "parameters", "type:block")
    benches = {method: Bench(2, 8, 4, TOP_HEAVY, TOP_HEAVY_VOCABULARY, method=method) for method in methods}
    times = {method: [] for method in methods}
    for turn in range(TURNS + 1):
        for method, bench in benches.items():
            seconds = bench.step()
            if turn:
                times[method].append(seconds)
    bounds = {method: list(bench.parts.bounds) for method, bench in benches.items()}
    tell({"seconds": times, "bounds": bounds, "balance": {m: b.parts.balance for m, b in benches.items()}})


def rank_plan(accumulation: int) -> None:
    """The measured makespan of a step over the one planned from the stages' times in the previous step."""
    import torch
    from torch import distributed

    from finetune.training.pipeline.trace import Recorder, measured, plan_from

    bench = Bench(2, accumulation, 4, SHAPE, VOCABULARY)
    found = []
    for turn in range(TURNS + 2):
        recorder = Recorder(bench.trainer.engine.module, bench.trainer.loss, bench.trainer.is_last)
        with recorder.recording():
            bench.step()
        every = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, recorder.intervals)
        if turn:
            found.append(measured(every, accumulation))
    ratios = [after.makespan / plan_from(before).makespan for before, after in pairwise(found)]
    layers = [step.makespan / bench.parts.plan().makespan for step in found[1:]]
    assert torch.is_grad_enabled()
    tell({"measured_by_planned": ratios, "measured_by_layers_alone": layers})


def rank_memory(interval: int) -> None:
    """By stage: MiB that a step with eight micro-batches adds to a process after a step with few tokens."""
    from torch import distributed

    bench = Bench(4, 8, 8, LARGE_BATCH, VOCABULARY, method="type:block", interval=interval)
    pairs, bench.pairs = bench.pairs, bench.small
    bench.step()  # allocates what the optimizer and DeepSpeed keep
    bench.trainer.engine.reset_activation_shape()
    bench.pairs = pairs
    before = peak_mib()
    bench.step()
    every = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, peak_mib() - before)
    activation = bench.parts.sums(lambda cost: cost.activation_bytes / 2**20)
    tell({"mib": every, "in_flight": bench.parts.plan().in_flight, "activation_mib": activation})


def rank_checkpointing() -> None:
    """Two stages: a step that keeps all activations, and one that recomputes every layer."""
    kept = Bench(2, 8, 4, SHAPE, VOCABULARY)
    again = Bench(2, 8, 4, SHAPE, VOCABULARY, interval=1)
    times = [(kept.step(), again.step()) for _ in range(TURNS + 1)][1:]
    tell({"kept": [a for a, _ in times], "again": [b for _, b in times]})


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def recipe(name: str, folder: Path, *words: str) -> dict:
    """The final figures of a recipe on one rank."""
    flags = [*words, "--output_dir", str(folder), "--max_steps", "25", "--eval_strategy", "no", "--do_eval", "False"]
    flags += ["--save_strategy", "no", "--sample_tokens", "0", "--max_train_samples", "60"]
    command = [*started(DEEPSPEED, 1), f"recipes/{name}.py", *flags]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    found = json.loads((folder / "train_results.json").read_text())
    print(name, *words, found["step_seconds_median"], flush=True)
    return {"seconds": found["step_seconds_median"], "peak_gib": found["peak_memory_gib"]}


def one_stage(size: tuple[str, ...]) -> dict:
    """The engine with one stage and the Trainer under ZeRO-1, also with checkpointing; the order alternates."""
    batch = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8")
    runs = {
        "Trainer, ZeRO-1": ("causal_lm", "--deepspeed", "zero1"),
        "pipeline engine, 1 stage": ("causal_lm_pipeline", "--schedule_step", "0"),
        "Trainer, every layer again": ("causal_lm", "--deepspeed", "zero1", "--activation_checkpoint_interval", "1"),
        "pipeline engine, every layer again": (
            *("causal_lm_pipeline", "--schedule_step", "0"),
            *("--activation_checkpoint_interval", "1"),
        ),
    }
    found: dict = {name: [] for name in runs}
    for turn in range(2):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                script, *words = runs[name]
                found[name].append(recipe(script, Path(folder) / "run", *words, *batch, *size))
    return found


PARTS = {
    "efficiency": lambda: {str(m): ranks(2, "efficiency", str(m)) for m in ACCUMULATIONS},
    "cut": lambda: ranks(2, "cut"),
    "plan": lambda: {str(m): ranks(2, "plan", str(m)) for m in (4, 16)},
    "memory": lambda: {str(interval): ranks(4, "memory", str(interval)) for interval in (0, 1)},
    "checkpointing": lambda: ranks(2, "checkpointing"),
    "one_stage": lambda: one_stage(("--bf16", "False")),
}
RANK_PARTS = {
    "efficiency": rank_efficiency,
    "cut": rank_cut,
    "plan": rank_plan,
    "memory": rank_memory,
    "checkpointing": rank_checkpointing,
}


def render(results: dict) -> str:
    middle = statistics.median
    command = f"python benchmarks/pipeline.py{results.get('flags', '')}"
    setting = f"`{command}`; {results['machine']}; {results.get('precision', 'fp32')}."
    lines = ["# Pipeline parallelism: efficiency and memory", "", setting, ""]
    if found := results.get("efficiency"):
        width, turns = SHAPE["hidden_size"], len(next(iter(found.values()))["one_stage"])
        lines += [
            "## Efficiency: 2 stages, one core each",
            "",
            f"GPT-lite, 6 layers, hidden size {width}, micro-batches of 4 x 128 tokens. Efficiency is the time that",
            "the same two ranks take for as much work without waiting, divided by the time of the two stages. Without",
            "waiting means two pipelines of one stage, which process twice the micro-batches per step. Figures are",
            f"medians of {turns} rounds, with the range in parentheses. A step of one stage includes the whole model's",
            "optimizer step and its all-reduce. Two stages halve the first and do not need the second, so that few",
            "micro-batches do better than the formula.",
            "",
            "| micro-batches M | seconds per step | efficiency | formula: M / (M + 1) x balance | measured / formula |",
            "|---|---|---|---|---|",
        ]
        for m, row in found.items():
            two, one = middle(row["two_stages"]), row["one_stage"]
            each = [b / (2 * a) for a, b in zip(row["two_stages"], one, strict=True)]
            formula = int(m) / (int(m) + 1) * row["balance"]
            lines.append(f"| {m} | {two:.3f} | {spread(each, 3)} | {formula:.3f} | {middle(each) / formula:.3f} |")
        lines.append("")
    if found := results.get("cut"):
        lines += ["## Partitions: 2 stages, a head that outweighs the blocks", ""]
        lines += [f"6 layers, hidden size 256, vocabulary {TOP_HEAVY_VOCABULARY:,}, 8 micro-batches of 4 x 128 tokens."]
        lines += ["Methods that choose the same partition share a row; differences between them are noise. The last"]
        lines += ["column is the step time divided by that of the balanced partition in the same round. Figures are"]
        lines += ["medians, with the range in parentheses.", ""]
        lines += ["| methods | stage bounds | planned balance | steps | seconds per step | time / balanced |"]
        lines += ["|---|---|---|---|---|---|"]
        best, same = found["seconds"]["balanced"], {}
        for method, bounds in found["bounds"].items():
            same.setdefault(tuple(bounds), []).append(method)
        for bounds, methods in same.items():
            seconds = [value for method in methods for value in found["seconds"][method]]
            ratios = [a / b for method in methods for a, b in zip(found["seconds"][method], best, strict=True)]
            balance = ", ".join(f"{found['balance'][method]:.2f}" for method in methods)
            against = "" if "balanced" in methods else spread(ratios, 2)
            row = (", ".join(methods), list(bounds), balance, len(seconds), spread(seconds, 3), against)
            lines.append(f"| {' | '.join(map(str, row))} |")
        lines.append("")
    if found := results.get("plan"):
        lines += ["## The plan: measured over planned makespan of a step, 2 stages", ""]
        lines += ["A step is planned from the stages' times in the previous step, or from the layers' times alone.", ""]
        lines += ["| micro-batches | planned from the previous step: median (all) | planned from the layers |"]
        lines += ["|---|---|---|"]
        for m, row in found.items():
            every = ", ".join(f"{ratio:.2f}" for ratio in row["measured_by_planned"])
            alone = middle(row["measured_by_layers_alone"])
            lines.append(f"| {m} | {middle(row['measured_by_planned']):.3f} ({every}) | {alone:.3f} |")
        lines.append("")
    if found := results.get("memory"):
        lines += [
            "## Memory: 4 stages of 3 blocks, 8 micro-batches of 8 x 256 tokens",
            "",
            "Sizes are in MiB. Measured is the growth of the largest resident set after a step with 4 tokens per row.",
            "It includes gradient buffers and allocator overhead; the plan has activations only. The stages share two",
            "cores, so times are not measured. The last two columns are with activation checkpointing of every layer.",
            "",
        ]
        lines += ["| stage | micro-batches in flight | planned per micro-batch | planned peak | measured peak | "]
        lines[-1] += "measured / planned | measured peak, checkpointed | checkpointed / not |"
        lines += ["|---|---|---|---|---|---|---|---|"]
        kept, again = found["0"], found["1"]
        for stage, (mib, less) in enumerate(zip(kept["mib"], again["mib"], strict=True)):
            flight, each = kept["in_flight"][stage], kept["activation_mib"][stage]
            row = (stage, flight, f"{each:.0f}", f"{flight * each:.0f}", f"{mib:.0f}", f"{mib / (flight * each):.2f}")
            lines.append("| " + " | ".join(map(str, (*row, f"{less:.0f}", f"{less / mib:.2f}" if mib else "-"))) + " |")
        lines.append("")
    if found := results.get("checkpointing"):
        ratio = spread([b / a for a, b in zip(found["kept"], found["again"], strict=True)], 2)
        lines += ["## Activation checkpointing: time, 2 stages, 8 micro-batches", ""]
        lines += [f"With checkpointing of every layer, a step takes {middle(found['again']):.3f} s; without it,"]
        lines[-1] += f" {middle(found['kept']):.3f} s. The ratio is {ratio}, over {len(found['kept'])} rounds."
        lines.append("")
    if found := results.get("one_stage"):
        lines += ["## One stage compared with the Trainer: 8 micro-batches, the recipes' own step times", ""]
        lines += [f"Medians of {len(next(iter(found.values())))} runs, with the range in parentheses.", ""]
        lines += ["| run | seconds per step | time / Trainer | peak memory, GiB |", "|---|---|---|---|"]
        base = middle(run["seconds"] for run in found["Trainer, ZeRO-1"])
        for name, runs in found.items():
            seconds, peak = ([run[key] for run in runs] for key in ("seconds", "peak_gib"))
            against = f"{middle(seconds) / base:.2f}"
            shown = name.replace("every layer again", "every layer checkpointed")
            lines.append(f"| {shown} | {spread(seconds, 4)} | {against} | {middle(peak):.2f} |")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--gpu", action="store_true", help="one GPU: one stage and the Trainer, in bf16")
    parser.add_argument("--out", type=Path, default=OUT, help="folder")
    parser.add_argument("--rank_part", help=argparse.SUPPRESS)
    parser.add_argument("numbers", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_part:
        RANK_PARTS[options.rank_part](*options.numbers)
        return
    name = "pipeline_gpu" if options.gpu else "pipeline"
    path = options.out / f"{name}.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))
    results["machine"] = f"{this_machine()}; {versions}"
    if options.gpu:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("error: torch sees no GPU, but --gpu measures one. Drop the flag to measure on the CPU.")
        results |= {"precision": "bf16", "flags": " --gpu"}
        size = ("--model_size", "small", "--learning_rate", "6e-4", "--bf16", "True", "--tokenizer", "byte")
        results["one_stage"] = one_stage(size)
    else:
        for part in options.parts:
            results[part] = PARTS[part]()
            path.write_text(json.dumps(results, indent=1) + "\n")
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
