"""recipes/causal_lm.py on one NVIDIA GPU, at the shape of GPT-2 124M. Writes docs/results/causal_lm_gpu.md and .json.

    python benchmarks/causal_lm_gpu.py                                # all parts, sized for a GPU of 80 GiB
    python benchmarks/causal_lm_gpu.py --batch 4 --parts training     # a smaller GPU; one part only
    python benchmarks/causal_lm_gpu.py --trial --repeats 1            # a dry run at toy size, also without a GPU

Parts: `training` (the recipe, the stock Trainer on stock GPT-2, and a plain compiled loop over the recipe's model),
`cross_entropy` (head and loss with all logits at once, and with `LossHead`), `checkpointing` (none, every layer, every
2nd layer). Runs are interleaved, each in its own process. Running one part replaces its section of the page and keeps
the others. Nothing is downloaded.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainerCallback, TrainingArguments

from finetune.data.tokenizer import train_text_tokenizer
from finetune.models.chunked_loss import LossHead, use_chunked_loss
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.multiplied import multiplied_parameters
from finetune.run.facts import CHUNK_TOKENS
from finetune.run.sizes import GPTLITE_SIZES
from finetune.training.speed import FLOPS_PER_PARAM_AND_TOKEN, peak_flops, peak_memory_bytes

REPO = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = CHUNK_TOKENS["cuda"]  # what the recipe takes on a GPU


@dataclass(frozen=True)
class Scale:
    """The size of model, batch and run."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50_304  # GPT-2's 50,257, filled up to a multiple of 64 as nanoGPT does (its model.py)
    block: int = 1024
    batch: int = 16
    steps: int = 80
    warmup: int = 30  # steps for compilation and the allocator's warm-up
    window: int = 10  # steps between two logs of the recipe
    passes: int = 20  # timed steps in the two parts that time single steps
    head_tokens: int = 16_384
    compiled: bool = True  # recipe and loop


TRIAL = Scale(2, 64, 2, vocab=512, block=64, batch=4, steps=6, warmup=2, window=2, passes=2, head_tokens=4096)

ABOVE, OFF = "peak GiB above the start", "gradients off by"


def prepare(scale: Scale, folder: Path) -> None:
    """Write what all runs share: seeded text, its tokens, and a model. The model's vocabulary is larger than the
    tokenizer's, because speed does not depend on which tokens occur."""
    text = "".join(random.Random(0).choices("etaoin shrdlu\n", k=(scale.steps + 4) * scale.batch * scale.block))
    (folder / "train.txt").write_text(text)
    tokenizer = train_text_tokenizer("byte", [], 256, scale.block, with_end=True)
    torch.save(torch.tensor(tokenizer(text, verbose=False)["input_ids"]), folder / "ids.pt")
    tokenizer.save_pretrained(str(folder / "model"))
    gpt_lite(scale).save_pretrained(folder / "model")


def gpt_lite(scale: Scale):
    torch.manual_seed(0)
    shape = {"num_hidden_layers": scale.layers, "hidden_size": scale.width, "num_attention_heads": scale.heads}
    shape |= {"max_position_embeddings": scale.block, "vocab_size": scale.vocab}
    return GPTLiteForCausalLM(GPTLiteConfig(**{**GPTLITE_SIZES["small"], **shape}))


def recipe(scale: Scale, folder: Path, whole_logits: bool) -> dict:
    """Run the recipe once, with its own flags; figures are its own (metrics.jsonl, train_results.json)."""
    flags = f"--block_size {scale.block} --per_device_train_batch_size {scale.batch} --max_steps {scale.steps} "
    flags += f"--logging_steps {scale.window} --bf16 True --torch_compile {scale.compiled} --eval_strategy no "
    flags += "--save_strategy no --do_eval False --sample_tokens 0 --validation_split_percentage 1 "
    flags += "--overwrite_output_dir True"
    if whole_logits or scale.vocab < Scale.vocab:  # a trial's vocabulary is too small for the recipe's own choice
        flags += f" --loss_chunk_tokens {0 if whole_logits else CHUNK}"
    paths = {"model_name_or_path": "model", "train_file": "train.txt", "output_dir": "run"}
    words = [f"--{flag}={folder / name}" for flag, name in paths.items()]
    call([sys.executable, "recipes/causal_lm.py", *words, *flags.split()], folder)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row and row["step"] > scale.warmup]
    return {
        "tokens/s": statistics.harmonic_mean(row["real_tokens_per_second"] for row in rows),  # equal windows
        "MFU": statistics.harmonic_mean(row["mfu"] for row in rows) if "mfu" in rows[0] else None,
        "peak GiB": json.loads((folder / "run" / "train_results.json").read_text())["peak_memory_gib"],
    }


