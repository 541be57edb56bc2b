"""recipes/causal_lm.py at nanoGPT's CPU setting, against a plain PyTorch loop over one model. Writes docs/results/.

    python benchmarks/causal_lm.py --text ../shared/data/tinyshakespeare/input.txt     # about five minutes
    python benchmarks/causal_lm.py --text FILE --parts loss                            # one part alone

Parts: `loss` (the whole recipe run, its validation loss over the whole held-out text), `speed` (step times of recipe
and loop, alternating), `cross_entropy` (time and peak memory of the chunked head at a vocabulary of 50,304).
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
CONFIG = "recipes/configs/gptlite_tinyshakespeare.yaml"
PUBLISHED = {"nanoGPT's README": 1.88, "nanoGPT run on such a machine": 1.919}  # its README; shared FACTS.md
STEPS, WARMUP = 120, 20


def recipe(text: str, folder: Path, *words: str) -> dict:
    command = [sys.executable, "recipes/causal_lm.py", "--config", CONFIG, "--train_file", text]
    command += ["--output_dir", str(folder), *words]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    return json.loads((folder / "all_results.json").read_text())


def loss(options: argparse.Namespace, scratch: Path) -> dict:
    """The validation loss of the shipped config, over the whole held-out text."""
    start = time.perf_counter()
    words = ["--bf16", str(options.bf16)] if options.bf16 is not None else []
    found = recipe(options.text, scratch / "loss", "--sample_tokens", "0", *words)
    return {"eval_loss": found["eval_loss"], "seconds": time.perf_counter() - start}


def speed(options: argparse.Namespace, scratch: Path) -> dict:
    """Median step times in milliseconds of the recipe and of the loop, in fp32, alternating."""
    found: dict[str, list[float]] = {"recipe": [], "plain loop": []}
    for repeat in range(options.repeats):
        words = ["--max_steps", str(STEPS), "--eval_strategy", "no", "--save_strategy", "no", "--do_eval", "False"]
        words += ["--bf16", "False", "--logging_steps", "20", "--sample_tokens", "0", "--warmup_steps", "10"]
        folder = scratch / f"speed{repeat}"
        recipe(options.text, folder, *words)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step_seconds"] * 1e3 for row in rows if row.get("step", 0) > WARMUP and "step_seconds" in row]
        found["recipe"].append(statistics.median(steps))
        loop = subprocess.run(
            [sys.executable, __file__, "--text", options.text, "--loop"],
            cwd=REPO,
            capture_output=True,
            text=True,
            check=True,
        )
        found["plain loop"].append(float(loop.stdout.strip().splitlines()[-1]))
        print({name: round(values[-1], 2) for name, values in found.items()}, flush=True)
    return found


def plain_loop(text: str) -> None:
    """What one would write without the Trainer: the same model, batches, optimizer and clipping. Prints the median."""
    import numpy as np
    import torch

    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    letters = Path(text).read_text()
    vocabulary = {letter: i for i, letter in enumerate(sorted(set(letters)))}
    ids = torch.from_numpy(np.array([vocabulary[letter] for letter in letters[: int(len(letters) * 0.9)]]))
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 128, "max_position_embeddings": 64}
    model = GPTLiteForCausalLM(GPTLiteConfig(vocab_size=len(vocabulary), bias=False, **shape)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    times = []
    for step in range(STEPS):
        start = time.perf_counter()
        places = torch.randint(len(ids) - 65, (12,))
        x = torch.stack([ids[p : p + 64] for p in places])
        y = torch.stack([ids[p + 1 : p + 65] for p in places])
        loss = model(input_ids=x, labels=y, shift_labels=y).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step >= WARMUP:
            times.append((time.perf_counter() - start) * 1e3)
    print(statistics.median(times))


def cross_entropy(options: argparse.Namespace, scratch: Path) -> dict:
    """Forward and backward of head and loss, 2,048 tokens x 512 x 50,304 in fp32: seconds, and MiB of peak resident
    memory above what the process had before, each in a process of its own."""
    found = {}
    for name, chunk in (("plain", 0), ("chunked, 512", 512)):
        done = subprocess.run(
            [sys.executable, __file__, "--text", options.text, "--head", str(chunk)],
            cwd=REPO,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found[name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(name, found[name], flush=True)
    return found


def head(chunk: int) -> None:
    import torch
    from torch import nn

    from finetune.models.chunked_loss import LossHead

    torch.manual_seed(0)
    x, targets = torch.randn(1, 2048, 512, requires_grad=True), torch.randint(50_304, (1, 2048))
    layer = LossHead(512, 50_304, bias=False) if chunk else nn.Linear(512, 50_304, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)  # both have it; it is not what is compared
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if chunk:
        layer.chunk_tokens, layer.targets = chunk, targets
        loss = layer(x)
    else:
        loss = nn.functional.cross_entropy(layer(x).float().view(-1, 50_304), targets.view(-1))
    loss.backward()
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"seconds": seconds, "peak_mib": peak, "loss": loss.item(), "gradient": x.grad.norm().item()}))


def render(results: dict) -> str:
    """The page in docs/results/, from the figures kept beside it."""
    lines = ["# recipes/causal_lm.py", "", results["machine"] + ". Made by"]
    lines += ["`python benchmarks/causal_lm.py --text ../shared/data/tinyshakespeare/input.txt`.", ""]
    if "loss" in results:
        found = results["loss"]
        lines += ["## nanoGPT's character setting for a CPU: 2,000 steps of 12 x 64 characters", ""]
        lines += ["| run | validation loss |", "|---|---|"]
        lines += [
            f"| recipe, over the whole held-out text ({found['seconds']:.0f} s in all) | {found['eval_loss']:.4f} |"
        ]
        lines += [f"| {name}, over random batches | {value} |" for name, value in PUBLISHED.items()]
    if "speed" in results:
        lines += ["", "## Step time against a plain loop over the same model (fp32, two threads)", ""]
        lines += ["| run | ms, medians of each run |", "|---|---|"]
        median = {}
        for name, values in results["speed"].items():
            median[name] = statistics.median(values)
            lines.append(f"| {name} | {', '.join(f'{value:.1f}' for value in values)} |")
        lines += [f"| ratio | {median['recipe'] / median['plain loop']:.3f} |"]
    if "cross_entropy" in results:
        lines += ["", "## Head and loss, 2,048 tokens x 512 x 50,304, fp32", ""]
        lines += ["| head | seconds | peak MiB above the start | loss | gradient norm |", "|---|---|---|---|---|"]
        for name, found in results["cross_entropy"].items():
            figures = (
                f"{found['seconds']:.2f} | {found['peak_mib']:.0f} | {found['loss']:.6f} | {found['gradient']:.8f}"
            )
            lines.append(f"| {name} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="tinyshakespeare's input.txt")
    parser.add_argument("--parts", nargs="*", default=["loss", "speed", "cross_entropy"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--bf16", type=lambda word: word == "True", help="of the part loss; default: as the recipe chooses"
    )
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--head", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.text = str(Path(options.text).resolve())
    if options.loop:
        plain_loop(options.text)
    elif options.head is not None:
        head(options.head)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    path = OUT / "causal_lm.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts:
            results[part] = {"loss": loss, "speed": speed, "cross_entropy": cross_entropy}[part](options, Path(scratch))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores; {versions}"
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
