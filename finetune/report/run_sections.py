"""The sections of a report on one run, or on several side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from finetune.errors import FinetuneError, first_line
from finetune.plan.from_run import job_of
from finetune.plan.job import Job
from finetune.plan.machine import shipped_machine
from finetune.plan.plan import Plan, plan
from finetune.plan.run_model import run_of_record
from finetune.report.charts import confusion_picture
from finetune.report.page import Block, Section, drawn
from finetune.report.plan_pictures import memory_bars
from finetune.report.run_curves import curves_of
from finetune.report.run_folder import RunFolder
from finetune.report.run_pictures import load_picture, profile_blocks, rank_bars, schedule_blocks
from finetune.report.table import Table
from finetune.report.text import GIB, as_dict, as_list, as_number, duration, gib, number, ratio, said, spelled
from finetune.run.launch import Launch

TILES = {
    "eval_f1": "entity F1", "eval_accuracy": "accuracy", "eval_f1_macro": "macro F1", "eval_pearson": "Pearson",
    "eval_bits_per_byte": "bits per byte", "eval_loss": "eval loss", "real_tokens_per_second": "mean tokens/s",
    "samples_per_second": "mean samples/s", "step_seconds_median": "median step, s", "peak_memory_gib": "peak GiB",
}  # fmt: skip
MOST_TILES = 6
SAMPLE = re.compile(r"^## Step (\d+)\n\n(`{3,})\n(.*?)\n\2$", re.MULTILINE | re.DOTALL)
SPEED = ("real_tokens_per_second", "samples_per_second", "step_seconds_median", "step_seconds_p95", "mfu",
         "padding_share", "peak_memory_gib", "train_runtime")  # fmt: skip
MEASURED_ON_GPU = "Measured on a GPU: the allocator's peak."
MEASURED_ON_CPU = "Measured on a CPU: the peak resident set of the process, including Python and its libraries."
# Pictures in a run's folder that the report draws anew; with words, it shows them if it cannot.
DRAWN_HERE = {
    "confusion_matrix.png": "True against predicted labels", "experts.png": "Tokens of each expert",
    "schedule.png": "A step of the pipeline, planned and measured", "training_curve.png": "",
}  # fmt: skip


def run_sections(runs: Sequence[RunFolder]) -> list[Section]:
    plans = [plan_of_run(run) for run in runs]  # may add to a run's notes
    curves = curves_of(runs)
    sections = [
        Section("Runs" if len(runs) > 1 else "The run", tuple(_overview(runs))),
        Section("Curves", (Block("curves", curves),) if curves else (Block("muted", "Nothing has been logged yet."),)),
        Section("Training files", _of_each(runs, _files)),
        Section("Speed and memory", tuple(_cost(runs, plans))),
        Section("Confusion matrix", _of_each(runs, _confusion, "confusion_matrix.png")),
        Section("Experts", _of_each(runs, lambda run: drawn(load_picture, run.experts, caption=True), "experts.png")),
        Section("Pipeline schedule", _of_each(runs, lambda run: schedule_blocks(run.schedule), "schedule.png")),
        Section("Profile", _of_each(runs, lambda run: profile_blocks(run.profile))),
        Section("Samples", _of_each(runs, _samples)),
        Section("Pictures", _of_each(runs, _pictures)),
        Section("Settings", tuple(_settings(runs))),
        Section("Environment and command", _of_each(runs, _environment)),
    ]
    return [section for section in sections if section.blocks]


def _of_each(
    runs: Sequence[RunFolder], blocks: Callable[[RunFolder], list[Block]], kept: str = ""
) -> tuple[Block, ...]:
    """The blocks of all runs; with several, each under its name. A run that has none shows its picture `kept`."""
    found: list[Block] = []
    for run in runs:
        if made := blocks(run) or _image(run, kept):
            found += [Block("heading", run.name), *made] if len(runs) > 1 else made
    return tuple(found)


def verdict(run: RunFolder) -> str:
    """How far it got, in one line."""
    if not run.finished:
        return f"Not finished, at step {run.steps:,}."
    seconds = as_number(run.results.get("train_runtime"))
    words = f"Done: {run.steps:,} steps" + (f" in {duration(seconds)}" if seconds else "")
    return words + (f" on {run.ranks} ranks." if run.ranks > 1 else ".")


def _overview(runs: Sequence[RunFolder]) -> list[Block]:
    blocks: list[Block] = []
    if len(runs) == 1:
        (run,) = runs
        if heading := card_heading(run):
            blocks.append(Block("words", heading))
        blocks.append(Block("verdict" if run.finished else "bad", verdict(run)))
        if shown := tiles(run):
            blocks.append(Block("tiles", shown))
    blocks += [Block("muted", f"{run.name}: {note}" if len(runs) > 1 else note) for run in runs for note in run.notes]
    names = {key for run in runs for key, value in run.results.items() if as_number(value) is not None}
    if len(runs) > 1:
        blocks.append(Block("table", _beside(runs)))
    if names:
        in_order = sorted(names, key=lambda name: (not name.startswith("eval_"), name in SPEED, name))
        rows = tuple((name, *(said(run.results.get(name)) for run in runs)) for name in in_order)
        table = Table("Results", ("metric", *_columns(runs)), rows)
        blocks.append(Block("folded", [Block("table", table)], "All results"))
    return blocks


def tiles(run: RunFolder) -> list[tuple[str, str]]:
    """The most important results, and what they are called."""
    shown = [name for name in TILES if as_number(run.results.get(name)) is not None]
    return [(TILES[name], said(run.results[name])) for name in shown[:MOST_TILES]]


def _beside(runs: Sequence[RunFolder]) -> Table:
    """A row per run, with the most important values."""
    metric = next(name for name in TILES if name == "eval_loss" or any(name in run.results for run in runs))
    speed = ("real_tokens_per_second", "samples_per_second", "step_seconds_median", "peak_memory_gib")
    keys = list(dict.fromkeys(("eval_loss", metric, "train_loss", *speed)))
    keys = [key for key in keys if any(as_number(run.results.get(key)) is not None for run in runs)]
    rows = tuple(
        (run.name, "done" if run.finished else "not finished", f"{run.steps:,}",
         *(said(run.results.get(key)) for key in keys)) for run in runs
    )  # fmt: skip
    columns = ("run", "state", "steps", *(TILES.get(key, spelled(key)) for key in keys))
    return Table("Side by side", columns, rows, texts=("state",))


def card_heading(run: RunFolder) -> str:
    """The first heading of the model card."""
    line = next((line for line in run.card.splitlines() if line.startswith("# ")), "")
    return line[2:].replace("\\", "").strip()


def _columns(runs: Sequence[RunFolder]) -> tuple[str, ...]:
    return ("value",) if len(runs) == 1 else tuple(run.name for run in runs)


def _cost(runs: Sequence[RunFolder], plans: Sequence[Plan | None]) -> list[Block]:
    blocks: list[Block] = []
    pairs = [(run, made) for run, made in zip(runs, plans, strict=True) if made is not None]
    if pairs:
        blocks += [Block("table", _planned_table(pairs)), Block("muted", _planned_words(pairs))]
    for on_gpu, words in ((True, MEASURED_ON_GPU), (False, MEASURED_ON_CPU)):  # the two cannot be compared
        if measured := [(run.name, peaks) for run in runs if bool(run.gpus) is on_gpu and (peaks := _peaks(run))]:
            blocks += drawn(rank_bars, measured, len(runs) > 1, caption=words)
    for run, made in pairs:
        title = "Planned memory, by kind" + (f": {run.name}" if len(runs) > 1 else "")
        blocks += drawn(memory_bars, made, title, caption=True)
    return blocks


def _peaks(run: RunFolder) -> list[float]:
    found = as_list(run.results.get("peak_memory_gib_per_rank")) or [run.results.get("peak_memory_gib")]
    return [size * GIB for one in found if (size := as_number(one)) is not None and size > 0]


def _planned_table(pairs: Sequence[tuple[RunFolder, Plan]]) -> Table:
    rows = []
    for run, made in pairs:
        step, peak = as_number(run.results.get("step_seconds_median")), max(_peaks(run), default=None)
        rate = as_number(run.results.get("samples_per_second"))
        rows += [
            (run.name, "step, s", number(made.seconds.total), number(step), ratio(made.seconds.total, step)),
            (run.name, "samples/s", number(made.seconds.samples_per_second), number(rate),
             ratio(made.seconds.samples_per_second, rate)),
            (run.name, "peak of a rank, GiB", gib(made.peak_bytes), gib(peak),
             ratio(made.peak_bytes, peak) if run.gpus and has_one_length(run) else ""),
        ]  # fmt: skip
    columns = ("run", "figure", "planned", "measured", "planned / measured")
    table = Table("Planned against measured", columns, tuple(rows), texts=("figure",))
    return table if len(pairs) > 1 else table.without(("run",))


def _planned_words(pairs: Sequence[tuple[RunFolder, Plan]]) -> str:
    machines = " and ".join(dict.fromkeys(made.machine.name for _, made in pairs))
    return (
        f"Planned by finetune plan from the run's flags and model, for the shipped profile of {machines}; another "
        "machine of that kind may be faster or slower. Planned bytes are those of tensors; a CPU run measures the "
        "process with its libraries, so there is no ratio of the two."
    )


def _files(run: RunFolder) -> list[Block]:
    """What each file of a mixture contributed, and its losses."""
    found = {name: as_dict(one) for name, one in as_dict(run.results.get("sources")).items()}
    every = sum(as_number(one.get("tokens")) or 0.0 for one in found.values())
    rows = []
    for name, one in found.items():
        tokens, held_out = as_number(one.get("tokens")), run.results.get(f"eval_{name}_loss")
        share = "" if tokens is None or not every else f"{tokens / every:.1%}"
        counts = (said(one.get(key)) for key in ("blocks", "documents", "tokens"))
        rows.append((name, *counts, share, number(as_number(one.get("loss"))), number(as_number(held_out))))
    columns = ("file", "blocks", "documents", "tokens", "share", "training loss", "eval loss")
    words = "Blocks, documents and tokens count repetitions. The training loss is the mean over the whole run."
    return [Block("table", Table("Training files", columns, tuple(rows))), Block("muted", words)] if rows else []


def _confusion(run: RunFolder) -> list[Block]:
    return drawn(confusion_picture, run.confusion, caption=True)


def _samples(run: RunFolder) -> list[Block]:
    """The last sample, and the others folded; or the raw text, if `finetune.training.samples` did not write it."""
    blocks = [block for step, _, text in SAMPLE.findall(run.samples)
              for block in (Block("muted", f"At step {step}:"), Block("code", text))]  # fmt: skip
    if not blocks:
        return [Block("code", run.samples)] if run.samples else []
    return [*blocks[-2:], *([Block("folded", blocks[:-2], "Earlier ones")] if blocks[2:] else [])]


def _pictures(run: RunFolder) -> list[Block]:
    return [block for name in run.pictures if name not in DRAWN_HERE for block in _image(run, name)]


def _image(run: RunFolder, name: str) -> list[Block]:
    alt = DRAWN_HERE.get(name, spelled(name.removesuffix(".png")))
    return [Block("image", run.pictures[name], f"{alt}, {run.name}")] if name in run.pictures else []


def _settings(runs: Sequence[RunFolder]) -> list[Block]:
    flags = sorted({key for run in runs for key in run.recipe})
    rows = tuple((flag, *(said(run.recipe.get(flag)) for run in runs)) for flag in flags)
    other, texts = tuple(row for row in rows if len(set(row[1:])) > 1), _columns(runs)
    blocks = [Block("table", Table("Flags", ("flag", *texts), rows, texts=texts))] if flags else []
    if flags and len(runs) > 1:
        blocks = [Block("folded", blocks, "All flags")]
        if other:
            blocks.insert(0, Block("table", Table("Flags that differ", ("flag", *texts), other, texts=texts)))
    for run in runs:
        if run.ds_config:
            title = "DeepSpeed's configuration, as it ran" + (f": {run.name}" if len(runs) > 1 else "")
            text = json.dumps(run.ds_config, indent=1, ensure_ascii=False)
            blocks.append(Block("folded", [Block("code", text)], title))
    return blocks


def _environment(run: RunFolder) -> list[Block]:
    known = run.environment
    facts = [(key, said(known.get(key))) for key in ("started", "machine", "python") if known.get(key)]
    if run.gpus:
        facts.append(("GPUs", ", ".join(map(str, run.gpus))))
    if packages := as_dict(known.get("packages")):
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in packages.items())))
    blocks = [Block("facts", facts)] if facts else []
    if command := known.get("command"):
        blocks.append(Block("code", str(command)))
    if run.card:
        blocks.append(Block("folded", [Block("code", run.card)], "Its model card"))
    return blocks


# What a recipe.yaml that no run wrote can raise.
BROKEN = ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError, OSError


def plan_of_run(run: RunFolder) -> Plan | None:
    """None if no plan can be made; the run's notes say why. None, too, for a run whose ranks are not known."""
    if not run.recipe or not run.ranks:
        return None
    try:
        machine = shipped_machine(str(run.gpus[0]) if run.gpus else "cpu")
        here = len(run.gpus)  # on the first node; 1 if a launcher gives each rank its own
        per_node = here if 1 < here < run.ranks else run.ranks
        launch = Launch(world_size=run.ranks, local_world_size=per_node, launcher="torchrun")
        job, _, _ = job_of(run_of_record(run.folder, launch), machine)
        return plan(_as_it_was(run, job), machine)
    except FinetuneError as error:
        run.notes.append(f"There is no plan beside it: {first_line(error)}")
    except BROKEN as error:
        run.notes.append(f"There is no plan beside it: recipe.yaml gives {first_line(error)}")
    return None


