"""docs/results/durability.md, from the figures that the other benchmarks leave beside it; pages.py writes it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from typing import Any

from durability_runs import REPO, rows_of
from killing import MOMENTS_OF_SAVES
from long_run import GROWTH, growth
from releases import in_words
from resume import table

RESULTS = REPO / "docs" / "results"
HEAD = """# Durability: kills, resumption, long runs

From the JSON lines beside it, on two CPU cores without a GPU. What checkpoints are is in
[checkpoints.md](../checkpoints.md), what the guards do in [faults.md](../faults.md), other layouts in
[reshard.md](reshard.md).
"""
MADE_HOW = """The kills were made over three revisions of the code, on a machine that other work shared: seconds are
upper bounds. One more chain, of image_cls_pipeline, ended otherwise than its uncut run in the last bits: a resumed
pipeline measured its layers anew and was cut elsewhere. It keeps the cut of its checkpoint since; the chain was run
again, and only that counts above."""
NO_DATA = """## {title}

To be measured again: the data of the figures that stood here were not kept.
`python benchmarks/{name}.py --json docs/results/{name}.json` makes them."""
DAMAGED = """## Damaged and hostile files

`python benchmarks/corruption.py` cuts off, empties, deletes and flips bits of every kind of file of a checkpoint in
every layout, and fails if one damage is not noticed. tests/security/ tries poisoned pickles, hostile YAML, JSON,
headers, names, links and markup on every reader. Both count for themselves: no figures of them are kept here."""


def rows(name: str) -> list[dict[str, Any]]:
    return list(rows_of(RESULTS / f"{name}.jsonl"))


def seconds(values: list[float]) -> str:
    """Median, 90th percentile and largest."""
    if not values:
        return "-"
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{statistics.median(ordered):.1f} / {high:.1f} / {ordered[-1]:.1f}"


def versions(found: list[dict[str, Any]]) -> str:
    return in_words(next((row["versions"] for row in reversed(found) if "versions" in row), {}))


def kills_section() -> str:
    found, stock = rows("faults"), rows("faults_stock")
    if not found:
        return ""
    kills, chains = [row for row in found if "kill" in row], [row for row in found if "kills" in row]
    at_saves = [row for row in kills if row["moment"] in MOMENTS_OF_SAVES]
    text = ["## SIGKILL at random moments", "", "`python benchmarks/faults.py --minutes 60` and "]
    text[-1] += f"`python benchmarks/faults_stock.py`, {versions(found)}. A kill hits one random rank, all at once, or "
    text[-1] += "the launcher and then the ranks; `--resume auto` goes on by a new launch, which is killed again. The "
    text[-1] += "stock stack is the plain Trainer with DeepSpeed ZeRO-2 and `resume_from_checkpoint=True`."
    equal = sum(not row["weights_apart"] for row in chains)
    torn_used = sum(bool(row.get("resumed")) and row["from"] > (row["durable"] or 0) for row in kills)
    lost = sum(row["lost_steps"] not in (0, None) for row in kills)
    text += ["", "| | toolkit | stock |", "|---|---|---|"]
    text += [f"| kills (aimed at saves) | {len(kills)} ({len(at_saves)}) | {len(stock)} ({len(stock)}) |"]
    failed = sum(bool(row["failures"]) for row in stock)
    resumed = sum(row.get("resumed", False) for row in kills)
    text += [f"| resumed without help | {resumed} | {len(stock) - failed} |"]
    unreadable = sum(row["latest_unreadable"] for row in stock)
    torn, broken = sum(bool(row["torn"]) for row in kills), sum(not row["newest_is_whole"] for row in kills)
    lacking = sum(bool(row["lacks"]) for row in stock)
    text += [f"| a checkpoint was half written, under another name | {torn} | - |"]
    text += [f"| a checkpoint was half written, under its final name | {broken} | {lacking} |"]
    text += [f"| of these, DeepSpeed's `latest` missing or empty | - | {unreadable} |"]
    text += [f"| went on from a torn checkpoint | {torn_used} | {sum(went_on_torn(row) for row in stock)} |"]
    wrong = sum(row["silently_wrong"] for row in stock)
    text += [f"| steps lost beyond the last durable save | {lost} | {sum(loses(row) for row in stock)} |"]
    text += [f"| silently another run than the uncut one | {len(chains) - equal} of {len(chains)} chains | {wrong} |"]
    lost_seconds = [row["seconds_lost"] for row in kills if row.get("seconds_lost") is not None]
    theirs = [row["seconds_lost"] for row in stock if row["seconds_lost"] is not None and not row["failures"]]
    text += [f"| seconds lost a kill: median / 90% / most | {seconds(lost_seconds)} | {seconds(theirs)} |"]
    text += [
        "",
        "Seconds lost run from the kill to the moment at which the old step is reached again; nearly all of it ",
    ]
    text[-1] += "is the start of Python, torch and DeepSpeed. Those of the stock stack are of its unaided resumes."
    text += ["", *by_run(kills, chains), "", *by_hit(kills), *failures_of(stock), *bad(kills, chains), "", MADE_HOW]
    return "\n".join(text)


def went_on_torn(row: dict[str, Any]) -> bool:
    return bool(row["lacks"] and not row["failures"] and row["from"] == int(row["newest"].rsplit("-", 1)[1]))


def loses(row: dict[str, Any]) -> bool:
    return row["from"] < row["durable"]


def by_run(kills: list[dict[str, Any]], chains: list[dict[str, Any]]) -> list[str]:
    lines = ["| run | kills | resumed | lost steps | chains bit-equal | seconds lost |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(row["run"] for row in kills):
        mine = [row for row in kills if row["run"] == name]
        ended = [row for row in chains if row["run"] == name]
        equal = sum(not row["weights_apart"] for row in ended)
        lost = [row["seconds_lost"] for row in mine if row.get("seconds_lost") is not None]
        resumed, steps = sum(row.get("resumed", False) for row in mine), sum(row["lost_steps"] or 0 for row in mine)
        lines.append(f"| {name} | {len(mine)} | {resumed} | {steps} | {equal} of {len(ended)} | {seconds(lost)} |")
    return lines


def by_hit(kills: list[dict[str, Any]]) -> list[str]:
    counted, whom = Counter(row["hit"] for row in kills), Counter(row["victim"] for row in kills)
    hits = ", ".join(f"{what} {count}" for what, count in counted.most_common())
    victims = ", ".join(f"{what} {count}" for what, count in whom.most_common())
    ends = [row["seconds_to_end"] for row in kills if row["victim"] == "one rank"]
    late = sum(end is None for end in ends)
    after = seconds([end for end in ends if end is not None])
    return [
        f"What the kills hit: {hits}. Whom: {victims}.",
        "",
        f"Where one rank was killed, the others had ended after {after} s; {late} of {len(ends)} times they had not "
        "after 60 s.",
    ]


def failures_of(stock: list[dict[str, Any]]) -> list[str]:
    said = Counter(failure.split("/tmp")[0].strip()[:120] for row in stock for failure in row["failures"])
    if not said:
        return []
    lines = ["", "With what words the stock resumes failed, until its newest checkpoint was deleted by hand:", ""]
    return lines + [f"- {count} x `{words}`" for words, count in said.most_common()]


def bad(kills: list[dict[str, Any]], chains: list[dict[str, Any]]) -> list[str]:
    """All that is not as it should be."""
    lines = [
        f"- {row['run']} chain {row['chain']} kill {row['kill']}: hit {row['hit']}, durable {row['durable']}, went on "
        f"from {row.get('from')}"
        for row in kills
        if not row.get("resumed") or row["lost_steps"]
    ]
    lines += [
        f"- {row['run']} chain {row['chain']}: {row['weights_apart']}, {row['rows_apart']}"
        for row in chains
        if row["weights_apart"] or row["rows_apart"]
    ]
    return ["", "Not as it should be:", "", *lines] if lines else ["", "Nothing was otherwise."]


def resume_section() -> str:
    found = rows("resume")
    if not found:
        return ""
    cuts = [row for row in found if isinstance(row["cut"], int)]
    equal = sum(row["equal"] for row in cuts)
    lines = ["## Bitwise resume", "", f"`python benchmarks/resume.py`, {versions(found)}: {equal} of {len(cuts)} cuts "]
    lines[-1] += "end bit-equal to the uncut run: weights by torch.equal, every logged loss, gradient norm, learning "
    lines[-1] += (
        "rate and evaluation, the best metric, callbacks' states, and each rank's random states. Dropout is on, "
    )
    lines[-1] += "an epoch has 5 steps of 2 or more micro-batches, every second step is logged."
    return "\n".join([*lines, "", table(found)])


def sizes_section() -> str:
    found = rows("saving_sizes")
    if not found:
        return ""
    cells = {(row["millions"], row["layout"], row["stack"]): row for row in found}
    lines = ["## Seconds to save and to resume", "", f"`python benchmarks/saving_sizes.py`, {versions(found)}. "]
    lines[-1] += (
        "Median of three saves, and one launch each; resuming is what `train` takes longer to its first step than "
        "when it begins "
    )
    lines[-1] += (
        "anew, and of the toolkit the verification of every byte beside it. The toolkit's saves are on the disk "
    )
    lines[-1] += (
        "(fsync) when they end, and hashed; the stock stack's are in the kernel's cache. The last of the stock "
    )
    lines[-1] += "stack's was taken a day after the others."
    lines += [
        "",
        "| parameters | layout | MiB | save | stock | resume | + verify | stock |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for millions, layout in dict.fromkeys((row["millions"], row["layout"]) for row in found):
        ours, stock = (cells.get((millions, layout, stack)) for stack in ("ours", "stock"))
        any_of = ours or stock
        figures = [(ours, "save_seconds"), (stock, "save_seconds"), (ours, "resume_seconds"), (ours, "verify_seconds")]
        times = " | ".join(f"{row[key]:.2f}" if row else "-" for row, key in [*figures, (stock, "resume_seconds")])
        lines.append(f"| {any_of['parameters']:,} | {layout} | {any_of['bytes'] / 2**20:,.0f} | {times} |")
    return "\n".join(lines)


def long_section() -> str:
    found = rows("long_run")
    if not found:
        return ""
    latest = {row["run"]: row for row in found}
    lines = ["## Long runs", "", f"`python benchmarks/long_run.py`, {versions(found)}. Slopes are of the last four "]
    lines[-1] += "fifths, with their 95% interval; what it takes for growth stands in the benchmark, which fails on it."
    lines += [
        "",
        "| run | rank | steps | bytes a step | MiB at first, at last | files | threads |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in latest.values():
        for rank, of_rank in enumerate(row["per_rank"]):
            rss, files, threads = (of_rank[name] for name in ("rss_bytes", "open_files", "threads"))
            low, high = rss["interval"]
            mib = f"{rss['first'] / 2**20:.1f}, {rss['last'] / 2**20:.1f}"
            slope = f"{rss['slope_per_step']:.0f} ({low:.0f} to {high:.0f})"
            rest = " | ".join(f"{one['first']:.1f}, {one['last']:.1f}" for one in (files, threads))
            lines.append(f"| {row['run']} | {rank} | {row['steps']:,} | {slope} | {mib} | {rest} |")
    lines += [
        "",
        "| run | most MiB to 60% of the steps, after | checkpoints | trainer_state.json | metrics.jsonl | terminal |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for row in latest.values():
        place = row["folder"]
        most = f"{place['most_bytes_first_half'] / 2**20:.1f}, {place['most_bytes_second_half'] / 2**20:.1f}"
        kib = [f"{place[name] / 2**10:,.0f} KiB" for name in ("trainer_state_bytes", "metrics_bytes", "terminal_bytes")]
        kib[1] += f" for {place['metrics_rows']:,} rows"
        lines.append(f"| {row['run']} | {most} | {place['checkpoints']} | {' | '.join(kib)} |")
    grew = [f"{row['run']}: {what}" for row in latest.values() for what in growth(row)]
    most = f"More than {GROWTH['rss_bytes']:.0f} bytes a step, or files, threads or the run folder at all"
    lines += ["", f"{most}, grew in: {'; '.join(grew) or 'no run'}. What the slopes below that are is not known."]
    return "\n".join(lines)


def saving_section() -> str:
    path = RESULTS / "saving.json"
    if not path.is_file():
        return NO_DATA.format(title="What saving costs", name="saving")
    found = json.loads(path.read_text())
    lines = ["## What saving costs", "", "`python benchmarks/saving.py --json docs/results/saving.json`: the "]
    lines[-1] += "toolkit's saves "
    lines[-1] += (
        f"and the stock Trainer's by turns, medians of {found[0]['saves']} (smallest to largest); the overhead is "
    )
    lines[-1] += "what ours takes longer, as a share of a stock run that saves every "
    lines[-1] += f"{found[0]['save_steps']} steps of 8 x 128 tokens."
    lines += ["", "| parameters | checkpoint | step | stock save | our save | overhead |"]
    lines += ["|---:|---:|---:|---:|---:|---:|"]
    for row in found:
        size = f"{row['parameters'] / 1e6:.1f} M | {row['checkpoint_bytes'] / 2**20:.0f} MiB"
        times = " | ".join(
            f"{1e3 * row[f'{name}_seconds']:,.0f} ms{spread(row, name)}" for name in ("step", "stock", "ours")
        )
        lines.append(f"| {size} | {times} | {row['overhead']:+.2%} |")
    return "\n".join(lines)


def spread(row: dict[str, Any], name: str) -> str:
    each = row.get("each_seconds", {}).get(name)
    return f" ({1e3 * min(each):,.0f} to {1e3 * max(each):,.0f})" if each else ""


def hangs_section() -> str:
    found = {(row["run"], row["fault"]): row for row in rows("hangs")}
    layouts = list(dict.fromkeys(run for run, _ in found))
    lines = [
        "## Hangs: how soon they are seen",
        "",
        "`python benchmarks/hangs.py`, by the flags' defaults, once each: seconds from the ",
    ]
    lines[-1] += "fault until no process of the run is left. One message named the rank in "
    lines[-1] += f"{sum(row['named'] for row in found.values())} of {len(found)}."
    lines += ["", f"| | {' | '.join(layouts)} |", "|---|" + "---|" * len(layouts)]
    for fault, words in (("stopped", "stopped (SIGSTOP)"), ("stuck", "lives, but its batch never comes")):
        lines.append(f"| {words} | {' | '.join(str(found[run, fault]['seconds']) for run in layouts)} |")
    return "\n".join(lines)


def guards_section() -> str:
    path = RESULTS / "guards.json"
    if not path.is_file():
        return NO_DATA.format(title="What the guards cost", name="guards")
    found = json.loads(path.read_text())
    lines = [
        "## What the guards cost",
        "",
        "`python benchmarks/guards.py --json docs/results/guards.json`: a step with the NaN guard by ",
    ]
    lines[-1] += "its neighbour without, one CPU process and one thread; the median, and the middle half of 1,000 "
    lines[-1] += "medians drawn anew. "
    lines[-1] += f"A heartbeat takes {1e3 * found['heartbeat_cpu_seconds']:.2f} ms of CPU a second."
    lines += ["", "| model | pairs of steps | cost of a step |", "|---|---:|---|"]
    for name, row in found["models"].items():
        middle, low, high = (100 * (row[figure] - 1) for figure in ("median", "low", "high"))
        lines.append(f"| {name} | {row['pairs']} | {middle:+.2f}% ({low:+.2f} to {high:+.2f}) |")
    return "\n".join(lines)


def page() -> str:
    sections = [HEAD.strip(), kills_section(), resume_section(), sizes_section(), saving_section(), long_section()]
    return "\n\n".join(part for part in [*sections, hangs_section(), guards_section(), DAMAGED] if part) + "\n"
