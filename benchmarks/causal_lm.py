"""recipes/causal_lm.py as a whole: validation loss, the Trainer's overhead, and memory for a large corpus.

    python benchmarks/causal_lm.py --text ../shared/data/tinyshakespeare/input.txt     # about fifteen minutes
    python benchmarks/causal_lm.py --text FILE --parts speed                           # one part only

Writes docs/results/causal_lm.md. Parts: `loss` (nanoGPT's CPU configuration, validation loss over the whole held-out
text), `speed` (step times of the recipe and of plain PyTorch loops with the same model, interleaved in rounds of 20
steps in one process, so that a noisy machine favors none), `compiled` and `compiled_bf16` (the same with torch.compile
for both, in fp32 and in bf16, for cores that have it), `corpus` (memory of a run on 1 GB of text: the given text,
repeated). causal_lm_parts.py measures the parts of a model, and causal_lm_gpu.py measures on a GPU.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from releases import in_words, this_machine, versions

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
CONFIG = "recipes/configs/gptlite_tinyshakespeare.yaml"
PUBLISHED = {"nanoGPT's README": 1.88}
TURN, TURNS, WARM_TURNS = 20, 105, 5  # steps per round; rounds; warm-up rounds, which are not counted
CORPUS_BYTES = 10**9
CORPORA = {
    "the text as it is": "the text, once",
    "1 GB of it": "the text, repeated to 1 GB",
}  # in the data; on the page
ONLY_TRAIN = "--eval_strategy no --save_strategy no --do_eval False --sample_tokens 0".split()


def recipe(text: str, folder: Path, *words: str) -> list[str]:
    command = ["recipes/causal_lm.py", "--config", CONFIG, "--train_file", text, "--output_dir", str(folder)]
    return [*command, *words]


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    return done.stdout


def loss(text: str, scratch: Path) -> dict:
    """The validation loss of the shipped config in fp32, over the whole held-out text."""
    start = time.perf_counter()
    run(recipe(text, scratch / "loss", "--sample_tokens", "0", "--bf16", "False"))
    found = json.loads((scratch / "loss" / "all_results.json").read_text())
    return {"eval_loss": found["eval_loss"], "seconds": time.perf_counter() - start}


def speed(text: str, scratch: Path) -> dict:
    """Milliseconds per step in each round, for the recipe and the loops; and medians of the recipe's parts."""
    loops = {"plain loop": {"fused": False}, "plain loop, fused AdamW": {}}
    return turns_of(text, scratch / "speed", loops, "--bf16", "False")


def compiled(text: str, scratch: Path, half: bool) -> dict:
    """As `speed`, with torch.compile for the recipe and the loop, in bf16 or fp32."""
    loops = {"plain loop": {"compiled": True, "half": half}}
    return turns_of(text, scratch / f"compiled_{half}", loops, "--bf16", str(half), "--torch_compile", "True")


def turns_of(text: str, folder: Path, loops: dict, *words: str) -> dict:
    command = [__file__, "--text", text, "--turns", json.dumps([str(folder), loops, words])]
    return json.loads(run(command).splitlines()[-1])


def turns(text: str, folder: str, kinds: dict, words: list[str]) -> None:
    """Run the recipe with `words`, pausing it every TURN steps to run as many of each plain loop. Prints JSON."""
    import transformers.trainer as upstream
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainerCallback

    from finetune.training.trainer import FinetuneTrainer

    parts: dict[str, list[float]] = defaultdict(list)
    for owner, name, part in (
        (FinetuneTrainer, "get_batch_samples", "data"),
        (FinetuneTrainer, "training_step", "forward and backward"),
        (FinetuneTrainer, "_clip_grad_norm", "clipping"),
        (AcceleratedOptimizer, "step", "optimizer"),
    ):
        watch(owner, name, parts[part])
    found: dict[str, list[float]] = defaultdict(list)
    loops = {name: PlainLoop(text, **kind) for name, kind in kinds.items()}

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            self.mark = time.perf_counter()

        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            if state.global_step % TURN:
                return
            found["recipe"].append((time.perf_counter() - self.mark) / TURN * 1e3)
            for name, loop in loops.items():
                found[name].append(loop.milliseconds_a_step())
            self.mark = time.perf_counter()

    upstream.DEFAULT_CALLBACKS.append(Turns)
    words = [*ONLY_TRAIN, "--max_steps", str(TURN * TURNS), "--warmup_steps", "10", *words]
    sys.argv = recipe(text, Path(folder), *words)
    runpy.run_path(sys.argv[0], run_name="__main__")
    counted = {name: values[WARM_TURNS:] for name, values in found.items()}
    medians = {name: statistics.median(values[WARM_TURNS * TURN :]) * 1e3 for name, values in parts.items()}
    parts_of_loop = loops["plain loop"].medians()
    print(json.dumps({"steps": TURN, "turns": counted, "parts": medians, "loop parts": parts_of_loop}))


