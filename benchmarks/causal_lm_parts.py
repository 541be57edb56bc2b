"""Memory and time of a language model's parts: head and loss, activation checkpointing, packing, document mask.

    python benchmarks/causal_lm_parts.py --sst2 ../shared/data/sst2          # about five minutes on two CPU cores
    python benchmarks/causal_lm_parts.py --parts cross_entropy               # one part only

Writes docs/results/causal_lm_parts.md. Memory is the growth of the largest resident set (`ru_maxrss`) of a process that
measures a single variant. causal_lm_gpu.py measures on a GPU.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from releases import this_machine
from spread import spread

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
REPEATS = 5
TOKENS, WIDTH, VOCABULARY = 2048, 512, 50_304
DEEP = {"num_hidden_layers": 12, "num_attention_heads": 6, "hidden_size": 384, "max_position_embeddings": 512}
DEEP_BATCH, STEPS = 4, 4


def alone(*words: str) -> dict:
    """The last line, as JSON, that this file prints when run with `words` in its own process."""
    done = subprocess.run([sys.executable, __file__, *words], cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    print(*words, done.stdout.strip().splitlines()[-1], flush=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cross_entropy() -> dict:
    found: dict = {}
    for _ in range(REPEATS):
        for name, chunk in (("plain", 0), ("chunked, 512", 512)):
            found.setdefault(name, []).append(alone("--head", str(chunk)))
    return found


def head(chunk: int) -> dict:
    """Forward and backward of head and loss in fp32: seconds, and MiB above the process's peak before."""
    import torch
    from torch import nn

    from finetune.models.chunked_loss import LossHead

    def step(layer: nn.Linear, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if chunk:
            layer.chunk_tokens, layer.targets = chunk, targets
            loss = layer(x)
        else:
            loss = nn.functional.cross_entropy(layer(x).float().flatten(0, 1), targets.flatten())
        loss.backward()
        return loss

    kind = LossHead if chunk else nn.Linear
    step(kind(8, 32, bias=False), torch.randn(1, 16, 8), torch.randint(32, (1, 16)))  # triggers imports on first use
    torch.manual_seed(0)
    x, targets = torch.randn(1, TOKENS, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (1, TOKENS))
    layer = kind(WIDTH, VOCABULARY, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)  # both variants have it; it is not part of the comparison
    before, times = peak_mib(), []
    for _ in range(STEPS):
        x.grad = None
        layer.weight.grad.zero_()
        start = time.perf_counter()
        loss = step(layer, x, targets)
        times.append(time.perf_counter() - start)
    norms = {"gradient": x.grad.norm().item(), "weight_gradient": layer.weight.grad.norm().item()}
    return {"seconds": statistics.median(times[1:]), "peak_mib": peak_mib() - before, "loss": loss.item(), **norms}


def checkpointing() -> dict:
    found: dict = {}
    for _ in range(REPEATS):
        for name, interval in (("none", 0), ("every layer", 1), ("every 2nd layer", 2)):
            found.setdefault(name, []).append(alone("--interval", str(interval)))
    return found


def deep(interval: int) -> dict:
    """Training steps of 12 layers in fp32: MiB above weights, gradients and optimizer states; seconds per step."""
    import torch

    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    torch.manual_seed(0)
    model = GPTLiteForCausalLM(GPTLiteConfig(**DEEP, vocab_size=256)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(256, (DEEP_BATCH, DEEP["max_position_embeddings"]))
    model(input_ids=ids[:1, :8], labels=ids[:1, :8]).loss.backward()
    optimizer.step()  # now gradients and optimizer states are allocated
    optimizer.zero_grad(set_to_none=False)
    if interval:
        model.activation_checkpointing_enable(every_n_layers=interval)
    before, times = peak_mib(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times[1:]), "peak_mib": peak_mib() - before, "loss": loss.item()}


def packing(sst2: str | None) -> dict:
    """Share of padding in the training blocks, for texts with real-world lengths."""
    from finetune.data.causal_lm import prepare_corpus
    from finetune.run.flags.language import BlockArguments, CorpusArguments
    from finetune.run.launch import Launch

    found: dict = {}
    sources = {"Python's manual, BPE": (None, 1024)}
    if sst2:
        sources["SST-2's sentences, BPE"] = (str(Path(sst2) / "train.tsv"), 128)
    for name, (file, block_size) in sources.items():
        for kind in ("wrapped", "bfd", "none"):
            blocks = BlockArguments(tokenizer="bpe", packing=kind)
            corpus = CorpusArguments(train_file=file, text_column_name="column_1" if file else None)
            data = prepare_corpus(corpus, blocks, None, block_size=block_size, seed=0, launch=Launch())
            lengths = data.splits["train"].lengths
            padding = 1 - float(lengths.sum()) / (len(lengths) * block_size)
            row = {"documents": data.account.documents["train"], "blocks": len(lengths), "padding": padding}
            found.setdefault(name, {})[f"{kind}, blocks of {block_size}"] = row
    return found


def document_mask() -> dict:
    """Seconds per pass with and without the mask, interleaved: one batch of blocks with several documents each."""
    import torch

    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    torch.manual_seed(0)
    length = DEEP["max_position_embeddings"]
    model = GPTLiteForCausalLM(GPTLiteConfig(**{**DEEP, "num_hidden_layers": 6}, vocab_size=256)).train()
    ids = torch.randint(256, (DEEP_BATCH, length))
    places = torch.arange(length) % (length // 4)  # four documents per block
    given = {"no mask": {}, "document mask": {"position_ids": places.expand(DEEP_BATCH, -1)}}
    found: dict = {name: [] for name in given}
    for turn in range(REPEATS * 4 + 1):
        for name, more in given.items():
            start = time.perf_counter()
            model(input_ids=ids, labels=ids, **more).loss.backward()
            if turn:
                found[name].append(time.perf_counter() - start)
    return found


def render(results: dict) -> str:
    """Render the page in docs/results/ from the data beside it."""
    lines = ["# Memory and time of a language model's parts", "", results["machine"] + ". Made by"]
    lines += [
        "`python benchmarks/causal_lm_parts.py --sst2 ../shared/data/sst2`. Figures are medians over rounds, with the",
        "range in parentheses. Ratios of times are taken within one round.",
        "",
    ]
    head = f"Output head and loss: {TOKENS:,} tokens, hidden size {WIDTH}, vocabulary {VOCABULARY:,}"
    deep = f"Activation checkpointing: 12 layers, hidden size {DEEP['hidden_size']}, {DEEP_BATCH} x 512 tokens"
    titles = {"cross_entropy": f"{head}; fp32, forward and backward", "checkpointing": f"{deep}; fp32, one step"}
    for part, title in titles.items():
        if part not in results:
            continue
        lines += [
            f"## {title}",
            "",
            "| variant | rounds | seconds | peak above the start, MiB | time / first row | memory / first row |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        first = next(iter(results[part].values()))
        for name, runs in results[part].items():
            seconds, peaks = ([run[key] for run in runs] for key in ("seconds", "peak_mib"))
            slower = [a["seconds"] / b["seconds"] for a, b in zip(runs, first, strict=True)]
            memory = statistics.median(peaks) / column(first, "peak_mib")
            against = f"{spread(slower, 2)} | {memory:.3f}" if runs is not first else "1 | 1"
            row = f"{spread(seconds, 3)} | {statistics.median(peaks):.0f} | {against}"
            lines.append(f"| {name} | {len(runs)} | {row} |")
        same = {name: runs[0] for name, runs in results[part].items()}
        exact = [key for key in next(iter(same.values())) if key not in ("seconds", "peak_mib")]
        lines += ["", "Loss, and norms of gradients, that each variant computed:"]
        lines += ["", "| variant | " + " | ".join(exact) + " |", "|---" * (len(exact) + 1) + "|"]
        lines += [f"| {name} | " + " | ".join(f"{run[key]:.8g}" for key in exact) + " |" for name, run in same.items()]
        lines += [""]
    if found := results.get("packing"):
        lines += ["## Padding in training blocks", "", "| text | packing | documents | blocks | padding |"]
        lines += ["|---|---|---|---|---|"]
        for text, kinds in found.items():
            for kind, row in kinds.items():
                lines.append(f"| {text} | {kind} | {row['documents']:,} | {row['blocks']:,} | {row['padding']:.2%} |")
        lines += [
            "",
            "Without packing (`none`), a batch is padded only to its longest row, so real padding is lower.",
            "",
        ]
    if found := results.get("document_mask"):
        plain, masked = (statistics.median(values) for values in found.values())
        ratios = [b / a for a, b in zip(*found.values(), strict=True)]
        lines += [f"## Document mask: 6 layers, hidden size {DEEP['hidden_size']}, {DEEP_BATCH} x 512 tokens"]
        lines[-1] += ", 4 documents per block"
        lines += ["", "| variant | seconds, forward and backward |", "|---|---|", f"| no mask | {plain:.3f} |"]
        lines += [f"| document mask | {masked:.3f} |", f"| ratio, over {len(ratios)} rounds | {spread(ratios, 3)} |"]
    return "\n".join(lines).rstrip() + "\n"


def column(runs: list[dict], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sst2", help="folder with SST-2's train.tsv, used for its text lengths")
    parts = {"cross_entropy": cross_entropy, "checkpointing": checkpointing, "document_mask": document_mask}
    parser.add_argument("--parts", nargs="*", default=[*parts, "packing"])
    parser.add_argument("--head", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--interval", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.head is not None:
        print(json.dumps(head(options.head)))
        return
    if options.interval is not None:
        print(json.dumps(deep(options.interval)))
        return
    path = OUT / "causal_lm_parts.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    for part in options.parts:
        results[part] = packing(options.sst2) if part == "packing" else parts[part]()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    results["machine"] = f"{this_machine()}; {versions}"
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
