"""Renders docs/results/durability.md from the data that the other benchmarks write; pages.py writes the page."""

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
SPREAD = "median / 90th percentile / maximum"  # as `seconds` shows a list
HEAD = """# Durability: kills, resuming, long runs

Rendered from the data files beside this page, measured on two CPU cores without a GPU. See
[checkpoints.md](../checkpoints.md) for checkpoints, [faults.md](../faults.md) for the guards, and
[reshard.md](reshard.md) for resuming in another layout.
"""
MADE_HOW = """The kills span four revisions of the code. The machine was shared with other work, so times are upper
bounds; those of `experts`, whose launches had to wait, were not taken. One more chain, of image_cls_pipeline, differed
from its uninterrupted run in the last bits: the resumed pipeline had measured its layers again and chosen another
partition. A resumed pipeline now keeps the partition of its checkpoint. The chain was run again, and only the new run
counts above."""
NO_DATA = """## {title}

To be measured again: the data of the earlier figures was not kept.
`python benchmarks/{name}.py --json docs/results/{name}.json` measures it."""
DAMAGED = """## Damaged and hostile files

`python benchmarks/corruption.py` truncates, empties, deletes and flips bits in every kind of checkpoint file, in every
layout, and fails if any damage goes undetected. tests/security/ feeds every reader poisoned pickles and hostile YAML,
JSON, headers, names, links and markup. Both do their own counting, so no figures are kept here."""


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
    text[-1] += f"`python benchmarks/faults_stock.py`, {versions(found)}. A kill hits one random rank, all ranks at "
    text[-1] += "once, or the launcher and then the ranks. A new launch resumes with `--resume auto` and is killed "
    text[-1] += (
        "again; a chain is such a series in one run folder. The stock stack is the plain Trainer with DeepSpeed "
    )
    text[-1] += "ZeRO-2 and `resume_from_checkpoint=True`."
    equal = sum(not row["weights_apart"] for row in chains)
    torn_used = sum(bool(row.get("resumed")) and row["from"] > (row["durable"] or 0) for row in kills)
    lost = sum(row["lost_steps"] not in (0, None) for row in kills)
    text += ["", "| | toolkit | stock stack |", "|---|---|---|"]
    text += [f"| kills (of which aimed at saves) | {len(kills)} ({len(at_saves)}) | {len(stock)} ({len(stock)}) |"]
    failed = sum(bool(row["failures"]) for row in stock)
    resumed = sum(row.get("resumed", False) for row in kills)
    text += [f"| resumed without help | {resumed} | {len(stock) - failed} |"]
    unreadable = sum(row["latest_unreadable"] for row in stock)
    torn, broken = sum(bool(row["torn"]) for row in kills), sum(not row["newest_is_whole"] for row in kills)
    lacking = sum(bool(row["lacks"]) for row in stock)
    text += [f"| left a partial checkpoint under a temporary name | {torn} | - |"]
    text += [f"| left a partial checkpoint under its final name | {broken} | {lacking} |"]
    text += [f"| of these, with DeepSpeed's `latest` missing or empty | - | {unreadable} |"]
    text += [f"| resumed from a partial checkpoint | {torn_used} | {sum(went_on_torn(row) for row in stock)} |"]
    wrong = sum(row["silently_wrong"] for row in stock)
    text += [f"| lost steps that a durable save held | {lost} | {sum(loses(row) for row in stock)} |"]
    text += [
        f"| silently diverged from the uninterrupted run | {len(chains) - equal} of {len(chains)} chains | {wrong} |"
    ]
    lost_seconds = [row["seconds_lost"] for row in kills if row.get("seconds_lost") is not None]
    theirs = [row["seconds_lost"] for row in stock if row["seconds_lost"] is not None and not row["failures"]]
    text += [f"| seconds lost per kill: {SPREAD} | {seconds(lost_seconds)} | {seconds(theirs)} |"]
    text += [
        "",
        "Seconds lost are the time from the kill until the run reaches the same step again. Nearly all of it is ",
    ]
    text[-1] += "start-up of Python, torch and DeepSpeed. For the stock stack, only resumes without help count."
    text += ["", *by_run(kills, chains), "", *by_hit(kills), *failures_of(stock), *bad(kills, chains), "", MADE_HOW]
    return "\n".join(text)


def went_on_torn(row: dict[str, Any]) -> bool:
    return bool(row["lacks"] and not row["failures"] and row["from"] == int(row["newest"].rsplit("-", 1)[1]))


def loses(row: dict[str, Any]) -> bool:
    return row["from"] < row["durable"]


