"""The sections of a report on runs: one, or several beside each other."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence

from finetune.drawing.html import NARROW, WIDE
from finetune.drawing.table import Table
from finetune.drawing.words import GIB, gib
from finetune.plan.pages.memory_pictures import memory_bars
from finetune.plan.plan import Plan
from finetune.report.axes import as_number
from finetune.report.blocks import Block, Code, Drawn, Facts, Folded, Heading, Image, Section, Tiles, Words
from finetune.report.confusion import confusion_picture
from finetune.report.profile import profile_blocks
from finetune.report.rank_memory import rank_bars
from finetune.report.run_curves import curves_of
from finetune.report.run_folder import RunFolder
from finetune.report.run_plan import has_one_length, plan_of_run
from finetune.report.schedule import schedule_pictures
from finetune.report.words import duration, figure, ratio, said

TILES = {
    "eval_f1": "entity F1", "eval_accuracy": "accuracy", "eval_f1_macro": "macro F1", "eval_pearson": "Pearson",
    "eval_bits_per_byte": "bits a byte", "eval_loss": "eval loss", "real_tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s", "step_seconds_median": "step, s", "peak_memory_gib": "peak GiB",
}  # fmt: skip
MOST_TILES = 6
SAMPLE = re.compile(r"^## Step (\d+)\n\n(`{3,})\n(.*?)\n\2$", re.MULTILINE | re.DOTALL)
SHORT = {"eval_loss": "eval loss", "real_tokens_per_second": "tokens/s", "samples_per_second": "samples/s",
         "step_seconds_median": "step s", "peak_memory_gib": "peak GiB"}  # fmt: skip
SPEED = ("real_tokens_per_second", "samples_per_second", "step_seconds_median", "step_seconds_p95", "mfu",
         "padding_share", "peak_memory_gib", "train_runtime")  # fmt: skip
SHOWN_BY_SVG = {"confusion_matrix.png", "schedule.png", "training_curve.png"}


def run_sections(runs: Sequence[RunFolder]) -> list[Section]:
    plans = [plan_of_run(run) for run in runs]
    curves = curves_of(runs)
    sections = [
        Section("Runs" if len(runs) > 1 else "The run", tuple(_overview(runs))),
        Section("Curves", (curves,) if curves else (Words("Nothing has been logged yet.", "muted"),)),
        Section("Speed and memory", tuple(_cost(runs, plans))),
        Section("Confusion matrix", _of_each(runs, _confusion)),
        Section("Pipeline schedule", _of_each(runs, _schedule)),
        Section("Profile", _of_each(runs, lambda run: profile_blocks(run.profile))),
        Section("Samples", _of_each(runs, _samples)),
        Section("Pictures", _of_each(runs, _pictures)),
        Section("Settings", tuple(_settings(runs))),
        Section("Environment and command", _of_each(runs, _environment)),
    ]
    return [section for section in sections if section.blocks]


def _of_each(runs: Sequence[RunFolder], blocks: Callable[[RunFolder], list[Block]]) -> tuple[Block, ...]:
    """Under the run's name, where there are several."""
    found: list[Block] = []
    for run in runs:
        if made := blocks(run):
            found += [Heading(run.name), *made] if len(runs) > 1 else made
    return tuple(found)


def verdict(run: RunFolder) -> str:
    """How far it came, in a line."""
    if not run.finished:
        return f"Not ended, at step {run.steps:,}."
    seconds = as_number(run.results.get("train_runtime"))
    words = f"Done: {run.steps:,} steps" + (f" in {duration(seconds)}" if seconds else "")
    return words + (f" on {run.ranks} ranks." if run.ranks > 1 else ".")


def _tiles(run: RunFolder) -> tuple[tuple[str, str], ...]:
    found = [(words, said(run.results[name])) for name, words in TILES.items()
             if as_number(run.results.get(name)) is not None]  # fmt: skip
    return tuple(found[:MOST_TILES])


