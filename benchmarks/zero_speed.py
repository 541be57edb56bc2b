"""Speed of the shipped ZeRO configs compared with DDP: ratios of step times from interleaved runs.

    python benchmarks/zero_speed.py                              # all parts, about fifteen minutes on two idle cores
    python benchmarks/zero_speed.py --parts shipped --models deep_study --rounds 9
    python benchmarks/zero_speed.py --parts settings profile     # one factor at a time, and where the time goes
    python benchmarks/zero_speed.py --gpu                        # one GPU, one rank: the engine's overhead there

Every layout has two ranks with one thread each under the Trainer. Several layouts of a model are up at the same time:
one takes its steps while the others wait, then the next one does, and the order alternates each round. A noisy machine
therefore slows all of them alike. Besides seconds, the benchmark records the CPU seconds of the process, which noise
affects less, and its page faults. Ranks are forked from a process that has imported everything, with torchrun's
environment variables; on a GPU they are spawned.

Writes docs/results/zero_speed.md and .json (zero_speed_gpu.* on a GPU), after each part.
"""

import argparse
import cProfile
import io
import json
import multiprocessing
import os
import pstats
import resource
import socket
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from releases import this_machine

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
HOST = "127.0.0.1"
FIGURES = ("seconds", "cpu_seconds", "faults")  # per step
CONTEXT = multiprocessing.get_context("forkserver")  # all ranks share what is imported once

# "study": as many rows or tokens per rank as the published study had per GPU, 2,048.
MODELS = {
    "deep_512": ({"model_type": "mlp", "width": 256, "layers": 512, "num_labels": 10}, "sequence_classification", 64),
    "deep_study": (
        {"model_type": "mlp", "width": 256, "layers": 128, "num_labels": 256}, "sequence_classification", 2048
    ),
    "gptlite_study": ({"model_type": "gptlite", "vocab_size": 65, "num_hidden_layers": 6, "hidden_size": 384,
                       "num_attention_heads": 6, "max_position_embeddings": 256, "bias": False}, "causal_lm", 8),
}  # fmt: skip


class Group:
    """The ranks of one layout, running and waiting."""

    def __init__(self, name: str, model: str, layout: dict, ranks: int, folder: Path, steps: int) -> None:
        config, head, batch = MODELS[model]
        place = folder / name
        place.mkdir(parents=True)
        flags = {
            "output_dir": place / "run", "do_train": True, "deepspeed": written(layout, place),
            "per_device_train_batch_size": batch * 2 // ranks, "max_steps": 100_000, "report_to": "none",
            "save_strategy": "no", "logging_strategy": "no", "bf16": False, "remove_unused_columns": False,
            "ddp_find_unused_parameters": False, **layout.get("flags", {}),
        }  # fmt: skip
        argv = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        self.name, self.log = name, place / "log.txt"
        self.pipes, self.processes = [], []
        port = str(free_port())
        for number in range(ranks):
            here, there = CONTEXT.Pipe()
            env = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            env |= {"MASTER_ADDR": HOST, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "turns"}  # as torchrun sets it
            given = ({key: str(value) for key, value in env.items()} if ranks > 1 else {}, self.log)
            # Another environment needs a new process: forked ones have already imported torch, which reads it then.
            context = multiprocessing.get_context("spawn") if layout.get("env") else CONTEXT
            self.processes.append(context.Process(target=rank, args=(there, *given, steps, config, head, argv)))
            os.environ |= layout.get("env", {})
            self.processes[-1].start()
            for key in layout.get("env", {}):
                del os.environ[key]
            there.close()
            self.pipes.append(here)

    def ask(self, word: str) -> list[dict]:
        """The answer of each rank to the command `word`."""
        try:
            for pipe in self.pipes:
                pipe.send(word)
            return [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError):
            raise SystemExit(f"{self.name} ended:\n{self.log.read_text()[-3000:]}") from None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def written(layout: dict, place: Path) -> str:
    """The value of --deepspeed: a shipped name, or a changed copy of its file; None removes a key."""
    name, changes = layout.get("config", "none"), layout.get("changes")
    if not changes:
        return name
    found = json.loads((REPO / "ds_configs" / f"{name}.json").read_text())
    for key, value in changes.items():
        section, _, leaf = key.rpartition(".")
        holder = found.setdefault(section, {}) if section else found
        holder[leaf] = value
        if value is None:
            del holder[leaf]
    path = place / "ds.json"
    path.write_text(json.dumps(found, indent=1))
    return str(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def rank(pipe, env: dict, log: Path, steps: int, config: dict, head: str, argv: list[str]) -> None:
    """One rank: runs `steps` steps of the Trainer for each command."""
    os.environ.update(env)
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)

    import torch
    from transformers import TrainerCallback, default_data_collator, set_seed

    from finetune.measure.models import build, samples
    from finetune.run.flags.common import RunArguments
    from finetune.training.kept_memory import keep_freed_memory
    from finetune.training.loss import settle_loss_scaling
    from finetune.training.start import start
    from finetune.training.trainer import FinetuneTrainer

    class Turns(TrainerCallback):
        left, begun, profile = 0, 0.0, None

        def on_step_begin(self, args, state, control, **kwargs) -> None:
            if self.left:
                return
            word, self.left = pipe.recv(), steps
            if word == "python":
                self.profile = cProfile.Profile()
                self.profile.enable()
            elif word == "kernels":
                self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self.profile.__enter__()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.used = resource.getrusage(resource.RUSAGE_SELF)
            self.begun = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            self.left -= 1
            if self.left:
                return
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds, used, before = (
                time.perf_counter() - self.begun,
                resource.getrusage(resource.RUSAGE_SELF),
                self.used,
            )
            cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            answer = {"seconds": seconds / steps, "cpu_seconds": cpu / steps}
            answer["faults"] = (used.ru_minflt - before.ru_minflt) / steps
            if self.profile is not None:
                answer["profile"] = self.stop()
            pipe.send(answer)

        def stop(self) -> str:
            profile, self.profile = self.profile, None
            if isinstance(profile, torch.profiler.profile):
                profile.__exit__(None, None, None)
                return profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
            profile.disable()
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
            return text.getvalue()

    session = start((RunArguments,), {}, argv, scratch_defaults={})
    if session.training.device.type == "cpu":
        keep_freed_memory()
    set_seed(session.training.seed)
    model = build(config, head, "sdpa")
    settle_loss_scaling(model, label_per_token=head == "causal_lm")
    FinetuneTrainer(
        model=model,
        args=session.training,
        train_dataset=[samples(config, head, config.get("max_position_embeddings", 1))] * 25_600,
        data_collator=default_data_collator,
        callbacks=[Turns()],
    ).train()