def by_run(kills: list[dict[str, Any]], chains: list[dict[str, Any]]) -> list[str]:
    lines = [f"| run | kills | resumed | saved steps lost | bit-identical chains | seconds lost per kill: {SPREAD} |"]
    lines.append("|---|---|---|---|---|---|")
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
    hits = ", ".join(f"{what} ({count})" for what, count in counted.most_common())
    victims = ", ".join(f"{what} ({count})" for what, count in whom.most_common())
    ends = [row["seconds_to_end"] for row in kills if row["victim"] == "one rank"]
    late = sum(end is None for end in ends)
    after = seconds([end for end in ends if end is not None])
    return [
        f"What the kills interrupted: {hits}. Which processes were killed: {victims}.",
        "",
        f"After one rank was killed, the others ended within {after} s ({SPREAD}). In {late} of {len(ends)} cases, "
        "they were still running after 60 s.",
    ]


def failures_of(stock: list[dict[str, Any]]) -> list[str]:
    said = Counter(failure.split("/tmp")[0].strip()[:120] for row in stock for failure in row["failures"])
    if not said:
        return []
    lines = [
        "",
        "Errors of the failed stock resumes. Resuming worked once the newest checkpoint was deleted by hand:",
        "",
    ]
    return lines + [f"- {count} x `{words}`" for words, count in said.most_common()]


def bad(kills: list[dict[str, Any]], chains: list[dict[str, Any]]) -> list[str]:
    """Everything unexpected, or a line that says that there is nothing."""
    lines = [
        f"- {row['run']} chain {row['chain']} kill {row['kill']}: hit {row['hit']}, durable {row['durable']}, "
        f"resumed from {row.get('from')}"
        for row in kills
        if not row.get("resumed") or row["lost_steps"]
    ]
    lines += [
        f"- {row['run']} chain {row['chain']}: {row['weights_apart']}, {row['rows_apart']}"
        for row in chains
        if row["weights_apart"] or row["rows_apart"]
    ]
    good = (
        "Every killed run of the toolkit resumed without losing a saved step, and every chain ended with the weights "
    )
    good += "and the log of the uninterrupted run."
    return ["", "Unexpected results:", "", *lines] if lines else ["", good]


def resume_section() -> str:
    found = rows("resume")
    if not found:
        return ""
    cuts = [row for row in found if isinstance(row["cut"], int)]
    equal = sum(row["equal"] for row in cuts)
    lines = ["## Bitwise resume", "", f"`python benchmarks/resume.py`, {versions(found)}: {equal} of {len(cuts)} runs "]
    lines[-1] += "that were cut and resumed are bit-identical to the uninterrupted run. The comparison covers the "
    lines[-1] += (
        "weights (torch.equal), every logged loss, gradient norm, learning rate and evaluation, the best metric, "
    )
    lines[-1] += (
        "the callbacks' states, and each rank's random states. Dropout is on, an epoch has 5 steps of 2 or more "
    )
    lines[-1] += "micro-batches, and every second step is logged."
    return "\n".join([*lines, "", table(found)])