def tokens_a_sample(run: RunFolder) -> float | None:
    """The mean, including padding, which is computed on as well. None if the samples are not texts."""
    names = ("real_tokens_per_second", "samples_per_second", "padding_share")
    real, samples, padding = (as_number(run.results.get(name)) for name in names)
    if not real or not samples or padding is None or padding >= 1:
        return None
    return real / (1 - padding) / samples


def has_one_length(run: RunFolder) -> bool:
    """Whether all samples have the same length. If not, the longest batch sets the peak, and its length is unknown."""
    tokens, padding = tokens_a_sample(run), as_number(run.results.get("padding_share"))
    return tokens is None or (not padding and abs(tokens - round(tokens)) < 1e-6 * tokens)


def _as_it_was(run: RunFolder, job: Job) -> Job:
    """`job` with the run's mean sample length: a plan before the run assumes the maximum length."""
    tokens = tokens_a_sample(run)
    if tokens is None or round(tokens) >= job.sample_tokens:
        return job
    run.notes.append(
        f"Planned for samples of {max(1, round(tokens)):,} tokens, the run's mean, rather than the maximum of "
        f"{job.sample_tokens:,}."
    )
    share = tokens / job.sample_tokens  # for sources and targets alike
    targets = None if job.targets is None else max(1, round(share * job.targets))
    return replace(job, tokens=max(1, round(share * job.tokens)), targets=targets)