def measure(model: str, layouts: dict, rounds: int, steps: int, ranks: int = 2, words: tuple = ()) -> dict:
    """Seconds per step of each layout by round, on the slower rank; the order alternates each round."""
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, layout in layouts.items():
                groups.append(Group(name, model, layout, ranks, Path(folder), steps))
            for group in groups:  # so that optimizers allocate their states
                group.ask("go")
            found: dict = {group.name: {figure: [] for figure in FIGURES} for group in groups}
            for turn in range(rounds):
                print(f"{model}: round {turn + 1} of {rounds}", end="\r", flush=True)
                for group in groups[:: -1 if turn % 2 else 1]:
                    answers = group.ask("go")
                    for figure in FIGURES:
                        found[group.name][figure].append(max(answer[figure] for answer in answers))
            for group in groups:
                for word in words:
                    found[group.name][word] = group.ask(word)[0]["profile"]
            return found
        finally:
            for group in groups:
                group.end()


SHIPPED = {name: {"config": name} for name in ("zero0", "zero1", "zero2", "zero3")}
ASKED = {"deep": {"zero1": 0.90, "zero2": 0.85}, "gptlite": {"zero1": 0.95, "zero2": 0.90}}
ZERO = "zero_optimization."


def changed(**keys) -> dict:
    return {"config": "zero1", "changes": {ZERO + key: value for key, value in keys.items()}}


def scattered(**keys) -> dict:
    """DeepSpeed's default, which excludes prescale_gradients."""
    return {
        "config": "zero1",
        "changes": {**changed(reduce_scatter=True, **keys)["changes"], "prescale_gradients": None},
    }


# zero1 with one setting changed at a time. The baseline is unchanged DDP.
SETTINGS = {
    "zero1 as shipped": {"config": "zero1"},
    "reduce_scatter true, DeepSpeed's default": scattered(),
    "that, and use_multi_rank_bucket_allreduce false": scattered(use_multi_rank_bucket_allreduce=False),
    "freed memory is not kept": {"config": "zero1", "env": {"MALLOC_ARENA_TEST": "8"}},
    "overlap_comm false": changed(overlap_comm=False),
    "contiguous_gradients false": changed(contiguous_gradients=False),
    "buckets of 5e4, as in the study": changed(reduce_bucket_size=50_000, allgather_bucket_size=50_000),
    "buckets of 5e6": changed(reduce_bucket_size=5_000_000, allgather_bucket_size=5_000_000),
    "no clipping, compute_grad_norm false": {
        "config": "zero1", "flags": {"max_grad_norm": 0.0},
        "changes": {ZERO + "compute_grad_norm": False, "gradient_clipping": 0.0},
    },
}  # fmt: skip
AT_ONCE = 3  # layouts that run beside DDP: they take memory even while they wait