def _overview(runs: Sequence[RunFolder]) -> list[Block]:
    blocks: list[Block] = []
    if len(runs) == 1:
        (run,) = runs
        if heading := card_heading(run):
            blocks.append(Words(heading))
        blocks.append(Words(verdict(run), "verdict" if run.finished else "bad"))
        if tiles := _tiles(run):
            blocks.append(Tiles(tiles))
    blocks += [Words(f"{run.name}: {note}" if len(runs) > 1 else note, "muted") for run in runs for note in run.notes]
    names = sorted({key for run in runs for key, value in run.results.items() if as_number(value) is not None})
    names = sorted(names, key=lambda name: (not name.startswith("eval_"), name in SPEED, name))
    if len(runs) > 1:
        blocks.append(_beside(runs))
    if names:
        rows = tuple((name, *(said(run.results.get(name)) for run in runs)) for name in names)
        table = Table("Results", ("metric", *_columns(runs, "value")), rows)
        blocks.append(Folded("All results", (table,)))
    return blocks


def _beside(runs: Sequence[RunFolder]) -> Table:
    """A row each, with what one looks for first."""
    metric = next((name for name in ("eval_f1", "eval_accuracy", "eval_f1_macro", "eval_pearson", "eval_bits_per_byte")
                   if any(name in run.results for run in runs)), "eval_loss")  # fmt: skip
    keys = list(dict.fromkeys(("eval_loss", metric, "train_loss", "real_tokens_per_second", "samples_per_second",
                               "step_seconds_median", "peak_memory_gib")))  # fmt: skip
    keys = [key for key in keys if any(as_number(run.results.get(key)) is not None for run in runs)]
    rows = tuple(
        (run.name, "done" if run.finished else "not ended", f"{run.steps:,}",
         *(said(run.results.get(key)) for key in keys)) for run in runs
    )  # fmt: skip
    columns = ("run", "state", "steps", *(SHORT.get(key, key.removeprefix("eval_").replace("_", " ")) for key in keys))
    return Table("Beside each other", columns, rows, texts=("state",))


def card_heading(run: RunFolder) -> str:
    """The first heading of its model card."""
    line = next((line for line in run.card.splitlines() if line.startswith("# ")), "")
    return line[2:].replace("\\", "").strip()


def _columns(runs: Sequence[RunFolder], alone: str) -> tuple[str, ...]:
    return (alone,) if len(runs) == 1 else tuple(run.name for run in runs)


def _cost(runs: Sequence[RunFolder], plans: Sequence[Plan | None]) -> list[Block]:
    blocks: list[Block] = []
    pairs = [(run, made) for run, made in zip(runs, plans, strict=True) if made is not None]
    if pairs:
        blocks += [_planned_table(pairs), Words(_planned_words(pairs), "muted")]
    measured = [(run.name, peaks) for run in runs if (peaks := _peaks(run))]
    if measured:
        wide, narrow = (rank_bars(measured, width) for width in (WIDE, NARROW))
        blocks.append(Drawn(wide, narrow, _measured_words(runs)))
    for run, made in pairs:
        title = "Planned memory, by kind" + (f": {run.name}" if len(runs) > 1 else "")
        wide, narrow = (dataclasses.replace(memory_bars(made, width), title=title) for width in (WIDE, NARROW))
        blocks.append(Drawn(wide, narrow, wide.alt))
    return blocks


def _peaks(run: RunFolder) -> list[float]:
    """Bytes, by rank."""
    found = run.results.get("peak_memory_gib_per_rank")
    found = found if isinstance(found, list) else [run.results.get("peak_memory_gib")]
    return [size * GIB for one in found if (size := as_number(one)) is not None and size > 0]


def _planned_table(pairs: Sequence[tuple[RunFolder, Plan]]) -> Table:
    rows = []
    for run, made in pairs:
        step, peak = as_number(run.results.get("step_seconds_median")), max(_peaks(run), default=None)
        rate = as_number(run.results.get("samples_per_second"))
        rows += [
            (run.name, "step, s", figure(made.seconds.total), figure(step), ratio(made.seconds.total, step)),
            (run.name, "samples/s", figure(made.seconds.samples_per_second), figure(rate),
             ratio(made.seconds.samples_per_second, rate)),
            (run.name, "peak of a rank, GiB", gib(made.peak_bytes), gib(peak) if peak else "",
             ratio(made.peak_bytes, peak) if run.environment.get("gpus") and has_one_length(run) else ""),
        ]  # fmt: skip
    columns = ("run", "figure", "planned", "measured", "planned / measured")
    table = Table("Planned against measured", columns, tuple(rows), texts=("figure",))
    return table if len(pairs) > 1 else table.without(("run",))


