"""The tables and the plot of benchmarks/comm_hooks.py."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

from finetune.run.flags.compression import HOOKS

ENOUGH_ROUNDS = 5
FEW = "; that is too few for more than the order of magnitude"
WHOLE_RUN_MBIT = 100
QUIET = 0.5  # a load average below which the machine counts as idle


def medians(found: dict) -> dict:
    """Median seconds by hook and rate."""
    table: dict = {hook: {} for hook in HOOKS}
    for cell in found["cells"]:
        table[cell["hook"]][cell["mbit"]] = statistics.median(cell["seconds"])
    return table


def ratios(found: dict) -> dict:
    """Speed-ups over plain DDP by hook and rate, one per round. Each round runs every hook, so that other programs slow
    both sides of a ratio."""
    seconds = {(cell["hook"], cell["mbit"]): cell["seconds"] for cell in found["cells"]}
    table: dict = {hook: {} for hook in HOOKS}
    for (hook, mbit), ours in seconds.items():
        table[hook][mbit] = [theirs / own for theirs, own in zip(seconds["none", mbit], ours, strict=True)]
    return table


def speedups(found: dict) -> dict:
    return {hook: {mbit: statistics.median(each) for mbit, each in row.items()} for hook, row in ratios(found).items()}


def crossovers(found: dict) -> dict:
    """Mbit/s below which each hook is faster than plain DDP: by formula, from the bytes and the step without a rate
    limit; and as measured, where the times cross."""
    table, faster = medians(found), speedups(found)
    counted = {cell["hook"]: cell["counted_bytes"] for cell in found["cells"]}
    rates = sorted(rate for rate in table["none"] if rate)
    result = {}
    for hook in HOOKS[1:]:
        extra = table[hook][0] - table["none"][0]
        by_formula = (counted["none"] - counted[hook]) * 8 / 1e6 / extra if extra > 0 else math.inf
        gains = [(rate, math.log(faster[hook][rate])) for rate in rates]
        crossing = None
        for (low, gain), (high, other) in pairwise(gains):
            if gain > 0 >= other:
                share = gain / (gain - other)
                crossing = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        if crossing is None:
            crossing = math.inf if gains[-1][1] > 0 else 0.0
        result[hook] = {"by_formula": by_formula, "measured": crossing}
    return result


def draw(found: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain, faster = medians(found)["none"], speedups(found)
    rates = sorted(rate for rate in plain if rate)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.6), dpi=120)
    styles = {"none": ("black", "o"), "fp16": ("tab:blue", "v"), "bf16": ("tab:cyan", "^")}
    styles |= {"powersgd": ("tab:green", "s"), "onebit_adam": ("tab:red", "o")}
    for hook, (colour, mark) in styles.items():
        label = "none (plain DDP)" if hook == "none" else hook
        axes.plot(
            rates,
            [plain[rate] / faster[hook][rate] for rate in rates],
            color=colour,
            marker=mark,
            label=label,
            markersize=5,
        )
    axes.axhline(found["seconds_without_exchange"], color="grey", linestyle=":", linewidth=1)
    axes.annotate(
        "computation alone", (rates[0], found["seconds_without_exchange"]), color="grey", fontsize=8, va="bottom"
    )
    crossing = crossovers(found)["onebit_adam"]["measured"]
    if 0 < crossing < math.inf:
        axes.axvline(crossing, color="tab:red", linestyle="--", linewidth=1)
        text = f"onebit_adam is faster \nbelow {crossing:.0f} Mbit/s "
        axes.annotate(text, (crossing, axes.get_ylim()[1] * 0.5), color="tab:red", fontsize=8, va="top", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="seconds per step")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_title(
        f"{found['parameters'] / 1e6:.1f} million parameters, one rank on each side of the link", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def page(found: dict) -> str:
    lines = ["# Gradient compression: speed-up and loss", ""]
    lines += [
        "Made by `python benchmarks/comm_hooks.py`. [compression.md](../compression.md) describes the hooks.",
        "",
    ]
    if "link" in found:
        lines += link_chapter(found["link"], found["taken"]["link"])
    if "recipe" in found:
        seconds = found["recipe"]["step_seconds"]
        lines += [
            f"`recipes/causal_lm.py`, started as a user would, with one rank on each side of a link of "
            f"{found['recipe']['mbit']} Mbit/s ({found['taken']['recipe']}): {seconds['none']:.2f} s per step with "
            f"plain DDP, and {seconds['onebit_adam']:.2f} s with `onebit_adam` after its freeze step, which is "
            f"{seconds['none'] / seconds['onebit_adam']:.1f} times as fast.",
            "",
        ]
    if "accuracy" in found:
        lines += accuracy_chapter(found["accuracy"], found["taken"]["accuracy"])
        lines += whole_runs(found)
    machine = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine.items() if name != "cpu_cores")
    lines += [f"Machine: {machine['cpu_cores']} CPU cores, gloo; {versions}.", ""]
    return "\n".join(lines)


def whole_runs(found: dict) -> list[str]:
    """The speed-up of a run that starts with uncompressed gradients, calculated from the two tables."""
    lines = []
    for recipe, seeds in found["accuracy"].items() if "link" in found else ():
        for hook, row in next(iter(seeds.values())).items():
            if row.get("comm_compressed_share_of_fp32", 1) < 1:
                late = (1 - row["comm_share_of_fp32"]) / (1 - row["comm_compressed_share_of_fp32"])
                gain = 1 / (1 - late + late / speedups(found["link"])[hook][WHOLE_RUN_MBIT])
                lines += [
                    f"`{hook}` compressed {late:.0%} of the steps of recipes/{recipe}.py. At {WHOLE_RUN_MBIT} Mbit/s a "
                    f"whole run like this would be {gain:.1f} times as fast as plain DDP. This is calculated from the "
                    "two tables, not measured.",
                    "",
                ]
    return lines


def link_chapter(found: dict, day: str) -> list[str]:
    table, faster, cross = medians(found), ratios(found), crossovers(found)
    rounds = len(found["cells"][0]["seconds"])
    rates = sorted(rate for rate in table["none"] if rate) + [0]
    names = [f"{rate:g}" if rate else "no limit" for rate in rates]
    lines = ["## Step time on a slow link", "", "![Seconds per step over bandwidth, by hook](comm_hooks.png)", ""]
    lines += [
        f"A GPT-lite of {found['parameters']:,} parameters, with one rank in each of two network namespaces; "
        "`tc … tbf` limits the rate at both ends of the link between them. Figures are median seconds per step, after "
        f"the uncompressed first steps; hooks are interleaved ({day}). Computation alone takes "
        f"{found['seconds_without_exchange']:.2f} s. In parentheses: the speed-up over plain DDP, as the median and "
        f"range over {rounds} rounds with one step of each hook{FEW if rounds < ENOUGH_ROUNDS else ''}. The plot "
        "divides plain DDP's median by these speed-ups, so that lines cross where a hook stops paying off.",
        "",
        *_busy(found.get("load")),
        f"| hook, at Mbit/s: | {' | '.join(names)} | faster than DDP below |",
        f"|---|{'---|' * len(rates)}---|",
    ]
    for hook in HOOKS:
        cells = [f"{table[hook][r]:.2f}{'' if hook == 'none' else _times(faster[hook][r])}" for r in rates]
        pays = "" if hook == "none" else _mbit(cross[hook]["measured"], rates)
        lines.append(f"| {hook} | {' | '.join(cells)} | {pays} |")
    lines += [
        "",
        "Bytes that a rank sends per step, as counted by the hook and as measured on the link, with TCP headers:",
        "",
    ]
    lines += ["| hook | counted | share of fp32 | on the link | faster than DDP below, by formula |"]
    lines += ["|---|---|---|---|---|"]
    # On a slow link, bytes of one hook may still be queued when the next one starts.
    cells = {cell["hook"]: cell for cell in found["cells"] if not cell["mbit"]}
    for hook in HOOKS:
        counted, seen = cells[hook]["counted_bytes"], cells[hook]["wire_bytes"]
        share = counted / cells["none"]["counted_bytes"]
        formula = "" if hook == "none" else _mbit(cross[hook]["by_formula"], rates)
        lines.append(f"| {hook} | {counted:,.0f} | {share:.3f} (1/{1 / share:.1f}) | {seen:,.0f} | {formula} |")
    return [*lines, ""]


def _busy(load: float | None) -> list[str]:
    """The warning for a load average before the start that was not low, or not recorded."""
    if load is not None and load <= QUIET:
        return []
    known = "" if load is None else f" (load average before the start: {load:.1f})"
    return [
        f"**Other programs were running on these cores**{known}. Absolute times are too long. Those of fast links are "
        "noisy, and so are the rates at which the lines cross.",
        "",
    ]


def _times(each: list[float]) -> str:
    return f" ({statistics.median(each):.1f}x, {min(each):.1f} to {max(each):.1f})"


def _mbit(value: float, rates: list[float]) -> str:
    if value == math.inf:
        return f"every rate up to {max(rates):g}"
    return f"{value:.0f} Mbit/s" if value else f"not at {min(r for r in rates if r):g}"


def accuracy_chapter(found: dict, day: str) -> list[str]:
    lines = ["## Final loss", ""]
    lines += [
        f"Two ranks; everything but the hook is the same ({day}). The table has the evaluation loss at the end, and "
        "its difference from the run without a hook.",
        "",
    ]
    for recipe, seeds in found.items():
        shown = ", ".join(seeds)
        steps = next(iter(next(iter(seeds.values())).values()))["steps"]
        lines += [f"`recipes/{recipe}.py`, {steps} steps, seed {shown}:", ""]
        lines += [
            "| hook | evaluation loss | relative to none | last training loss | bytes sent, share of fp32 "
            "| the same, compressed steps only |"
        ]
        lines += ["|---|---|---|---|---|---|"]
        for hook in HOOKS:
            rows = [runs[hook] for runs in seeds.values() if hook in runs]
            if not rows:
                continue
            mean = {k: statistics.mean(r[k] for r in rows) for k in rows[0]}
            against = [
                runs[hook]["eval_loss"] / runs["none"]["eval_loss"] - 1 for runs in seeds.values() if hook in runs
            ]
            sent, later = mean.get("comm_share_of_fp32", 1.0), mean.get("comm_compressed_share_of_fp32", 1.0)
            lines.append(
                f"| {hook} | {mean['eval_loss']:.4f} | {' '.join(f'{100 * a:+.2f}%' for a in against)} | "
                f"{mean['last_train_loss']:.4f} | {sent:.3f} | {later:.3f} |"
            )
        lines.append("")
    return lines