def watch(owner: type, name: str, seconds: list[float]) -> None:
    inner = getattr(owner, name)

    def outer(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, outer)


class PlainLoop:
    """What one would write without the Trainer: the same model, batch size, clipping and schedule. `half`: bf16."""

    def __init__(self, text: str, fused: bool = True, compiled: bool = False, half: bool = False) -> None:
        import torch

        from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

        letters = Path(text).read_text()
        numbers = {letter: i for i, letter in enumerate(sorted(set(letters)))}
        self.ids = torch.tensor([numbers[letter] for letter in letters[: int(len(letters) * 0.9)]])
        shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 128, "max_position_embeddings": 64}
        self.model = GPTLiteForCausalLM(GPTLiteConfig(vocab_size=len(numbers), bias=False, **shape)).train()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=fused)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.forward, self.half = torch.compile(self.model) if compiled else self.model, half
        self.parts: dict[str, list[float]] = defaultdict(list)

    def milliseconds_a_step(self) -> float:
        start = time.perf_counter()
        for _ in range(TURN):
            self.step()
        return (time.perf_counter() - start) / TURN * 1e3

    def step(self) -> None:
        import torch

        marks = [time.perf_counter()]
        places = torch.randint(len(self.ids) - 65, (12,)).tolist()
        x = torch.stack([self.ids[place : place + 64] for place in places])
        y = torch.stack([self.ids[place + 1 : place + 65] for place in places])
        marks.append(time.perf_counter())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            loss = self.forward(input_ids=x, labels=y, shift_labels=y).loss
        loss.backward()
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        self.schedule.step()
        self.optimizer.zero_grad()
        for name, (a, b) in zip(
            ("data", "forward and backward", "clipping", "optimizer"), pairwise(marks), strict=True
        ):
            self.parts[name].append(b - a)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values[WARM_TURNS * TURN :]) * 1e3 for name, values in self.parts.items()}


