"""Tables and plot of benchmarks/comm_hooks.py."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

from finetune.run.flags.compression import HOOKS

ENOUGH_ROUNDS = 5
FEW = ", too few for more than the order of magnitude"
WHOLE_RUN_MBIT = 100
QUIET = 0.5  # a load below which nothing else is said to run


def medians(found: dict) -> dict:
    """Seconds by hook and rate."""
    table: dict = {hook: {} for hook in HOOKS}
    for cell in found["cells"]:
        table[cell["hook"]][cell["mbit"]] = statistics.median(cell["seconds"])
    return table


def ratios(found: dict) -> dict:
    """How many times as fast as plain DDP, by hook and rate: of each round, in which all hooks have a turn, so that
    what else runs on the machine slows both."""
    seconds = {(cell["hook"], cell["mbit"]): cell["seconds"] for cell in found["cells"]}
    table: dict = {hook: {} for hook in HOOKS}
    for (hook, mbit), ours in seconds.items():
        table[hook][mbit] = [theirs / own for theirs, own in zip(seconds["none", mbit], ours, strict=True)]
    return table


def speedups(found: dict) -> dict:
    return {hook: {mbit: statistics.median(each) for mbit, each in row.items()} for hook, row in ratios(found).items()}


def crossovers(found: dict) -> dict:
    """Mbit/s below which each hook is faster than plain DDP: by the formula from bytes and the unlimited step, and
    where the measured times cross."""
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
        "computing alone", (rates[0], found["seconds_without_exchange"]), color="grey", fontsize=8, va="bottom"
    )
    crossing = crossovers(found)["onebit_adam"]["measured"]
    if 0 < crossing < math.inf:
        axes.axvline(crossing, color="tab:red", linestyle="--", linewidth=1)
        text = f"onebit_adam pays \nbelow {crossing:.0f} Mbit/s "
        axes.annotate(text, (crossing, axes.get_ylim()[1] * 0.5), color="tab:red", fontsize=8, va="top", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="seconds a step")
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
    lines = ["# Gradient compression: what it costs and saves", ""]
    lines += [
        "Made by `python benchmarks/comm_hooks.py`; what the hooks do is in [compression.md](../compression.md).",
        "",
    ]
    if "link" in found:
        lines += link_chapter(found["link"], found["taken"]["link"])
    if "recipe" in found:
        seconds = found["recipe"]["step_seconds"]
        lines += [
            f"`recipes/causal_lm.py` as a user starts it, one rank on each side of {found['recipe']['mbit']} Mbit/s "
            f"({found['taken']['recipe']}): {seconds['none']:.2f} s a step by plain DDP, "
            f"{seconds['onebit_adam']:.2f} s by `onebit_adam` after its freeze: "
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
    """What a run gains that sends whole gradients first, by the two tables."""
    lines = []
    for recipe, seeds in found["accuracy"].items() if "link" in found else ():
        for hook, row in next(iter(seeds.values())).items():
            if row.get("comm_compressed_share_of_fp32", 1) < 1:
                late = (1 - row["comm_share_of_fp32"]) / (1 - row["comm_compressed_share_of_fp32"])
                gain = 1 / (1 - late + late / speedups(found["link"])[hook][WHOLE_RUN_MBIT])
                lines += [
                    f"`{hook}` compressed {late:.0%} of the steps of recipes/{recipe}.py. At {WHOLE_RUN_MBIT} Mbit/s a "
                    f"whole such run would be {gain:.1f} times as fast as plain DDP, by the two tables; it was not run "
                    "there.",
                    "",
                ]
    return lines


def link_chapter(found: dict, day: str) -> list[str]:
    table, faster, cross = medians(found), ratios(found), crossovers(found)
    rounds = len(found["cells"][0]["seconds"])
    rates = sorted(rate for rate in table["none"] if rate) + [0]
    names = [f"{rate:g}" if rate else "no limit" for rate in rates]
    lines = ["## Step time on a slow link", "", "![Seconds a step over the bandwidth, by hook](comm_hooks.png)", ""]
    lines += [
        f"A GPT-lite of {found['parameters']:,} parameters, one rank in each of two network namespaces, and "
        f"`tc … tbf` on both ends of the cable between them. Median seconds of a step after the first whole steps, all "
        f"hooks in turn ({day}); computing alone takes {found['seconds_without_exchange']:.2f} s. In brackets how many "
        f"times as fast as plain DDP: median (smallest to largest) of {rounds} rounds in which each had its turn"
        f"{FEW if rounds < ENOUGH_ROUNDS else ''}. The picture shows plain DDP's median over these, so that lines "
        "cross where a hook ceases to pay.",
        "",
        *_busy(found.get("load")),
        f"| Mbit/s | {' | '.join(names)} | pays below |",
        f"|---|{'---|' * len(rates)}---|",
    ]
    for hook in HOOKS:
        cells = [f"{table[hook][r]:.2f}{'' if hook == 'none' else _times(faster[hook][r])}" for r in rates]
        pays = "" if hook == "none" else _mbit(cross[hook]["measured"], rates)
        lines.append(f"| {hook} | {' | '.join(cells)} | {pays} |")
    lines += [
        "",
        "Bytes that a rank sends a step, counted by the hook and seen on the cable (TCP's headers and all):",
        "",
    ]
    lines += ["| | counted | share of fp32 | on the cable | pays below, by the formula |", "|---|---|---|---|---|"]
    # On a slow cable what one hook has sent may still stand in its queue when the next one's turn begins.
    cells = {cell["hook"]: cell for cell in found["cells"] if not cell["mbit"]}
    for hook in HOOKS:
        counted, seen = cells[hook]["counted_bytes"], cells[hook]["wire_bytes"]
        share = counted / cells["none"]["counted_bytes"]
        formula = "" if hook == "none" else _mbit(cross[hook]["by_formula"], rates)
        lines.append(f"| {hook} | {counted:,.0f} | {share:.3f} (1/{1 / share:.1f}) | {seen:,.0f} | {formula} |")
    return [*lines, ""]


def _busy(load: float | None) -> list[str]:
    """What is said of a load before the start that was not low, or not noted."""
    if load is not None and load <= QUIET:
        return []
    known = "" if load is None else f" (a load of {load:.1f} before the start)"
    return [
        f"**Other programs ran on these cores at the time**{known}: seconds are too long, and those of the fast "
        "links, and with them where the lines cross, are noisy.",
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
        f"Two ranks, everything else the same ({day}); evaluation loss at the end, and how far it is from that of the "
        "run without a hook.",
        "",
    ]
    for recipe, seeds in found.items():
        shown = ", ".join(seeds)
        steps = next(iter(next(iter(seeds.values())).values()))["steps"]
        lines += [f"`recipes/{recipe}.py`, {steps} steps, seed {shown}:", ""]
        lines += [
            "| hook | evaluation loss | against none | last training loss | sent, share of fp32 | after the start |"
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
