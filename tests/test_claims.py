"""No figure without its data: every page of docs/results is what its script makes of the data beside it, and every
measured figure of the README and of docs/ is one that the same data give."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import plan
import plan_gpu
import plan_others
import plan_public
import pytest
import zero_paper
from comm_hooks_page import speedups
from conftest import REPO
from pages import PAGES, RESULTS

from finetune.plan.machine import find_machine
from finetune.plan.model import PACKED_BLOCK, SCALES_BLOCK

WITHOUT_DATA = {"bench_laptop": "The data behind this page was not kept"}  # to be made again
# A number with the unit of something measured, a decimal, or a power of ten.
UNITS = r"%|\u00d7|(?:x|times|percent|h|min|s|ms|µs|seconds|minutes|hours|[kKMGT]i?B|bits|points)\b|of\s\d"
UNITS += r"|(?:tokens|samples|texts|steps|rows|images)\s?(?:/|a |per )\s?s"
COUNTS = r"two|three|five|ten|fifteen|twenty"
FIGURE = re.compile(
    rf"(?<![\w.-])\d[\d,.]*(?:e-?\d+)?\s?(?:{UNITS})|(?<![\w.-])\d+\.\d+(?![\w.])|\b\d+e-\d+"
    rf"|\b(?:half|twice|(?:{COUNTS}) (?:times|minutes|hours))\b"
)
# Figures that nobody measured: releases, settings, bounds that a test holds, formulas and other people's results.
SETTINGS = {
    "README.md": ["Python 3.10 to 3.13", "the tests hold them to 1%"],
    "docs/install.md": [
        "torch 2.13, transformers 5.23 and DeepSpeed 0.19",
        "3.10",
        "3.11",
        "3.12",
        "3.13",
        "3.14",
        "torch 2.11",
    ],
    "ds_configs/README.md": [
        "ZeRO-1 reaches 0.35 of DDP",
        "1.0",
        "8 of 16 bytes",
        "4.5 x",
        "0.9 x",
        "10 x",
        "1 MiB",
        "100 MB",
    ],
    "docs/elastic.md": [
        "60 seconds",
        "killed after two minutes",
        "begins to end within 5 s",
        "after 40 s at most",
        "wait 30 s",
        "the tests hold them to 1e-6",
        "2.13",
        "gives up after 60 s",
    ],
    "docs/long_context.md": [
        "to 1% of the measured ones, and to 2% under ZeRO-3",
        "of whole MLPs to 1e-6",
        "it would be more than twice as large",
        "torch 2.13",
        "(deepspeed 0.19.8, transformers 5.23, accelerate 1.15;",
    ],
    "CONTRIBUTING.md": ["must catch 95%"],
    "docs/bench.md": ["2,048 of 256", "2 ms", "95%", "0.05"],
    "docs/causal_lm.md": ["(1e-3, 6e-4 and 3e-4 respectively)"],
    # defaults of flags, ours and theirs
    "docs/coming_from.md": ["0.05", "2e-5", "5e-5", "0.1", "2 x", "8 bits", "0.7", "0.3"],
    "docs/quickstart.md": ["24 GB"],
    "docs/support.md": [
        "to 1e-5",
        "2 x 2 ranks",
        "Python 3.12 and torch 2.11",
    ],  # the bound of tests/runs/test_reshard_runs.py
    "docs/moe.md": [
        "transformers 5.23",
        "receive twice the mean",
        "the share of its half-precision peak",
        "trained and saved as one process does, to 1e-6",
        "within 2% of measured ones in fp32, and within 3%",
        "are within 1% of real runs",
        "equal those of one process with the Trainer to 1e-6 in fp32",
    ],
    "docs/data.md": ["a Jaccard similarity of 0.8 or more"],
    "docs/check.md": ["twice", "half", "1.0", "4.46", "4.47", "0.16", "8.0"],
    "docs/checkpoints.md": ["last 4 MiB are compared", "64 MiB", "half", "256 MiB", "two minutes", "90 s"],
    "docs/compression.md": [
        *("1,000 steps for 0.999", "100 for 0.99", "15% to 20% of runs of 150,000 steps", "and at a quarter 28%"),
        *("Default: half.", "with half of the steps compressed", "1905.13727", "2102.02888", "1/25.6"),
        *("40 MB", "1.6 MB", "0.1 s", "38.4 MB", "3 s shorter"),  # an example, by the formula
    ],
    "docs/faults.md": [
        *("0.2 s", "40 s", "1 KiB", "64 KiB, plus 4 KiB", "half an hour", "45 s", "twice", "every 10 s"),
        *("for 37 s", "less 3 s", "2.6", "2.7", "2.8", "2.9", "2.10", "2.12", "2.13"),  # and releases of torch
    ],
    "docs/images.md": ["3 x side", "7 GiB", "50,000 of 224 x", "half", "32 x", "224 x", "1803.08494"],
    "docs/launch.md": ["30 seconds", "2.13", "64 MB", "which pip orders before 2.6", "from 25.03 on"],
    "docs/pipeline.md": ["half", "1e-4", "1e-5"],
    "docs/plan.md": [
        *(
            "in 4 bits",
            "weights are within 3%",
            "within 1% for",
            "within 7% for",
            "within 9% for",
            "within 1% for whole chunks in bf16",
            "within 4% in fp32 for",
            "agree to 1%",
        ),  # bounds of test_traced
        *(
            "7.46 billion",
            "7.5 billion",
            "1910.02054",
            "15 GB",
            "0.4 GB",
            "0.8 GB",
            "149 GB",
            "twice",
            "16 of 8 experts",
        ),
        *("to 1%", "to 2.5%", "to 14%"),  # bounds of tests/plan/test_traced.py
        "at most 1.5%",  # that of tests/plan/test_planned_preferences.py
    ],
    "docs/embedding.md": [
        "2101.06983",
        "2205.13147",
        "2407.15831",
        "a third more work",
        "nothing is embedded twice",
        "more than 95%",
        "0.05 by default",
        "twice the batch",
    ],
    "docs/preference.md": [
        "TRL 1.16",
        "2305.18290",
        "2310.12036",
        "2402.01306",
        "2403.07691",
        "2405.14734",
        "2307.09288",
    ],
    "docs/profiling.md": ["(0.9 M parameters)", "took 5% of the step", "twice", "half"],
    "docs/reshard.md": ["2 x 8 x 1", "(16 x 4) is 0.5", "8 x 1 x 4", "0.4 MiB", "in 0.1 s"],
    "docs/seq_cls.md": ["also written 1.0", "Metrics during training use 0.5"],
    "docs/token_cls.md": ["transformers 5.23"],
    "docs/question_answering.md": ["transformers 5.23"],
}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


@cache
def claims() -> tuple[tuple[str, str], ...]:
    """A document, and the words that it must hold, by the data."""
    return tuple(claims_of_the_data())


def claims_of_the_data() -> Iterator[tuple[str, str]]:
    by_default = {row["recipe"]: row for row in rows("defaults")}
    one = by_default["seq_cls"]
    classes = one["held_out_by_class"].values()
    yield "README.md", f"the run takes about {one['seconds']:.0f} seconds on two CPU cores"
    yield "README.md", f"{one['train_samples']:,} texts and {one['eval_samples']} held out, {len(classes)} classes"
    most = max(classes) / sum(classes)
    yield (
        "README.md",
        f"accuracy of {one['eval_accuracy']:.2f}, where always guessing the largest class gives {most:.2f}",
    )
    names, alone = by_default["token_cls"], by_default["token_cls"]["f1_of_the_name_alone"]
    yield "docs/token_cls.md", f"entity F1 of {alone:.3f}"
    yield "docs/token_cls.md", f"reaches {names['eval_f1']:.3f} in {names['train_runtime']:.0f} seconds"
    text, digits = by_default["causal_lm"], by_default["image_cls"]["eval_accuracy"]
    yield (
        "docs/causal_lm.md",
        f"reaches {text['eval_bits_per_byte']:.1f} bits per byte in {text['seconds']:.0f} seconds on two CPU cores",
    )
    yield "docs/images.md", f"the default run gets {digits:.0%} right"
    yield from why_this()
    yield from (("docs/plan.md", row) for row in zero_paper.table().splitlines())
    yield from durability()
    yield from saves_beside()
    uneven, alike = (
        statistics.median(a / b for a, b in zip(rates["ours"], rates["plain"], strict=True))
        for rates in json.loads((RESULTS / "generate.json").read_text())["kinds"].values()
    )
    yield "docs/generate.md", f"{uneven:.2f} times a plain loop's speed where lengths differ, and at {alike:.2f} times"
    yield from slow_networks()
    found = json.loads((RESULTS / "profiling.json").read_text())["layouts"]["zero2"]
    share = found["mean_seconds"]["communication"] / found["step_seconds"]
    yield "docs/profiling.md", f"communication takes {share:.0%} of the step here, averaged over ranks"
    kept, lost = shares_of_masters()
    yield (
        "docs/lora.md",
        f"achieved {kept:.1%} of the drop in held-out loss that master weights achieved, and pure bf16 {lost:.0%}",
    )
    scales = (32 / PACKED_BLOCK, 8 / PACKED_BLOCK + 32 / (PACKED_BLOCK * SCALES_BLOCK))  # bits of each weight
    yield "docs/lora.md", f"saves {scales[0] - scales[1]:.2f} bits per packed"
    passes = json.loads((RESULTS / "limit.json").read_text())["jobs"]["char"]["attention"]
    short = next(row for row in passes if (row["precision"], row["tokens"]) == ("bf16", 64))
    slower = statistics.median(a / b for a, b in zip(short["sdpa"], short["without"], strict=True))
    yield "docs/causal_lm.md", f"takes {slower:.1f} times as long with it"
    turns = json.loads((RESULTS / "post_training.json").read_text())["turns"]
    times = {kind: [turn[kind]["TRL"]["step_seconds"] / turn[kind]["ours"]["step_seconds"] for turn in turns]
             for kind in ("full", "lora")}  # fmt: skip
    bytes_ = {kind: [turn[kind]["ours"]["bytes"] / turn[kind]["TRL"]["bytes"] for turn in turns] for kind in times}
    ratios = {kind: [statistics.median(one[kind]) for one in (times, bytes_)] for kind in times}
    yield (
        "docs/coming_from.md",
        "reaches {:.2f} times SFTTrainer's speed with {:.2f} times its memory, and with LoRA {:.2f} times with "
        "{:.2f}".format(*ratios["full"], *ratios["lora"]),
    )
    halved = json.loads((RESULTS / "post_training_bf16.json").read_text())["turns"]
    faster = [turn["full"]["TRL"]["step_seconds"] / turn["full"]["ours"]["step_seconds"] for turn in halved]
    yield "docs/coming_from.md", f"the first is {statistics.median(faster):.2f} times"
    stages = (2, 4, 8)
    for micro in (1, 4, 8, 16, 32):
        yield "docs/pipeline.md", f"| {micro} | " + " | ".join(f"{micro / (micro + n - 1):.0%}" for n in stages) + " |"
    configs = {json.loads(line)["file"] for line in (RESULTS / "check_truth.json").read_text().splitlines()}
    yield "docs/check.md", f"its verdicts on {len(configs)} generated configs"
    minutes = json.loads((REPO / "tests" / "nightly.json").read_text())["minutes"]
    yield "README.md", f"run took {minutes:.0f} minutes"


def why_this() -> Iterator[tuple[str, str]]:
    found = json.loads((RESULTS / "check.json").read_text())
    tried = [row["trainer"] for row in found["faults"] if row["trainer"][0] in ("runs", "refuses", "ends", "hangs")]
    quiet = sum(status == "runs" for status, _, _ in tried)
    later = statistics.median(seconds for status, _, seconds in tried if status == "refuses")
    assert all(row["ours"] for row in found["faults"])
    yield (
        "README.md",
        f"of {len(tried)} faults, the Trainer trains on with {quiet}, without an error, and refuses the others "
        f"after {later:.0f} s",
    )
    yield "README.md", f"names them all in {statistics.median(found['cold_seconds']):.2f} s"
    planned = [plan.Row(**row) for row in json.loads((RESULTS / "plan.json").read_text())["rows"]]
    errors = [abs(row.error(row.peak)) for row in planned]
    yield (
        "README.md",
        f"is off by {statistics.median(errors):.2%} (median) and {max(errors):.2%} (worst) over {len(errors)} CPU runs",
    )
    estimates = [1 - row.estimator / row.peak[1] for row in planned if row.estimator is not None]
    yield "README.md", f"is {statistics.median(estimates):.0%} below the measured peak"
    data = json.loads((RESULTS / "plan_public.json").read_text())
    on_t4 = [abs(plan_public.on_t4(row, data["models"][row["model"]]) / row["mib"] - 1) for row in data["t4"]]
    yield (
        "README.md",
        f"by {statistics.median(on_t4):.1%} and {max(on_t4):.1%} over {len(on_t4)} published measurements on a T4",
    )
    varied = [row for row in data["others"] if row["source"] == "ms-swift" and row["tokens"] == 8192]
    most = max(row["reserved_gib"] * plan_gpu.GIB / plan_others.peak_of(row, data["models"]) for row in varied)
    yield "docs/plan.md", f"up to {most:.1f} times the peak"
    on_gpu = json.loads((RESULTS / "plan_gpu.json").read_text())
    every = [abs(planned / measured - 1) for planned, measured in (row["peak"] for row in on_gpu["rows"])]
    peaks = [off for off, row in zip(every, on_gpu["rows"], strict=True) if row["peak"][1] >= 10 * plan_gpu.GIB]
    steps = [planned / measured - 1 for planned, measured in (row["seconds"] for row in on_gpu["rows"])]
    yield (
        "README.md",
        f"by {statistics.median(every):.1%} and {max(every):.1%} over {len(every)} runs on an H200",
    )
    yield (
        "docs/plan.md",
        f"the allocator's peak is within {math.ceil(100 * max(peaks))}% in all {len(peaks)} runs of 10 GiB or more, "
        f"but step times by the shipped profile are {-statistics.median(steps):.0%} too low in the median",
    )
    compiled = json.loads((RESULTS / "causal_lm_gpu.json").read_text())["training"]["runs"]
    (chunked,), (whole,) = (compiled[name] for name in ("recipe, bf16", "recipe, bf16, all logits at once"))
    yield (
        "docs/causal_lm.md",
        f"takes {chunked['peak GiB']:.1f} instead of {whole['peak GiB']:.1f} GiB on an H200, at "
        f"{chunked['tokens/s'] / whole['tokens/s']:.0%} of the speed",
    )
    chats = json.loads((RESULTS / "chat_templates.json").read_text())
    every, templates = sum(row["conversations"] for row in chats), {row["template"] for row in chats}
    assert all(row["exact"] == row["conversations"] for row in chats)
    yield "README.md", f"exactly the assistant's, in all of {every:,} conversations under {len(templates)} templates"


def durability() -> Iterator[tuple[str, str]]:
    found, stock = rows("faults"), rows("faults_stock")
    kills, chains = [row for row in found if "kill" in row], [row for row in found if "kills" in row]
    aimed = sum(row["moment"] in ("save", "rename", "rotation", "final") for row in kills)
    torn, on = sum(bool(row["torn"]) for row in kills), sum(row.get("resumed", False) for row in kills)
    assert on == len(kills)
    assert not any(row["lost_steps"] for row in kills)
    assert not any(row["weights_apart"] or row["rows_apart"] for row in chains)
    assert torn >= 60
    yield (
        "README.md",
        f"after each of {len(kills)} kills, {aimed} of them aimed at saves, the run resumed, and all {len(chains)} "
        "chains of killed and resumed runs ended bit-identical",
    )
    alone = sum(not row["failures"] for row in stock)
    yield "README.md", f"after {len(stock)} kills of the stock stack, all aimed at saves, {alone} runs resumed"
    moves = json.loads((RESULTS / "reshard.json").read_text())["moves"]
    loss, norm = (max(move["apart"][i] for move in moves if move["precision"] == "fp32") for i in (0, 1))
    yield "README.md", f"in fp32, its losses match those of the uninterrupted run to {above(loss)}"
    yield "docs/reshard.md", f"in fp32 losses to {above(loss)} and gradient norms to {above(norm)}"
    yield "docs/support.md", f"(to {above(loss)} as"


def saves_beside() -> Iterator[tuple[str, str]]:
    turns = json.loads((RESULTS / "async_save.json").read_text())["rows"]

    def of(layout: str) -> tuple[float, float, float]:
        own = [row for row in turns if (row["size"], row["layout"]) == ("6x512", layout)]
        medians = (statistics.median(row[name] for row in own) for name in ("written_after", "sync"))
        return (own[0]["copied_bytes"] / 2**20, *medians)

    size, later, sync = of("plain")
    words = f"a checkpoint of {size:.0f} MiB was complete {later:.1f} s after its copy"
    words += f"; a synchronous save took {sync:.1f} s"
    yield "docs/checkpoints.md", words
    size, later, sync = of("zero2")
    yield "docs/checkpoints.md", f"Under ZeRO-2, one of {size:.0f} MiB took {later:.1f} s instead of {sync:.1f} s"


def above(value: float) -> str:
    """The next power of ten."""
    return f"1e-{-math.ceil(math.log10(value))}"


def shares_of_masters() -> tuple[float, float]:
    """Of what the held-out loss falls by with fp32 masters: with Kahan summation, and in pure bf16."""
    rounds = json.loads((RESULTS / "bf16_weights.json").read_text())["rounds"]
    fell = [{arm: loss["0"] - loss["100"] for arm, of in one.items() for loss in [of["eval_loss"]]} for one in rounds]
    kahan, pure = ("StableAdamW, bf16 with Kahan summation", "StableAdamW"), ("AdamW, pure bf16", "AdamW")
    kept, lost = (
        statistics.median(one[arm] / one[f"{name}, fp32 masters"] for one in fell) for arm, name in (kahan, pure)
    )
    return kept, lost


def slow_networks() -> Iterator[tuple[str, str]]:
    found, document = json.loads((RESULTS / "comm_hooks.json").read_text()), "docs/compression.md"
    bits, low_rank = (speedups(found["link"])[hook][100] for hook in ("onebit_adam", "powersgd"))
    counted = {cell["hook"]: cell["counted_bytes"] for cell in found["link"]["cells"]}
    share = counted["onebit_adam"] / counted["none"]
    yield document, f"1/2 + 1/2 · 1/{1 / share:.1f} = {0.5 + 0.5 * share:.0%} of plain DDP's"
    yield document, f"about {1 / (0.5 + 0.5 / bits):.1f} times as fast, while such a step is {bits:.1f} times"
    yield document, f"PowerSGD's step {low_rank:.1f} times"
    (runs,) = found["accuracy"]["causal_lm"].values()
    yield document, f"{runs['onebit_adam']['eval_loss'] / runs['none']['eval_loss'] - 1:.1%} above AdamW's"


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.md")))
def test_a_page_of_results_is_what_its_script_makes_of_its_data(name: str) -> None:
    page = (RESULTS / f"{name}.md").read_text()
    if name in WITHOUT_DATA:
        assert WITHOUT_DATA[name] in plain(page)
    else:
        assert PAGES[name]() == page, f"run `python benchmarks/pages.py {name}`"


@pytest.mark.parametrize("case", plan.CASES, ids=lambda case: case.name)
def test_what_the_page_of_plans_says_was_planned_is_what_is_planned_today(case: plan.Case) -> None:
    """Bytes; the seconds are of a machine that was calibrated."""
    (row,) = (row for row in json.loads((RESULTS / "plan.json").read_text())["rows"] if row["name"] == case.name)
    job, machine = plan.job_of(case), find_machine("cpu")
    planned = [plan.plan_memory(job, machine, rank) for rank in range(case.ranks)]
    assert (row["resident"][0], row["peak"][0]) in [(rank.resident_bytes, rank.peak.bytes) for rank in planned]


def test_the_pages_are_those_that_scripts_make() -> None:
    assert sorted({*PAGES, *WITHOUT_DATA}) == sorted(path.stem for path in RESULTS.glob("*.md"))


def test_the_readme_and_the_docs_say_what_the_data_give() -> None:
    assert len(claims()) >= 20
    missing = [(document, words) for document, words in claims() if words not in plain((REPO / document).read_text())]
    assert missing == []


DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "ds_configs/README.md",
    *sorted(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md")),
]


def loose(text: str, known: list[str]) -> list[str]:
    """The figures that stand in no known words, code left out."""
    words = plain(re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL))
    for claim in known:
        bare = plain(re.sub(r"`[^`]*`", " ", claim))
        words = re.sub(rf"(?<![\w.,]){re.escape(bare)}(?!\w)", " ", words)
    return FIGURE.findall(words)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_measured_figure_stands_in_prose_without_a_claim(document: str) -> None:
    known = [words for place, words in claims() if place == document] + SETTINGS.get(document, [])
    assert loose((REPO / document).read_text(), known) == []


@pytest.mark.parametrize(
    "words",
    ["It is 3.3 times as fast.", "within 0.5%", "takes 12 s on two cores", "24 of 36 went on", "twice as fast", "1e-6"],
)
def test_a_figure_that_is_no_claim_is_found(words: str) -> None:
    assert loose(words, ["another 3.3 times"])
    assert not loose(words, [words])


def test_a_figure_that_the_data_do_not_give_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rewritten = (RESULTS / "startup.json").read_text().replace('"repeats": 5', '"repeats": 4')
    (tmp_path / "startup.json").write_text(rewritten)
    monkeypatch.setattr("pages.RESULTS", tmp_path)
    assert PAGES["startup"]() != (RESULTS / "startup.md").read_text()