def corpus(text: str, scratch: Path) -> dict:
    """Peak memory in MiB and seconds of two steps on the text and on CORPUS_BYTES of it, tokenizing included."""
    large = scratch / "large.txt"
    content = Path(text).read_bytes()
    with large.open("wb") as file:
        for _ in range(CORPUS_BYTES // len(content)):
            file.write(content)
    found = {}
    for name, path in zip(CORPORA, (Path(text), large), strict=True):
        caches = {"FINETUNE_CACHE": str(scratch / "finetune"), "HF_DATASETS_CACHE": str(scratch / "datasets")}
        command = recipe(str(path), scratch / path.stem, *ONLY_TRAIN, "--max_steps", "2")
        start, peak = time.perf_counter(), 0.0
        process = subprocess.Popen([sys.executable, *command], cwd=REPO, env={**os.environ, **caches})
        while process.poll() is None:
            peak = max(peak, sum(map(anonymous_mib, family(process.pid))))
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(process.returncode)
        size = path.stat().st_size
        found[name] = {"bytes": size, "peak_mib": peak, "seconds": time.perf_counter() - start}
        print(name, found[name], flush=True)
    return found


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    members = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                members += family(int(child))
    except OSError:
        pass  # it has just ended
    return members


def anonymous_mib(pid: int) -> float:
    """Anonymous memory in MiB, shared pages counted once (Pss_Anon). Mapped files are left out: they can be evicted."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon")) / 1024


COMPILED = {"compiled": ("fp32", False), "compiled_bf16": ("bf16", True)}
PARTS: dict[str, Callable[[str, Path], dict]] = {"loss": loss, "speed": speed}
PARTS |= {part: partial(compiled, half=half) for part, (_, half) in COMPILED.items()}
PARTS["corpus"] = corpus


def render(results: dict) -> str:
    """Render the page in docs/results/ from the data beside it."""
    command = "python benchmarks/causal_lm.py --text ../shared/data/tinyshakespeare/input.txt"
    lines = ["# recipes/causal_lm.py: loss, step time and memory", ""]
    lines += [f"Made by `{command}`. The machine of each part:", ""]
    lines += [*(f"- `{part}`: {results['machines'][part]}." for part in PARTS if part in results), ""]
    if found := results.get("loss"):
        lines += ["## nanoGPT's character-level CPU configuration: 2,000 steps of 12 x 64 characters, fp32", ""]
        lines += ["| run | validation loss |", "|---|---|"]
        took = f"run time: {found['seconds']:.0f} s"
        lines += [f"| recipe, over the whole held-out text ({took}) | {found['eval_loss']:.4f} |"]
        lines += [f"| {name}, over random batches | {value} |" for name, value in PUBLISHED.items()]
        lines += [
            "",
            "Steps, batch size and data split are the same. The learning rate (4e-3; nanoGPT uses 1e-3) was chosen by",
            "this loss.",
        ]
    if found := results.get("speed"):
        rounds = len(found["turns"]["recipe"])
        lines += ["", f"## Step time: {rounds} rounds of {found['steps']} steps in one process (fp32, two threads)", ""]
        lines += [
            "The recipe and the loops are interleaved. The ratio is the recipe's step time over the run's, per round.",
            "",
        ]
        lines += step_times(found["turns"])
        lines += [
            "",
            "The recipe uses fused AdamW, so the second ratio is the Trainer's overhead: its data loader, and",
            "accelerate's lookups in each backward pass and optimizer step. A plain loop would normally use torch's",
            "default AdamW.",
        ]
        lines += [
            "",
            "Where the time of a step goes, medians in ms:",
            "",
            "| part | recipe | plain loop |",
            "|---|---|---|",
        ]
        rest = {}
        for name, parts in (("recipe", found["parts"]), ("plain loop", found["loop parts"])):
            rest[name] = statistics.median(found["turns"][name]) - sum(parts.values())
        for part, value in found["parts"].items():
            lines.append(f"| {part} | {value:.2f} | {found['loop parts'][part]:.2f} |")
        lines.append(f"| everything else | {rest['recipe']:.2f} | {rest['plain loop']:.2f} |")
    for part, (precision, _) in COMPILED.items():
        if not (found := results.get(part)):
            continue
        rounds = len(found["turns"]["recipe"])
        title = f"## Step time with torch.compile, {precision}: {rounds} rounds of {found['steps']} steps, two threads"
        lines += ["", title, ""]
        lines += step_times(found["turns"])
    if "compiled_bf16" in results:
        lines += ["", "The loop attends with SDPA, torch's default; in bf16 on a CPU the recipe does not."]
    if found := results.get("corpus"):
        lines += ["", "## Memory for a large corpus (character tokens)", ""]
        lines += ["Tokenization is included. Peak memory is anonymous memory, summed over all processes.", ""]
        lines += ["| corpus | size, MB | peak memory, MiB | seconds |", "|---|---|---|---|"]
        for name, row in found.items():
            lines.append(
                f"| {CORPORA[name]} | {row['bytes'] / 1e6:,.0f} | {row['peak_mib']:,.0f} | {row['seconds']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def step_times(turns: dict[str, list[float]]) -> list[str]:
    """The table of a step's time in each run, and of the recipe's divided by it."""
    lines = ["| run | ms per step, median | 10th percentile | 90th percentile "]
    lines[-1] += "| recipe / run, median (10th to 90th percentile) |"
    lines += ["|---|---|---|---|---|"]
    ours = turns["recipe"]
    for name, values in turns.items():
        tenths = statistics.quantiles(values, n=10)
        ratios = [a / b for a, b in zip(ours, values, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=10)
        shown = f"{statistics.median(values):.2f} | {tenths[0]:.2f} | {tenths[-1]:.2f}"
        apart = "" if values is ours else f"{statistics.median(ratios):.3f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {name} | {shown} | {apart} |")
    return lines


def measure(options: argparse.Namespace) -> None:
    path = OUT / "causal_lm.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts:
            results[part] = PARTS[part](options.text, Path(scratch))
            results.setdefault("machines", {})[part] = f"{this_machine()}; {in_words(versions())}"
            path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(results))
    print(render(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="tinyshakespeare's input.txt")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.text = str(Path(options.text).resolve())
    if options.turns:
        turns(options.text, *json.loads(options.turns))
    else:
        measure(options)


if __name__ == "__main__":
    main()
