"""A plan as one HTML file that loads nothing, and its pictures as one PNG.

write_page(Path("plan.html"), plan(job, machine, with_timeline=True), found, scaling=curve, command="finetune plan ...")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.drawing.html import NARROW, WIDE, document, figure, linked, pairs, table_html, write
from finetune.drawing.render import DAY, PIXELS_PER_INCH, escaped, paint
from finetune.drawing.shapes import INK, LIMIT, Picture, Word, folded
from finetune.drawing.table import Table
from finetune.drawing.words import gib, number, plain, seconds_words
from finetune.errors import RequestError
from finetune.plan.pages.kinds import fills_host, rank_kinds
from finetune.plan.pages.memory_pictures import host_bars, memory_bars, memory_over_time
from finetune.plan.pages.speed_pictures import lanes, scaling_curve, throughput
from finetune.plan.pages.tables import host_table, layout_table, memory_table, step_table
from finetune.plan.pages.words import headline, more_words, verdict
from finetune.plan.schedule import Schedule
from finetune.plan.seconds import pipeline_schedule

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.plan.search import Found

LONG = 300  # letters of a caption
PNG_DOTS_PER_INCH = 180
FORMULAS = (
    ("limit", "(memory - context) x (1 - fragmentation), each of the machine's profile below"),
    ("activations", "what each operator saves for its backward pass: torch 2.13, tools/autograd/derivatives.yaml; "
     "played operator by operator in the order of torch/csrc/autograd/engine.cpp"),
    ("ZeRO-1 and -2", "flat groups, cut and padded: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py"),
    ("ZeRO-3", "pieces, gathers, persistent parameters: deepspeed 0.19.8, runtime/zero/stage3.py, "
     "partition_parameters.py and partitioned_param_coordinator.py"),
    ("DDP", "buckets of 25 MiB beside the gradients: torch/csrc/distributed/c10d/reducer.cpp"),
    ("optimizer states", "Adam two moments in fp32; Adafactor arXiv 1804.04235; 1-bit Adam arXiv 2102.02888; 8-bit "
     "blocks of bitsandbytes"),
    ("collectives", "a latency a step and the bytes over the bus: Thakur, Rabenseifner and Gropp, IJHPCA 2005, "
     "sections 4.1 to 4.5; trees and latencies as NCCL, src/graph/tuning.cc"),
    ("pipeline", "1F1B with a flush, arXiv 1806.03377, section 3.2; bubble (P - 1) / (M + P - 1), arXiv 1811.06965"),
    ("FLOP/s share", "model FLOPs utilization, arXiv 2204.02311, appendix B"),
)  # fmt: skip


def write_page(path: Path, plan: Plan, found: Found | None = None, *, scaling: Sequence[tuple[int, float, float]] = (),
               schedule: Schedule | None = None, notes: Sequence[str] = (), command: str = "") -> None:  # fmt: skip
    """`scaling`: (ranks, samples a second, the same if nothing were lost). Without a `schedule` the planned one is
    drawn. Raises RequestError where the file cannot be written."""
    schedule = schedule or _planned_schedule(plan)
    drawings = [pictures(plan, found, scaling, schedule, width) for width in (WIDE, NARROW)]
    shown = "".join(
        _figure(wide, narrow) + _tables_of(wide, plan, found, scaling) for wide, narrow in zip(*drawings, strict=True)
    )
    told = "".join(f"<li>{linked(note)}</li>" for note in notes)
    body = f"""<h1>{escaped(headline(plan))}</h1>