def stock(scale: Scale, folder: Path, tf32: bool, attention: str) -> dict:
    """The Trainer as a tutorial uses it with GPT-2: default optimizer, default dropout, all defaults."""
    marks = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (scale.warmup, scale.steps):
                marks[state.global_step] = now()

    torch.set_float32_matmul_precision("high" if tf32 else "highest")  # what --tf32 sets, where there is TF32
    shape = {"n_layer": scale.layers, "n_embd": scale.width, "n_head": scale.heads, "n_positions": scale.block}
    config = GPT2Config(vocab_size=scale.vocab, bos_token_id=0, eos_token_id=0, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    size = {"per_device_train_batch_size": scale.batch, "max_steps": scale.steps}
    arguments = TrainingArguments(output_dir=str(folder / "stock"), save_strategy="no", **size)
    rows = [
        {"input_ids": block, "labels": block}
        for block in torch.load(folder / "ids.pt", weights_only=True).split(scale.block)
    ]
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return speed(scale, model, marks[scale.steps] - marks[scale.warmup])


def loop(scale: Scale, folder: Path) -> dict:
    """A hand-written loop: the recipe's model compiled, autocast, fused AdamW, batches already on the GPU."""
    torch.set_float32_matmul_precision("high")  # as the Trainer does where it compiles
    model = gpt_lite(scale).to(DEVICE).train()
    forward = torch.compile(model) if scale.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    ids, shape = torch.load(folder / "ids.pt", weights_only=True).to(DEVICE), (scale.steps, scale.batch, scale.block)
    inputs, targets = (part[: math.prod(shape)].view(shape) for part in (ids, ids[1:]))
    for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):  # each (B, T)
        if number == scale.warmup:
            start = now()
        step(forward, model, optimizer, x, y)
    return speed(scale, model, now() - start)


def step(forward, model, optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = forward(input_ids=x, labels=y, shift_labels=y).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def speed(scale: Scale, model, seconds: float) -> dict:
    """Figures of the steps after warm-up; MFU as the recipe defines it (finetune/training/speed.py)."""
    tokens = (scale.steps - scale.warmup) * scale.batch * scale.block / seconds
    peak, flops = peak_flops(), FLOPS_PER_PARAM_AND_TOKEN * multiplied_parameters(model)
    return {"tokens/s": tokens, "MFU": tokens * flops / peak if peak else None, "peak GiB": peak_memory_bytes() / 2**30}


def head(scale: Scale, folder: Path, chunk: int, bf16: bool) -> dict:
    """Forward and backward of head and loss (`chunk` 0: all logits at once), and the gradients' distance from fp32."""
    torch.manual_seed(0)
    x = torch.randn(1, scale.head_tokens, scale.width, device=DEVICE, requires_grad=True)
    targets = torch.randint(scale.vocab, (1, scale.head_tokens), device=DEVICE)
    layer = LossHead(scale.width, scale.vocab, bias=False, device=DEVICE)
    layer.weight.grad = torch.zeros_like(layer.weight)  # it is there whichever head is used
    layer.chunk_tokens = chunk

    def once(chunk: int, bf16: bool) -> None:
        x.grad, layer.targets = None, targets if chunk else None
        layer.weight.grad.zero_()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=bf16):
            loss = layer(x)
            if not chunk:  # the logits in fp32, as transformers has it (loss/loss_utils.py, ForCausalLMLoss)
                loss = torch.nn.functional.cross_entropy(loss.float().view(-1, scale.vocab), targets.view(-1))
        loss.backward()

    found = timed(lambda: once(chunk, bf16), scale.passes)
    own = [x.grad, layer.weight.grad.clone()]
    once(0, False)
    off = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(own, (x.grad, layer.weight.grad), strict=True)]
    return {**found, OFF: max(off)}