def _planned_words(pairs: Sequence[tuple[RunFolder, Plan]]) -> str:
    machines = " and ".join(dict.fromkeys(made.machine.name for _, made in pairs))
    return (
        f"Planned by finetune plan from the run's flags and model, for the shipped profile of {machines}; another "
        "machine of that kind may be faster or slower. Planned bytes are those of tensors; a CPU run measures the "
        "process with its libraries, so the two are not divided."
    )


def _measured_words(runs: Sequence[RunFolder]) -> str:
    if any(run.environment.get("gpus") for run in runs):
        return "Measured on a GPU: the allocator's peak."
    return "Measured on a CPU: the largest resident set of the process, Python and its libraries included."


def _confusion(run: RunFolder) -> list[Block]:
    wide, narrow = confusion_picture(run.confusion, WIDE), confusion_picture(run.confusion, NARROW)
    if wide is not None and narrow is not None:
        return [Drawn(wide, narrow, wide.alt)]
    return _image(run, "confusion_matrix.png", "True against predicted labels")


def _schedule(run: RunFolder) -> list[Block]:
    drawn = schedule_pictures(run.schedule)
    return drawn or _image(run, "schedule.png", "A step of the pipeline, planned and measured")


def _samples(run: RunFolder) -> list[Block]:
    """The last one, and the others folded; or the text as it is, if not of `finetune.training.samples`."""
    found = [(step, text) for step, _, text in SAMPLE.findall(run.samples)]
    if not found:
        return [Code(run.samples)] if run.samples else []
    blocks: list[Block] = [Words(f"At step {found[-1][0]}:", "muted"), Code(found[-1][1])]
    earlier = tuple(one for step, text in found[:-1] for one in (Words(f"At step {step}:", "muted"), Code(text)))
    return [*blocks, Folded("Earlier ones", earlier)] if earlier else blocks


def _pictures(run: RunFolder) -> list[Block]:
    names = [name for name in run.pictures if name not in SHOWN_BY_SVG]
    return [block for name in names for block in _image(run, name, name.removesuffix(".png").replace("_", " "))]


def _image(run: RunFolder, name: str, alt: str) -> list[Block]:
    return [Image(name, run.pictures[name], f"{alt}, {run.name}")] if name in run.pictures else []


def _settings(runs: Sequence[RunFolder]) -> list[Block]:
    flags = sorted({key for run in runs for key in run.recipe})
    blocks: list[Block] = []
    if flags:
        rows = [(flag, *(said(run.recipe.get(flag)) for run in runs)) for flag in flags]
        texts = _columns(runs, "value")
        if len(runs) > 1:
            other = tuple(row for row in rows if len(set(row[1:])) > 1)
            if other:
                blocks.append(Table("Flags that differ", ("flag", *texts), other, texts=texts))
            blocks.append(Folded("All flags", (Table("Flags", ("flag", *texts), tuple(rows), texts=texts),)))
        else:
            blocks.append(Table("Flags", ("flag", *texts), tuple(rows), texts=texts))
    for run in runs:
        if run.ds_config:
            title = "DeepSpeed's configuration, as it ran" + (f": {run.name}" if len(runs) > 1 else "")
            blocks.append(Folded(title, (Code(json.dumps(run.ds_config, indent=1, ensure_ascii=False)),)))
    return blocks


def _environment(run: RunFolder) -> list[Block]:
    known = run.environment
    packages = known.get("packages")
    facts = [(key, said(known.get(key))) for key in ("started", "machine", "python") if known.get(key)]
    if gpus := known.get("gpus"):
        facts.append(("GPUs", ", ".join(map(str, gpus)) if isinstance(gpus, list) else said(gpus)))
    if isinstance(packages, dict):
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in packages.items())))
    blocks: list[Block] = [Facts(tuple(facts))] if facts else []
    if command := known.get("command"):
        blocks.append(Code(str(command)))
    if run.card:
        blocks.append(Folded("Its model card", (Code(run.card),)))
    return blocks
