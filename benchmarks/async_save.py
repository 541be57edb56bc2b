r"""How long a save stalls training: synchronous, asynchronous, and as the stock libraries save, interleaved.

    python benchmarks/async_save.py                      # 7 to 98 M parameters, 1 rank and 2 under ZeRO-2
    python benchmarks/async_save.py --sizes 4x256 --layouts zero2 --repeats 7
    python benchmarks/async_save.py --gpu --sizes 12x768    # one rank on a GPU: async_save_gpu.json

The stall is the time from the call that saves until it returns, on the slowest rank. `sync` and `async` are our saves
with --async_save off and on. `stock` is the stock Trainer's save on one rank, and DeepSpeed's save_checkpoint under
ZeRO-2; both return before the bytes are on the disk. `dcp` is torch.distributed.checkpoint.async_save of the same
states (one rank). `memcpy` copies as many bytes as the async save copied on the fullest rank into memory that is
already allocated; on a GPU, from the device into pinned memory.
`step_alone` is the time of a step just before an async save, `step_during` that of the `steps_during` steps after it,
until its checkpoint is complete. `complete after` is the time from the return of the save until then; `write_alone` is
the same without steps meanwhile, and `dd` the time in which `dd` writes as many bytes to the same disk with O_DIRECT.
Each ratio is taken within one round, because other work on the machine slows a whole round down equally. For
meaningful absolute times, run it on a quiet machine. Writes docs/results/async_save.json and its page after each
combination of size and layout, and leaves out those that are there already, of the same releases (--again: does not).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from durability_runs import REPO, environment, launcher, rows_of
from releases import in_words, versions

from finetune.host.hardware import gpu_names

OUT = REPO / "docs" / "results" / "async_save.json"
KILLS = OUT.with_name("faults_async.jsonl")
SIZES = ("4x256", "6x512", "8x768", "12x768")  # layers x hidden size
LAYOUTS = {"plain": (1, None), "zero2": (2, "zero2")}
REPEATS, STEPS = 5, 3
SAVE_STEPS = 20  # steps between saves, for the run time
BATCH = 2  # samples of 128 tokens per rank: a write then lasts for several steps
MODES = ("sync", "async", "stock", "dcp", "memcpy", "step_alone", "step_during", "written_after", "write_alone", "dd")


def built(size: str, deepspeed: str | None, folder: Path, kind: Any, on_gpu: bool) -> Any:
    """A Trainer after two steps, so that its optimizer has its states."""
    from saving import CONTEXT, VOCABULARY, Tokens
    from transformers import TrainingArguments, set_seed

    from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM

    set_seed(0)
    layers, width = map(int, size.split("x"))
    config = GPTLiteConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, hidden_size=width,
                           num_attention_heads=width // 64, max_position_embeddings=CONTEXT)  # fmt: skip
    file = str(REPO / "ds_configs" / f"{deepspeed}.json") if deepspeed else None
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=BATCH, save_strategy="no", report_to=[],
        save_total_limit=1, disable_tqdm=True, logging_strategy="no", use_cpu=not on_gpu, deepspeed=file,
        accelerator_config={"use_configured_state": True} if file else None,
    )  # fmt: skip
    trainer = kind(model=GPTLiteForCausalLM(config), args=arguments, train_dataset=Tokens(64))
    trainer.train()
    return trainer


class Rank:
    """One rank's part of a launch."""

    def __init__(self, size: str, deepspeed: str | None, folder: Path, on_gpu: bool) -> None:
        import torch
        from accelerate import PartialState
        from transformers import Trainer

        from finetune.training.trainer import FinetuneTrainer

        if deepspeed:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
        self.torch, self.folder, self.on_gpu = torch, folder, on_gpu
        self.ours = built(size, deepspeed, folder / "ours", FinetuneTrainer, on_gpu)
        self.stock = None if deepspeed else built(size, None, folder / "stock", Trainer, on_gpu)
        beside = self.ours.saves.beside
        beside.choose("on")
        beside.on_train_begin(self.ours.args, self.ours.state, self.ours.control)
        self.beside, self.writer = beside, beside.writer
        self.batch = self.ours.data_collator([self.ours.train_dataset[i] for i in range(BATCH)])
        if not deepspeed:
            address = f"file://{folder}/meet"
            torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)

    def timed(self, do: Callable[[], Any]) -> float:
        self.torch.distributed.barrier()
        self.wait_for_gpu()
        begun = time.perf_counter()
        do()
        self.wait_for_gpu()
        own = self.torch.tensor([time.perf_counter() - begun], dtype=torch_double())
        self.torch.distributed.all_reduce(own, self.torch.distributed.ReduceOp.MAX)
        return float(own)

    def wait_for_gpu(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def turn(self, number: int) -> dict[str, Any]:
        """Run each mode once; the order rotates with the round."""
        modes = [self.sync, self.async_, self.stocks, self.dcp, self.write, self.dd]
        found: dict[str, Any] = {}
        for at in range(len(modes)):
            found |= modes[(number + at) % len(modes)]()
            self.settle()
        return found

    def settle(self) -> None:
        """Flush to disk, so that no mode pays for another's bytes."""
        self.torch.distributed.barrier()
        if self.ours.is_world_process_zero():
            os.sync()
        self.torch.distributed.barrier()

    def save(self, trainer: Any) -> float:
        trainer.state.global_step += 1
        return self.timed(lambda: trainer._save_checkpoint(trainer.model, trial=None))

    def sync(self) -> dict[str, Any]:
        self.beside.writer = None
        found = {"sync": self.save(self.ours)}
        self.beside.writer = self.writer
        return found

    def async_(self) -> dict[str, Any]:
        alone = sum(self.timed(self.step) for _ in range(STEPS)) / STEPS
        stall = self.save(self.ours)
        begun, during = time.perf_counter(), [self.timed(self.step)]
        while len(during) < SAVE_STEPS and not self.is_complete():
            during.append(self.timed(self.step))
        self.beside.finish()
        took = time.perf_counter() - begun
        own = max(sum(self.writer.memory.used), 1)
        sizes = self.torch.tensor([own])
        self.torch.distributed.all_reduce(sizes, self.torch.distributed.ReduceOp.MAX)
        found = {"async": stall, "step_alone": alone, "step_during": sum(during) / len(during)}
        found |= {"steps_during": len(during), "copied_bytes": int(sizes), "written_after": took}
        return {**found, "memcpy": self.memcpy(own)}

    def is_complete(self) -> bool:
        done = self.torch.tensor([int(self.writer.is_done())])  # on the first rank: the whole checkpoint
        self.torch.distributed.all_reduce(done, self.torch.distributed.ReduceOp.MIN)
        return bool(done)

    def write(self) -> dict[str, Any]:
        self.save(self.ours)
        return {"write_alone": self.timed(self.beside.finish), "bytes": self.ours.saves.saved_bytes}

    def dd(self) -> dict[str, Any]:
        """Nothing where the file system has no O_DIRECT."""
        source, target = self.folder / "random", self.folder / "written"
        size, leads = self.ours.saves.saved_bytes, self.ours.is_world_process_zero()
        if leads and not source.exists():
            source.write_bytes(os.urandom(size))
        words = ["dd", f"if={source}", f"of={target}", "bs=4M", "oflag=direct", "conv=fsync", "status=none"]
        status: list[int] = []
        took = self.timed(lambda: status.append(subprocess.run(words).returncode if leads else 0))
        target.unlink(missing_ok=True)
        return {} if any(status) else {"dd": took}

    def memcpy(self, size: int) -> float:
        one, other = (self.torch.ones(size, dtype=self.torch.uint8) for _ in range(2))
        if self.on_gpu:
            one, other = one.cuda(), other.pin_memory()
        return self.timed(lambda: other.copy_(one))

    def stocks(self) -> dict[str, Any]:
        if self.stock is not None:
            return {"stock": self.save(self.stock)}
        place = str(self.folder / "deepspeed")
        took = self.timed(lambda: self.ours.deepspeed.save_checkpoint(place))
        if self.ours.is_world_process_zero():
            shutil.rmtree(place)
        return {"stock": took}

    def dcp(self) -> dict[str, Any]:
        if self.stock is None:
            return {}
        from torch.distributed.checkpoint import async_save

        states = {"model": self.ours.model.state_dict(), "optimizer": self.ours.optimizer.optimizer.state_dict()}
        place, saved = self.folder / "dcp", []
        took = self.timed(lambda: saved.append(async_save(states, checkpoint_id=place)))
        saved[0].result()
        shutil.rmtree(place)
        return {"dcp": took}

    def step(self) -> None:
        trainer = self.ours
        trainer.training_step(trainer.model_wrapped, dict(self.batch), None)
        if not trainer.is_deepspeed_enabled:  # DeepSpeed's engine steps in its backward pass
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()


def torch_double() -> Any:
    import torch

    return torch.float64


def measure(options: argparse.Namespace) -> None:
    """Run on every rank of a launch; the first writes the rows."""
    size, layout = options.part
    rank = Rank(size, LAYOUTS[layout][1], options.folder, options.gpu)
    turns = [rank.turn(number) for number in range(options.repeats + 1)][1:]  # the first allocates memory and files
    if rank.ours.is_world_process_zero():
        count = sum(p.numel() for p in rank.ours.model.parameters())
        what = {"size": size, "parameters": count, "layout": layout}
        rows = [{**what, "turn": at, **turn} for at, turn in enumerate(turns)]
        options.rows.write_text(json.dumps(rows))
    rank.beside.close()


def render(found: dict[str, Any]) -> str:
    """docs/results/async_save.md"""
    rows = found["rows"]
    head = ("parameters", "layout", "copied", "memcpy", "async", "sync", "stock", "DCP async", "async / memcpy")
    head = (*head, "async / stock", "async / sync", "step_during / step_alone", "run time", "complete after")
    lines = [" | ".join(head), " | ".join("---:" for _ in head)]
    for count, layout in dict.fromkeys((row["parameters"], row["layout"]) for row in rows):
        own = [row for row in rows if (row["parameters"], row["layout"]) == (count, layout)]
        cells = [f"{count / 1e6:.0f} M", layout, f"{own[0]['copied_bytes'] / 2**20:,.0f} MiB"]
        cells += [_median(own, name) for name in ("memcpy", "async", "sync", "stock", "dcp")]
        pairs = (("async", "memcpy"), ("async", "stock"), ("async", "sync"), ("step_during", "step_alone"))
        cells += [*(_ratio(own, *pair) for pair in pairs), _run_time(own), _median(own, "written_after")]
        lines.append(" | ".join(cells))
    every = [" | ".join(("parameters", "layout", "round", *MODES)), " | ".join(["---:"] * (3 + len(MODES)))]
    for row in rows:
        cells = [f"{row['parameters'] / 1e6:.0f} M", row["layout"], str(row["turn"])]
        cells += [f"{1e3 * row[name]:,.0f}" if name in row else "-" for name in MODES]
        every.append(" | ".join(cells))
    tables = ["\n".join(f"| {line} |" for line in part) for part in (lines, every, _bandwidths(rows))]
    measured = {(row["parameters"], row["layout"]) for row in rows}
    missing, machine = len(SIZES) * len(LAYOUTS) - len(measured), found.get("machine")
    if missing and not machine:
        tables[0] += (
            f"\n\n{missing} of the {len(SIZES) * len(LAYOUTS)} combinations of size and layout are not measured yet."
        )
    words = {"versions": in_words(found["versions"]), "repeats": found["repeats"], "save_steps": SAVE_STEPS}
    if machine:
        words |= {"where": f"on one rank on {machine}.", "away": "several ranks", "flags": " --gpu"}
    else:
        where = "on two CPU cores without a GPU."
        words |= {"where": where, "away": "GPUs", "flags": ""}
    killed = "" if machine else KILLED.format(kills=kills(list(rows_of(KILLS))))
    return PAGE.format(table=tables[0], bandwidth=tables[2], **words) + killed + TURNS.format(rows=tables[1])


def kills(rows: list[dict[str, Any]]) -> str:
    """The table of runs with --async_save on; what a kill left behind tells whether it hit a write."""
    if not rows:
        return "None yet."
    head = ("run", "kills", "kills during a write", "newest checkpoint torn", "kills that lost saved steps")
    lines = [" | ".join((*head, "bit-identical chains")), " | ".join(["---:"] * 6)]
    for run in dict.fromkeys(row["run"] for row in rows):
        struck = [row for row in rows if row["run"] == run and "kill" in row]
        chains = [row for row in rows if row["run"] == run and "kills" in row]
        hit = sum(row["hit"].startswith("save") for row in struck)
        torn, lost = sum(not row["newest_is_whole"] for row in struck), sum(bool(row["lost_steps"]) for row in struck)
        equal = sum(row["ended"] and not row["weights_apart"] for row in chains)
        lines.append(f"{run} | {len(struck)} | {hit} | {torn} | {lost} | {equal} of {len(chains)}")
    struck = [row for row in rows if "kill" in row]
    hit = sum(row["hit"].startswith("save") for row in struck)
    return "\n".join(f"| {line} |" for line in lines) + f"\n\nIn all {len(struck)} kills, {hit} during a write."


PAGE = """# How long a save stalls training

Medians of {repeats} rounds, in ms, {where}
Each ratio is the median of the ratios within one round, with the range in parentheses. {versions}.
Made by `python benchmarks/async_save.py{flags}`.

- `copied`: bytes that an async save copies on the fullest rank.
- `memcpy`: a plain copy of as many bytes into memory that is already allocated.
- `async`, `sync`: the stall with `--async_save` on and off, from the call that saves until it returns.
- `stock`: the stall of the stock Trainer, or of DeepSpeed's `save_checkpoint` under ZeRO-2. Both return before the
  bytes are on the disk.
- `DCP async`: the stall of `torch.distributed.checkpoint.async_save`.
- `step_during`, `step_alone`: a training step while a checkpoint is being written, and just before.
- `run time`: of {save_steps} steps with one async save, relative to {save_steps} steps without. The save adds its
  stall, and what the steps take longer until its checkpoint is complete.
- `complete after`: time from the return of the async save until its checkpoint is complete.

{table}

The first save of a run is excluded: it allocates its memory, and lets transformers write the weights once.

What this does not show: {away}, several hosts, FSDP (its files are written before training continues, and only
hashing and flushing run in the background), and other disks.

## Bandwidth

`written alone` is how fast a checkpoint becomes complete if nothing else runs: written, hashed and flushed. `dd` is how
fast `dd oflag=direct bs=4M conv=fsync` writes as many bytes to the same disk. In MiB/s.

{bandwidth}
"""
KILLED = """
## Kills

`python benchmarks/faults.py --async_save on --aim writes --runs RUN --kills N --chains C` kills ranks and launchers by
SIGKILL and resumes the run; without `--aim writes`, kills come at other moments too. A chain is one run folder that is
killed and resumed up to N times; its end is compared with a run that was not killed and that saved synchronously. What
a kill left behind tells whether it hit a write. Saved steps are those in the newest complete checkpoint. The data is in
faults_async.jsonl.

{kills}
"""
TURNS = """
## Every round, in ms

{rows}
"""


def _bandwidths(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["parameters | layout | checkpoint | written alone | dd | written alone / dd", " | ".join(["---:"] * 6)]
    measured = [row for row in rows if "dd" in row]
    for count, layout in dict.fromkeys((row["parameters"], row["layout"]) for row in measured):
        own = [row for row in measured if (row["parameters"], row["layout"]) == (count, layout)]
        size = own[0]["bytes"] / 2**20
        speeds = [f"{statistics.median(size / row[name] for row in own):,.0f}" for name in ("write_alone", "dd")]
        cells = (f"{count / 1e6:.0f} M", layout, f"{size:,.0f} MiB", *speeds, _ratio(own, "dd", "write_alone"))
        lines.append(" | ".join(cells))
    return lines if measured else ["not measured yet", "---"]


def _run_time(rows: list[dict[str, Any]]) -> str:
    ratios = []
    for row in (row for row in rows if "steps_during" in row):
        added = row["async"] + row["steps_during"] * (row["step_during"] - row["step_alone"])
        ratios.append(1 + added / (SAVE_STEPS * row["step_alone"]))
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})" if ratios else "-"