def layers(scale: Scale, folder: Path, every: int) -> dict:
    """A step in bf16 with the loss computed by `LossHead`, checkpointing every `every` layers; 0 for none."""
    model = gpt_lite(scale).to(DEVICE).train()
    use_chunked_loss(model, CHUNK)
    if every:
        model.activation_checkpointing_enable(every_n_layers=every)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randint(scale.vocab, (scale.batch, scale.block), device=DEVICE)
    return timed(lambda: step(model, model, optimizer, x, x), scale.passes)


def timed(work, passes: int) -> dict:
    """Milliseconds per pass and peak memory, measured after two warm-up passes."""
    before = peak_memory_bytes()  # on a CPU before warm-up, because its peak cannot be reset
    work()
    work()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    marks = [now()]
    for _ in range(passes):
        work()
        marks.append(now())
    seconds, peak = statistics.median(b - a for a, b in pairwise(marks)), peak_memory_bytes()
    return {"ms": seconds * 1e3, "peak GiB": peak / 2**30, ABOVE: (peak - before) / 2**30}


def now() -> float:
    """The clock in seconds, once the GPU has finished all queued work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def call(command: list[str], folder: Path) -> str:
    """Run a command with its caches in `folder`, on the first GPU only: the Trainer would use all of them."""
    own = {"FINETUNE_CACHE": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "datasets")}
    own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run(command, cwd=REPO, env={**os.environ, **own}, capture_output=True, text=True)
    if done.returncode:
        mend = "\nGive a smaller --batch." if "out of memory" in done.stdout + done.stderr else ""
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}{mend}")
    return done.stdout


RECIPE, LOOP, STOCK = "recipe, bf16", "plain loop, bf16, fused AdamW", "stock Trainer, TF32, eager attention"
PLAIN, CHUNKED = "{}, all logits at once", "{}, LossHead, {} tokens"
RUNS = {
    "training": {
        RECIPE: partial(recipe, whole_logits=False),
        PLAIN.format(RECIPE): partial(recipe, whole_logits=True),
        LOOP: loop,
        STOCK: partial(stock, tf32=True, attention="eager"),
        "stock Trainer, TF32, sdpa": partial(stock, tf32=True, attention="sdpa"),
        "stock Trainer, fp32, eager attention": partial(stock, tf32=False, attention="eager"),
    },
    "cross_entropy": {
        (CHUNKED if chunk else PLAIN).format(precision, chunk): partial(head, chunk=chunk, bf16=precision == "bf16")
        for precision in ("bf16", "fp32")
        for chunk in (0, 1024, 2048, 4096, 8192)
    },
    "checkpointing": {
        name: partial(layers, every=every) for every, name in enumerate(("none", "every layer", "every 2nd layer"))
    },
}
ASKED = [  # part, figure, run, the run that it is divided by, target
    ("training", "tokens/s", RECIPE, STOCK, ">= 1.7"),
    ("training", "tokens/s", RECIPE, LOOP, ">= 0.95"),
    ("cross_entropy", ABOVE, CHUNKED.format("bf16", CHUNK), PLAIN.format("bf16"), "<= 0.25"),
    ("cross_entropy", "ms", CHUNKED.format("bf16", CHUNK), PLAIN.format("bf16"), "<= 1"),
    ("cross_entropy", OFF, CHUNKED.format("fp32", CHUNK), None, "<= 1e-05"),
]
TRIAL_NOTE = """**TRIAL AT TOY SIZE. It only shows that the script runs; its figures are meaningless.** On a CPU, memory
is `ru_maxrss`, the largest resident set of the whole process, and not an allocator's peak."""
NOTES = {
    "training": "MFU: 6 FLOPs per token and active parameter, divided by the peak rate in half precision. GPT-2 has "
    "its own dropout of 0.1, the recipe's model has none. GPUs older than Ampere have no TF32.",
    "cross_entropy": "Forward and backward, TF32 off. Gradients off by: the largest difference from a gradient of the "
    "plain head in fp32, relative to the largest gradient of that tensor.",
    "checkpointing": "One step in bf16, not compiled, loss computed by LossHead. The optimizer's state is allocated "
    "before the start.",
}