<p class="verdict{"" if plan.fits else " no"}">{escaped(verdict(plan))}</p>
<p>{escaped(seconds_words(plan.seconds.total))} a step. {escaped(" ".join(more_words(plan)))}</p>
{f"<h2>To be noted</h2><ul>{told}</ul>" if told else ""}
{shown}
{_failing(found)}
<h2>Time of a step</h2>{table_html(step_table(plan))}
<h2>What it is computed from</h2>{pairs(FORMULAS)}
<h2>The machine's profile: {escaped(plan.machine.name)}</h2>{pairs(tuple(_profile(plan)))}
{f"<h2>Made by</h2><pre><code>{escaped(command)}</code></pre>" if command else ""}
"""
    write(path, document(f"finetune plan: {plan.job.model.family} on {plan.machine.name}", body))


def write_png(path: Path, plan: Plan, found: Found | None = None, *, scaling: Sequence[tuple[int, float, float]] = (),
              schedule: Schedule | None = None) -> None:  # fmt: skip
    """The page's pictures, one below the other. Raises RequestError where the file cannot be written."""
    from matplotlib.figure import Figure

    drawn = pictures(plan, found, scaling, schedule or _planned_schedule(plan), WIDE)
    said = folded(headline(plan), WIDE, 13, indent="")
    margin, gap, head = 20.0, 56.0, 48.0 + 18 * len(said)
    height = head + sum(picture.height + gap for picture in drawn) + margin
    width = WIDE + 2 * margin
    figure = Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), facecolor=DAY["ground"])
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-margin, WIDE + margin), ylim=(height, 0))
    axes.set_axis_off()
    for index, line in enumerate(said):
        paint(axes, Word(0, 26 + 18 * index, line, size=13), 0)
    paint(axes, Word(0, head - 16, verdict(plan), size=13, colour=INK if plan.fits else LIMIT, bold=True), 0)
    y = head
    for picture in drawn:
        paint(axes, Word(0, y + 24, picture.title, size=14, bold=True), 0)
        for shape in picture.shapes:
            paint(axes, shape, y + 38)
        y += picture.height + gap
    try:
        figure.savefig(path, dpi=PNG_DOTS_PER_INCH, format="png")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error}). Give another path.") from error


def pictures(plan: Plan, found: Found | None, scaling: Sequence[tuple[int, float, float]], schedule: Schedule | None,
             width: float) -> list[Picture]:  # fmt: skip
    """All that there is something to draw for."""
    drawn = [memory_bars(plan, width)]
    if fills_host(plan):
        drawn.append(host_bars(plan, width))
    if plan.fullest.timeline:
        drawn.append(memory_over_time(plan, width))
    if schedule is not None and schedule.events:
        drawn.append(lanes(schedule, width))
    if found is not None and found.fitting:
        drawn.append(throughput(found, plan, width))
    if len(scaling) > 1:
        drawn.append(scaling_curve(scaling, width))
    return drawn


def _planned_schedule(plan: Plan) -> Schedule | None:
    return pipeline_schedule(plan.job, plan.machine) if plan.job.stages > 1 else None


def _tables_of(picture: Picture, plan: Plan, found: Found | None, scaling: Sequence[tuple[int, float, float]]) -> str:
    """The numbers of a picture, below it."""
    if picture.name == "memory":
        peaks = tuple(
            (name, phase, gib(moment.bytes), plain(moment.where))
            for name, rank in rank_kinds(plan) for phase, moment in rank.peaks.items()
        )  # fmt: skip
        highest = Table("The peak of each phase, in GiB", ("ranks", "phase", "GiB", "at"), peaks, texts=("phase", "at"))
        return table_html(memory_table(plan, rank_kinds(plan))) + table_html(highest)
    if picture.name == "host" and (host := host_table(plan)):
        return table_html(host)
    if picture.name == "layouts" and found is not None:
        return table_html(layout_table(plan, found)) + f'<p class="muted">{found.seen:,} layouts were looked at.</p>'
    if picture.name == "scaling":
        rows = tuple((f"{n:,}", number(rate), number(ideal), f"{rate / ideal:.1%}") for n, rate, ideal in scaling)
        return table_html(Table("Samples a second over all ranks", ("ranks", "planned", "ideal", "share"), rows))
    return ""


def _failing(found: Found | None) -> str:
    if found is None or not found.failing:
        return ""
    rows = tuple((one.words, plain(one.why_not or "")) for one in found.failing)
    table = Table(
        "At the smallest batch that was looked at",
        ("layout", "why not"),
        rows,
        texts=("why not",),
        folding=("why not",),
    )
    return f"<h2>Layouts that do not fit</h2>{table_html(table)}"


def _profile(plan: Plan) -> list[tuple[str, str]]:
    """Where the machine's numbers come from, as its file says."""
    machine = plan.machine
    values = {
        "memory_bytes": f"{gib(machine.memory_bytes)} GiB; ",
        "context_bytes": f"{gib(machine.context_bytes)} GiB; ",
        "fragmentation": f"{machine.fragmentation:.1%}; ",
        "memory_bandwidth": f"{machine.memory_bandwidth / 1e9:,.0f} GB/s; ",
    }
    return [(name.replace("_", " "), values.get(name, "") + source) for name, source in machine.sources.items()]


def _figure(wide: Picture, narrow: Picture) -> str:
    is_long = wide.name == "layouts" or len(wide.alt) > LONG  # then a list in the picture or a table says the same
    return f"<h2>{escaped(wide.title)}</h2>{figure(wide, narrow, '' if is_long else wide.alt)}"