def _median(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{1e3 * statistics.median(values):,.0f}" if values else "-"


def _ratio(rows: list[dict[str, Any]], one: str, other: str) -> str:
    ratios = sorted(row[one] / row[other] for row in rows)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--gpu", action="store_true", help="one rank, with model and optimizer on the GPU")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--out", type=Path, help="file; default: in docs/results")
    parser.add_argument(
        "--folder", type=Path, help="a folder on the disk to measure (default: the one for temporary files)"
    )
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        measure(options)
        return
    out = options.out or (OUT.with_name("async_save_gpu.json") if options.gpu else OUT)
    found = json.loads(out.read_text()) if out.is_file() else {}
    rows = found["rows"] if found.get("versions") == versions() else []
    for size in options.sizes:
        for layout in ["plain"] if options.gpu else options.layouts:
            others = [row for row in rows if (row["size"], row["layout"]) != (size, layout)]
            # rows of earlier versions lack some figures
            is_done = any("steps_during" in row for row in rows if row not in others)
            if is_done and not options.again:
                continue
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                words = ["--part", size, layout, "--folder", name, "--rows", f"{name}/rows.json"]
                words += ["--repeats", str(options.repeats), *(["--gpu"] if options.gpu else [])]
                command = [*launcher(LAYOUTS[layout][0]), __file__, *words]
                subprocess.run(command, check=True, env=environment(Path(name) / "cache"), stdout=sys.stderr)
                rows = others + json.loads(Path(name, "rows.json").read_text())
            print(f"{size} {layout}", flush=True)
            rows.sort(key=lambda row: (row["parameters"], row["layout"], row["turn"]))
            found = {"versions": versions(), "repeats": options.repeats, "rows": rows}
            found |= {"machine": gpu_names()[0]} if options.gpu else {}
            out.write_text(json.dumps(found, indent=1) + "\n")
            out.with_suffix(".md").write_text(render(found))


if __name__ == "__main__":
    main()