def sizes_section() -> str:
    found = rows("saving_sizes")
    if not found:
        return ""
    cells = {(row["millions"], row["layout"], row["stack"]): row for row in found}
    lines = ["## Seconds to save and to resume", "", f"`python benchmarks/saving_sizes.py`, {versions(found)}. "]
    lines[-1] += (
        "Times are in seconds: medians of three saves, and one launch each. Resume is the additional time until "
    )
    lines[-1] += (
        "the first step of `train`, compared with a fresh start. The toolkit also verifies every byte; that time "
    )
    lines[-1] += "is listed separately. When a save of the toolkit ends, its files are hashed and on the disk (fsync); "
    lines[-1] += (
        "those of the stock stack are still in the kernel's page cache. The last measurement of the stock stack "
    )
    lines[-1] += "was taken a day after the others."
    lines += [
        "",
        "| parameters | layout | checkpoint, MiB | save, toolkit | save, stock | resume, toolkit | verify, toolkit "
        "| resume, stock |",
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
    lines = ["## Long runs", "", f"`python benchmarks/long_run.py`, {versions(found)}. Slopes are fitted to the "]
    lines[-1] += (
        "last four fifths of the steps. The benchmark defines how much counts as growth, and fails on it. Each "
    )
    lines[-1] += "pair of values is the first and the last."
    lines += [
        "",
        "| run | rank | steps | resident memory: bytes per step (95% interval) | resident memory, MiB | open files "
        "| threads |",
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
        "| run | largest run folder, MiB: up to 60% of the steps, after | checkpoints | trainer_state.json "
        "| metrics.jsonl | terminal output |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for row in latest.values():
        place = row["folder"]
        most = f"{place['most_bytes_first_half'] / 2**20:.1f}, {place['most_bytes_second_half'] / 2**20:.1f}"
        kib = [f"{place[name] / 2**10:,.0f} KiB" for name in ("trainer_state_bytes", "metrics_bytes", "terminal_bytes")]
        kib[1] += f" for {place['metrics_rows']:,} rows"
        lines.append(f"| {row['run']} | {most} | {place['checkpoints']} | {' | '.join(kib)} |")
    grew = [f"{row['run']}: {what}" for row in latest.values() for what in growth(row)]
    most = (
        f"Runs whose memory grew by more than {GROWTH['rss_bytes']:.0f} bytes per step, or whose open files, threads "
    )
    most += f"or run folder grew: {'; '.join(grew) or 'none'}. "
    first = next(iter(latest.values()))
    most += f"Each run made {first.get('saves', 20)} checkpoints and {first.get('evaluations', 10)} evaluations. Until "
    most += (
        "about 20 of each, glibc's heap grows in jumps of about a megabyte, so a slope of few of them may be no leak."
    )
    lines += ["", most]
    return "\n".join(lines)


def saving_section() -> str:
    path = RESULTS / "saving.json"
    if not path.is_file():
        return NO_DATA.format(title="The cost of saving", name="saving")
    found = json.loads(path.read_text())
    lines = [
        "## The cost of saving",
        "",
        "`python benchmarks/saving.py --json docs/results/saving.json`: saves of the ",
    ]
    lines[-1] += (
        f"toolkit and of the stock Trainer, interleaved; medians of {found[0]['saves']} (range). The overhead is "
    )
    lines[-1] += "the additional time of our save, as a share of a stock run that saves every "
    lines[-1] += f"{found[0]['save_steps']} steps of 8 x 128 tokens."
    lines += ["", "| parameters | checkpoint | step | stock save | toolkit's save | overhead |"]
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
        "## Hangs: time until a run ends",
        "",
        "`python benchmarks/hangs.py`, with the flags' defaults, one run each: seconds from the ",
    ]
    lines[-1] += "fault until no process of the run is left. A single message named the faulty rank in "
    lines[-1] += f"{sum(row['named'] for row in found.values())} of {len(found)} runs."
    lines += ["", f"| one rank is | {' | '.join(layouts)} |", "|---|" + "---|" * len(layouts)]
    for fault, words in (("stopped", "stopped (SIGSTOP)"), ("stuck", "alive, but never gets its batch")):
        lines.append(f"| {words} | {' | '.join(str(found[run, fault]['seconds']) for run in layouts)} |")
    return "\n".join(lines)


def guards_section() -> str:
    path = RESULTS / "guards.json"
    if not path.is_file():
        return NO_DATA.format(title="The cost of the guards", name="guards")
    found = json.loads(path.read_text())
    lines = [
        "## The cost of the guards",
        "",
        "`python benchmarks/guards.py --json docs/results/guards.json`: the time of a step with the NaN guard, or ",
    ]
    lines[-1] += "with all that the recipes' trainer adds to a step (guard, speed meter, losses, callbacks), compared "
    lines[-1] += "with the next step without it, in one CPU process with one thread. Figures are medians; "
    lines[-1] += "parentheses have the middle half of 1,000 bootstrap medians. "
    lines[-1] += f"A heartbeat takes {1e3 * found['heartbeat_cpu_seconds']:.2f} ms of CPU time per second."
    lines += ["", "| model | step, ms | added | pairs of steps | additional time per step | in ms |"]
    lines += ["|---|---:|---|---:|---|---|"]
    for name, parts in found["models"].items():
        for what, row in parts.items():
            share = "{:+.2f}% ({:+.2f} to {:+.2f})".format(*(100 * (one - 1) for one in row["ratio"]))
            more = "{:+.3f} ({:+.3f} to {:+.3f})".format(*(1e3 * one for one in row["more_seconds"]))
            step = 1e3 * row["step_seconds"]
            lines.append(f"| {name} | {step:.1f} | {what} | {row['pairs']} | {share} | {more} |")
    return "\n".join(lines)


def page() -> str:
    sections = [HEAD.strip(), kills_section(), resume_section(), sizes_section(), saving_section(), long_section()]
    return "\n\n".join(part for part in [*sections, hangs_section(), guards_section(), DAMAGED] if part) + "\n"
