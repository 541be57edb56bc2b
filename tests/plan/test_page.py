"""The page and the PNG of a plan: all numbers, nothing loaded from elsewhere, colours that everybody can tell apart."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from page_reader import PageReader

from finetune.errors import RequestError
from finetune.plan.job import PIPELINE, Job
from finetune.plan.machine import find_machine
from finetune.plan.memory import RankMemory
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.plan import Plan, plan
from finetune.plan.schedule import simulate
from finetune.plan.search import Candidate, Found, laid_out
from finetune.plan.zero import Zero
from finetune.report.plan_page import pictured, write_page, write_png
from finetune.report.plan_pictures import OTHER, front, lanes, memory_bars, peak_index
from finetune.report.plan_words import COLOURS
from finetune.report.shapes import NARROW, WIDE, Box, Line, Scale, Word, letters
from finetune.report.text import gib, number

GIB = 2**30
MODEL = model_of(find_model_config("gptlite-post"), "gptlite-post")
MACHINE = find_machine("H100-80GB")
JOB = Job(MODEL, world_size=8, precision="bf16", micro_batch=8, tokens=2048)
SCALING = [(1, 100.0, 100.0), (8, 760.0, 800.0), (4096, 300_000.0, 409_600.0)]


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(laid_out(JOB, "zero2_offload"), MACHINE)


@pytest.fixture(scope="module")
def piped() -> Plan:
    job = replace(JOB, engine=PIPELINE, zero=Zero(1), stages=4, world_size=16, accumulation=8)
    return plan(job, MACHINE)


@pytest.fixture(scope="module")
def found() -> Found:
    one, two, three = (
        Candidate(f"layout{micro}", plan(replace(JOB, micro_batch=micro), MACHINE)) for micro in (1, 4, 16)
    )
    huge = plan(replace(JOB, micro_batch=512), MACHINE)
    return Found((three, two, one), (Candidate("hopeless", huge),), 77)


def read(path: Path) -> PageReader:
    return PageReader(path.read_text(encoding="utf-8"))


def test_the_page_has_all_pictures_and_all_numbers(tmp_path: Path, small: Plan, found: Found) -> None:
    path = tmp_path / "plan.html"
    command = "finetune plan recipes/configs/gptlite_post.yaml --gpu H100-80GB"
    write_page(path, small, found, scaling=SCALING, notes=["mind the gap"], command=command)
    page = read(path)
    rank = small.fullest
    figures = [
        *rank.resident.values(),
        *rank.peak.by_kind.values(),
        *small.host.values(),
        small.host_bytes,
        rank.peak.bytes,
    ]
    shown = {f"{size / GIB:,.2f}" for size in (*figures, small.limit_bytes, small.host_limit_bytes) if size > GIB / 100}
    shown |= {gib(one.plan.peak_bytes) for one in (*found.fitting, *found.failing)} - {
        gib(found.failing[0].plan.peak_bytes)
    }
    shown |= {number(one.samples_per_second) for one in found.fitting} | {"77 layouts were considered."}
    shown |= {"760", "800", "95.0%", "4,096", "300,000", "409,600", "73.2%"}  # of SCALING
    shown |= {
        "mind the gap",
        command,
        found.failing[0].plan.why_not,
        "arXiv 1811.06965",
        *MACHINE.sources["launch_seconds"].split()[:1],
    }
    cells = set(page.texts)
    assert not [one for one in shown if one not in cells and one not in page.text]
    assert page.titles[::2] == [
        "Memory of the device, by kind",
        "Memory of a node's host, by kind",
        "Memory over a step, ranks 0-7",
        "Throughput against memory, over the layouts",
        "Scaling to 4,096 ranks",
    ]
    assert page.titles[::2] == page.titles[1::2]  # for the screen and for the telephone


def test_a_pipeline_has_its_schedule(tmp_path: Path, piped: Plan) -> None:
    path = tmp_path / "plan.html"
    write_page(path, piped)
    text = read(path).text
    assert "8 micro-batches through 4 stages" in text
    assert "micro-batches in flight by stage: 4, 3, 2, 1." in text
    assert "stage 3: forward of micro-batch 7, " in text
    assert piped.seconds.idle > 0  # else it has no bubble to be drawn


def test_each_picture_is_named_and_described(tmp_path: Path, piped: Plan, found: Found) -> None:
    path = tmp_path / "plan.html"
    write_page(path, piped, found, scaling=SCALING)
    page = read(path)
    drawn = [attributes for tag, attributes in page.tags if tag == "svg"]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(drawn) == 2 * 5
    assert len(ids) == len(set(ids))
    for attributes in drawn:
        assert attributes["role"] == "img"
        assert set(str(attributes["aria-labelledby"]).split()) <= set(ids)
    assert len(page.titles) == len(drawn)


def test_nothing_is_loaded_from_anywhere(tmp_path: Path, piped: Plan, found: Found) -> None:
    path = tmp_path / "plan.html"
    write_page(path, piped, found, scaling=SCALING, notes=["see https://example.org/a?b=1&c=2, there"])
    page = read(path)
    assert not {tag for tag, _ in page.tags} & set("link img iframe object embed image use base".split())
    links = [
        (tag, attributes) for tag, attributes in page.tags if {"src", "href", "xlink:href", "srcset"} & set(attributes)
    ]
    assert all(str(attributes["href"]).startswith(("#", "http")) for _, attributes in links)
    assert {tag for tag, _ in links} == {"a"}
    assert "https://example.org/a?b=1&c=2" in [attributes["href"] for _, attributes in links]
    style = path.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"url\(|@import", style)
    assert path.stat().st_size < 400_000


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'&"


def test_hostile_text_stays_text(tmp_path: Path, small: Plan, found: Found) -> None:
    def rename(rank: RankMemory) -> RankMemory:
        peaks = {phase: replace(moment, where=HOSTILE) for phase, moment in rank.peaks.items()}
        return replace(rank, peaks=peaks, resident={**rank.resident, HOSTILE: GIB})

    hostile = replace(
        small,
        ranks=tuple(map(rename, small.ranks)),
        machine=replace(MACHINE, name=HOSTILE, sources={HOSTILE: "javascript:alert(1) " + HOSTILE}),
        job=replace(small.job, model=replace(MODEL, family=HOSTILE)),
    )
    candidates = tuple(replace(one, layout=HOSTILE) for one in found.fitting)
    failing = tuple(replace(one, layout=HOSTILE) for one in found.failing)
    path = tmp_path / "plan.html"
    write_page(path, hostile, Found(candidates, failing, 3), scaling=SCALING, notes=[HOSTILE], command=HOSTILE)
    page = read(path)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1  # that which sorts
    assert "img" not in tags
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    assert all(str(attributes["href"]).startswith(("http", "#")) for tag, attributes in page.tags if tag == "a")
    assert page.text.count(HOSTILE) > 20  # and is there, where it belongs
    write_png(
        tmp_path / "plan.png",
        replace(hostile, machine=replace(MACHINE, name="$\\frac{$ H")),
        Found(candidates, failing, 3),
    )


def test_by_night_and_on_a_telephone_there_are_rules_of_style(tmp_path: Path, small: Plan) -> None:
    path = tmp_path / "plan.html"
    write_page(path, small)
    text = path.read_text(encoding="utf-8")
    day, night = (set(re.findall(r"--(\w+):", part)) for part in text.split("prefers-color-scheme:dark")[:2])
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert used <= day
    assert used <= night
    assert 'name="viewport"' in text


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_is_drawn_outside_of_its_picture(small: Plan, piped: Plan, found: Found, width: float) -> None:
    drawn = [
        picture
        for one in (small, piped)
        for section in pictured(one, found, SCALING)
        for block in section.blocks
        if block.kind == "drawn"
        for picture in block.value
        if picture.width == width
    ]
    drawn.append(lanes(simulate(16, [1, 1.5], [2, 3], 0.1), "long", width))
    assert len({picture.title for picture in drawn}) == 8
    for picture in drawn:
        for shape in picture.shapes:
            if isinstance(shape, Word):
                wide = letters(shape.text, shape.size)
                left = shape.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[shape.anchor] * wide
                assert left >= -1, (picture.title, shape)
                assert left + wide <= picture.width + 1, (picture.title, shape)
                assert 0 < shape.y <= picture.height, (picture.title, shape)
            elif isinstance(shape, Box):
                assert -1 <= shape.x <= shape.x + shape.width <= picture.width + 1
            elif isinstance(shape, Line):
                assert all(-1 <= x <= picture.width + 1 and -1 <= y <= picture.height for x, y in shape.points)


def test_bars_are_as_long_as_what_they_stand_for(small: Plan) -> None:
    boxes = [s for s in memory_bars(small, "Memory", WIDE).shapes if isinstance(s, Box) and s.title]
    rank = small.ranks[0]
    widths = {box.title: box.width for box in boxes}
    weights, activations = (
        widths[f"{kind} at peak: {gib(rank.peak.by_kind[kind])} GiB"] for kind in ("parameters", "activations")
    )
    ratio = rank.peak.by_kind["activations"] / rank.peak.by_kind["parameters"]
    assert (activations + 1) / (weights + 1) == pytest.approx(ratio, rel=0.01)  # a pixel of each is the gap
    assert {box.colour for box in boxes if box.title.startswith("parameters")} == {COLOURS["parameters"]}


def test_the_peak_is_marked_in_its_phase(small: Plan, piped: Plan) -> None:
    for one in (small, piped):
        place = peak_index(one.fullest)
        assert one.fullest.timeline[place][0] == one.fullest.peak.phase


def test_the_front_is_what_nothing_beats_in_both(found: Found) -> None:
    three, two, one = found.fitting
    assert front(found.fitting) == [one, two, three]  # more memory, more throughput
    wasteful = replace(two, plan=replace(two.plan, ranks=three.plan.ranks))
    assert front([one, wasteful, three]) == [one, three]


def test_a_schedule_that_is_too_long_is_cut_and_says_so() -> None:
    long = lanes(simulate(400, [1.0] * 8, [2.0] * 8, 0.1), "long", NARROW)
    assert "The chart shows the first" in long.alt
    assert sum(isinstance(shape, Box) for shape in long.shapes) < 600
    assert "Drawn" not in lanes(simulate(8, [1.0] * 4, [2.0] * 4), "short", NARROW).alt


def test_ticks_are_round_and_within_the_scale() -> None:
    assert Scale(0, 76.3, 0, 100).ticks() == [0, 20, 40, 60]
    assert Scale(0, 0.0076, 0, 100).ticks() == pytest.approx([0, 0.002, 0.004, 0.006])
    assert Scale(3, 45, 0, 100, is_log=True).ticks() == [5, 10, 20]
    assert Scale(0.5, 1e6, 0, 100, is_log=True).ticks() == [10.0**power for power in range(7)]


def test_every_kind_of_memory_has_a_colour_of_its_own_that_the_colour_blind_can_tell() -> None:
    assert len(COLOURS) > 10
    for (one, first), (other, second) in combinations(COLOURS.items(), 2):
        for sight, matrix in SIGHTS.items():
            assert distance(lab(first, matrix), lab(second, matrix)) > 18, (one, other, sight)
    assert OTHER not in COLOURS.values()


# Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009), table 1, severity 1.0.
SIGHTS = {
    "full": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(colour: str, sight: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIELAB (D65) of "#rrggbb" as it is seen."""
    shares = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    red, green, blue = (min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in sight)
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5


def test_the_png_is_one_picture_of_all(tmp_path: Path, piped: Plan, found: Found) -> None:
    heights = []
    for name, some in (("few", None), ("all", found)):
        write_png(tmp_path / f"{name}.png", piped, some, scaling=SCALING)
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") == pytest.approx((WIDE + 40) * 180 / 96, abs=2)
        heights.append(int.from_bytes(data[20:24], "big"))
    assert heights[0] < heights[1]  # the layouts are drawn, too


def test_a_path_that_cannot_be_written_is_said(tmp_path: Path, small: Plan) -> None:
    with pytest.raises(RequestError, match=r"nowhere/plan\.html: cannot be written"):
        write_page(tmp_path / "nowhere" / "plan.html", small)
    with pytest.raises(RequestError, match=r"nowhere/plan\.png: cannot be written"):
        write_png(tmp_path / "nowhere" / "plan.png", small)