def measure(part: str, scale: Scale, repeats: int, only: list[str]) -> dict:
    """Figures of each run of a part, by name, one entry per repeat; the runs are interleaved."""
    found: dict[str, list] = {name: [] for name in RUNS[part] if not only or any(one in name for one in only)}
    with tempfile.TemporaryDirectory() as folder:
        if part == "training":
            prepare(scale, Path(folder))
        for name in list(found) * repeats:
            said = call([sys.executable, __file__, *sys.argv[1:], "--run", part, name, folder], Path(folder))
            device, row = json.loads(said.splitlines()[-1])
            found[name].append(row)
            print(part, name, row, flush=True)
    setting = [device, *(f"{name} {version(name)}" for name in ("torch", "transformers"))]
    return {"setting": ", ".join(setting + [f"{k} {v}" for k, v in asdict(scale).items()]), "runs": found}


def render(results: dict) -> str:
    """Render the page in docs/results/ from the data beside it."""
    lines = ["# recipes/causal_lm.py on one GPU", "", "Made by `python benchmarks/causal_lm_gpu.py`."]
    if results["trial"]:
        lines += ["", TRIAL_NOTE]
    lines += ["", "| figure | run | divided by | measured | target | met |", "|---|---|---|---|---|---|"]
    for part, figure, run, other, asked in ASKED:
        runs = results.get(part, {}).get("runs", {})
        if not {run, other or run} <= runs.keys():
            lines.append(f"| {figure} | {run} | {other or '-'} | not measured | {asked} | - |")
        else:
            own, base = (statistics.median(row[figure] for row in runs[name]) for name in (run, other or run))
            found, bound = own / (base or math.nan) if other else own, float(asked[3:])
            met = "yes" if (found >= bound if asked[0] == ">" else found <= bound) else "no"
            met = "a trial" if results["trial"] else met
            lines.append(f"| {figure} | {run} | {other or '-'} | {found:.3g} | {asked} | {met} |")
    for part in filter(results.__contains__, RUNS):
        runs = results[part]["runs"]
        lines += ["", f"## {part.replace('_', ' ').capitalize()}", "", f"{results[part]['setting']}. {NOTES[part]}", ""]
        columns = list(next(iter(runs.values()))[0])
        lines += ["| " + " | ".join(["run", *columns]) + " |", "|---" * (len(columns) + 1) + "|"]
        for name, rows in runs.items():
            cells = [
                ", ".join("-" if row[c] is None else f"{float(f'{row[c]:.4g}'):,g}" for row in rows) for c in columns
            ]
            lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--only", nargs="*", default=[], help="only the runs whose names have one of these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, help=f"blocks per step (default: {Scale.batch})")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="for the recipe and the plain loop"
    )
    parser.add_argument("--trial", action="store_true", help="toy size; uses a CPU if there is no GPU")
    parser.add_argument("--out", type=Path, help="folder (default: docs/results; for a trial, a temporary one)")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.trial:
        print(
            "error: torch sees no GPU, but this benchmark measures one. --trial checks that the script runs.",
            file=sys.stderr,
        )
        sys.exit(2)
    scale = TRIAL if options.trial else Scale()
    scale = replace(scale, batch=options.batch or scale.batch, compiled=options.compile)
    if options.run:
        part, name, folder = options.run
        row = RUNS[part][name](scale, Path(folder))
        print(json.dumps([torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", row]))
        return
    out = options.out or (Path(tempfile.mkdtemp()) if options.trial else REPO / "docs" / "results")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "causal_lm_gpu.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    if results.get("trial") != options.trial:
        results = {"trial": options.trial}
    for part in options.parts:
        results[part] = measure(part, scale, options.repeats, options.only)
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(render(results))
    print(render(results), path.with_suffix(".md"), sep="\n")


if __name__ == "__main__":
    main()