def in_parts(model: str, layouts: dict, rounds: int, steps: int, ranks: int = 2) -> dict:
    """Figures of each layout, and of the baseline that ran beside it."""
    names, found = list(layouts), {}
    for at in range(0, len(names), AT_ONCE):
        beside = {name: layouts[name] for name in names[at : at + AT_ONCE]}
        got = measure(model, {"baseline": {}, **beside}, rounds, steps, ranks)
        for name in beside:
            found[name] = {**got[name], "baseline": got["baseline"]}
            print(f"{model} {name}: {' | '.join(cells(found[name]))}", flush=True)
    return found


def cells(row: dict) -> list[str]:
    """Seconds per step; median and range over rounds of baseline / layout; the same for CPU seconds; page faults."""
    words = [f"{statistics.median(row['seconds']):.3f}"]
    for figure in ("seconds", "cpu_seconds"):
        ratios = sorted(b / s for b, s in zip(row["baseline"][figure], row[figure], strict=True))
        words.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    return [*words, f"{statistics.median(row['faults']):.0f}"]


HEAD = ["seconds per step", "DDP / config: median (range)", "the same in CPU seconds", "page faults per step"]


def table(first: list[str], rows: list[list[str]]) -> list[str]:
    head = [*first, *HEAD]
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def render(results: dict) -> str:
    lines = [
        "# Speed of the shipped ZeRO configs compared with DDP",
        "",
        f"`{results['command']}`; {results['machine']}.",
        "",
        "`deep_study` (256 wide, 128 layers) and `gptlite_study` have 2,048 rows or tokens per rank, as the published",
        "study had per GPU. `deep_512` has 512 layers and 64 rows, so that computation does not hide the engine's",
        "overhead. A round runs each config once, and ratios are taken within one round: above 1, the config is faster",
        "than DDP. Other programs ran at the same time, as the ranges show.",
        "[ds_configs/README.md](../../ds_configs/README.md) explains what is slow in DeepSpeed on a CPU, and what was",
        "done about it.",
        "",
    ]
    if found := results.get("shipped"):
        rows = []
        for model, layouts in found.items():
            asked = ASKED[model.split("_")[0]]
            rows += [
                [model, name, f"{asked[name]:.2f}" if name in asked else "-", *cells(row)]
                for name, row in layouts.items()
            ]
        lines += ["## The shipped configs", "", *table(["model", "config", "target ratio"], rows)]
    if found := results.get("settings"):
        for model, layouts in found.items():
            lines += [f"## One setting at a time: {model}", ""]
            lines += table(["changed in zero1"], [[name, *cells(row)] for name, row in layouts.items()])
    for model, layouts in results.get("profile", {}).items():
        for name, row in layouts.items():
            lines += [f"## Profile: {model}, {name}, rank 0, {row['steps']} steps, by own time", "", "```"]
            lines += [line[:118].rstrip() for line in row["python"].splitlines() if line.strip()][:24]
            lines += ["```", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["shipped", "settings", "profile"])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", help="only layouts with these names")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT, help="folder")
    options = parser.parse_args()
    path = options.out / ("zero_speed_gpu.json" if options.gpu else "zero_speed.json")
    results = json.loads(path.read_text()) if path.is_file() else {}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))
    results["command"] = " ".join(["python benchmarks/zero_speed.py", *sys.argv[1:]])
    results["machine"] = f"{machine(options.gpu)}; {versions}; fp32"
    ranks = 1 if options.gpu else 2
    for part in options.parts:
        for model in options.models:
            run_part(part, model, options, ranks, results)
            path.write_text(json.dumps(results, indent=1) + "\n")
            path.with_suffix(".md").write_text(render(results))


def run_part(part: str, model: str, options: argparse.Namespace, ranks: int, results: dict) -> None:
    if part == "profile":
        if model != "deep_512":
            return
        got = measure(model, {"DDP": {}, "zero1": {"config": "zero1"}}, 1, options.steps, ranks, ("python",))
        each = {name: {"python": row["python"], "steps": options.steps} for name, row in got.items()}
        results.setdefault("profile", {})[model] = each
        return
    if part == "settings" and model != "deep_512":
        return
    layouts = SHIPPED if part == "shipped" else SETTINGS
    layouts = {name: layout for name, layout in layouts.items() if not options.only or name in options.only}
    results.setdefault(part, {}).setdefault(model, {}).update(
        in_parts(model, layouts, options.rounds, options.steps, ranks)
    )


def machine(gpu: bool) -> str:
    if not gpu:
        return f"2 ranks over gloo, {this_machine()}"
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU, but --gpu measures one. Drop the flag to measure on the CPU.")
    return f"1 rank on {torch.cuda.get_device_name()}: DDP stands for the plain Trainer"


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    if "--gpu" in sys.argv:
        CONTEXT = multiprocessing.get_context("spawn")
    else:
        os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        preload = ["finetune", "deepspeed", "finetune.training.trainer", "finetune.measure.__main__"]
        CONTEXT.set_forkserver_preload(preload)
    main()
