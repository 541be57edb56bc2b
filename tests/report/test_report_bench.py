"""`finetune report` over a bench: ratios to DDP, spread, failures with their reason, published figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from page_reader import PageReader
from report_folders import GIB, HOSTILE, LAYOUTS, MODELS, bench_folder, run_folder

from finetune.report import bench_sections
from finetune.report.bench import Bench, Cell, read_bench
from finetune.report.bench_pictures import throughput_bars
from finetune.report.shapes import Word, letters
from finetune.report.write import write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bench_folder(tmp_path / "bench")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def page_of(folder: Path) -> PageReader:
    write([folder], html=folder / "report.html")
    return PageReader((folder / "report.html").read_text())


def cell_of(bench: Bench, name: str) -> Cell:
    return next(cell for cell in bench.cells if cell.name == name)


def test_figures_are_medians_over_repeats_and_ratios_are_of_the_same_repeat(folder: Path) -> None:
    bench = read_bench(folder, "bench")
    cell, base = cell_of(bench, "gptlite-zero2-2x8"), cell_of(bench, "gptlite-ddp-2x8")
    ours = {row["repeat"]: row["samples_per_second"] for row in cell.rows}
    theirs = {row["repeat"]: row["samples_per_second"] for row in base.rows}
    assert cell.rate == statistics.median(ours.values())
    assert bench.rate_to_ddp(cell) == statistics.median(ours[repeat] / theirs[repeat] for repeat in range(3))
    assert cell.spread == pytest.approx(
        (max(ours.values()) - min(ours.values())) / 2 / statistics.median(ours.values())
    )
    assert bench.rate_to_ddp(base) == 1
    assert cell.most("peak_bytes") == max(cell.rows[0]["memory"]["peak_bytes"])


def test_a_cell_is_compared_with_ddp_of_as_many_samples_a_step_alone(folder: Path) -> None:
    bench = read_bench(folder, "bench")
    assert bench.base(cell_of(bench, "gptlite-pipeline-2x8")) is cell_of(
        bench, "gptlite-ddp-2x8"
    )  # 2 x 8 of one replica
    assert bench.base(cell_of(bench, "gptlite-none-1x8")) is None  # one rank, and nobody ran DDP on one
    rows = rows_of(folder)
    for row in rows:
        if row["layout"] == "ddp":
            row["micro_batch"] = 4
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = read_bench(folder, "bench")
    assert again.rate_to_ddp(cell_of(again, "gptlite-zero2-2x8")) is None


def test_the_page_tells_every_cell_and_every_failure_with_its_reason_and_log(folder: Path) -> None:
    page = page_of(folder)
    for cell in {row["cell"] for row in rows_of(folder)}:
        assert cell in page.texts
    for words in ("19 of 21 cells were measured; mlp_wide-none-1x8 (oom), mlp_deep-pipeline-2x8 (unsupported) failed.",
                  "crashed 1/3", "RuntimeError: [enforce fail at tcp.cc:94] connection closed by peer",
                  "logs/gptlite-zero3-1.txt", "a pipeline of mlp_deep has no layers to cut", "46dee73",
                  "torch 2.13.0, deepspeed 0.19.8, transformers 5.23.0", "2026-11-22T07:18:01Z",
                  "Throughput: gptlite", "Memory of rank 0, by kind: mlp_wide", "Peak memory of a rank"):  # fmt: skip
        assert words in page.text, words
    bench = read_bench(folder, "bench")
    measured = [cell.rate for cell in bench.cells if cell.rate is not None]
    assert len(measured) == 19
    assert len(MODELS) * len(LAYOUTS) == 21


def test_bars_are_as_long_as_what_they_stand_for(folder: Path) -> None:
    bench = read_bench(folder, "bench")
    bars = [shape for shape in throughput_bars(bench, "gptlite", 860.0).shapes if getattr(shape, "title", "")]
    rates = [cell.rate for cell in bench.of("gptlite")]
    assert len(bars) == len(rates) == 7
    assert [bar.width / bars[0].width for bar in bars] == pytest.approx(
        [(rate or 0) / (rates[0] or 1) for rate in rates]
    )


def test_the_caption_is_not_cut_off_on_a_telephone(folder: Path) -> None:
    picture = throughput_bars(read_bench(folder, "bench"), "gptlite", 340.0)
    (caption,) = (one for one in picture.shapes if isinstance(one, Word) and "samples/s, all ranks" in one.text)
    assert caption.x >= 0
    assert caption.x + letters(caption.text, caption.size) <= 340


def test_small_models_are_in_mib(folder: Path) -> None:
    large = page_of(folder).text
    assert "peak GiB" in large
    assert "peak MiB" not in large
    rows = rows_of(folder)
    for row in rows:
        if memory := row["memory"]:
            memory |= {"peak_bytes": [2**18, 2**17], "average_bytes": [2**17, 2**17], "by_kind": {"parameters": 2**16}}
        row["planned"] = {"peak_bytes": 2**19, "step_seconds": 1.0}
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = page_of(folder).text
    for words in ("peak MiB", "average MiB", "resident GiB", "MiB (2**20 bytes)", "measured, MiB", "planned, MiB"):
        assert words in small, words
    assert "peak GiB" not in small
    assert "0.25" in small


def test_a_repeat_that_was_run_again_counts_once(folder: Path) -> None:
    rows = rows_of(folder)
    crashed = next(row for row in rows if row["status"] == "crashed")
    mended = {**next(row for row in rows if row["cell"] == crashed["cell"] and row["status"] == "done"), "repeat": 1}
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(mended) + "\n" + '{"cell": "torn')
    bench = read_bench(folder, "bench")
    cell = cell_of(bench, crashed["cell"])
    assert cell.status == "done"
    assert len(cell.rows) == 3
    assert bench.notes == ["results.jsonl: skipped 1 line, incomplete or not an object."]


def test_published_figures_stand_beside_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = {
        "title": "the post", "source": "https://example.org/post", "machine": "8 x A100", "note": "",
        "figures": [
            {"model": "gptlite", "layout": "zero2", "throughput_to_ddp": 0.9},
            {"model": "gptlite", "layout": "ddp", "average_memory_gb": 4.0},
            {"model": "gptlite", "layout": "zero3", "average_memory_gb": 2.0},
            {"model": "gptlite", "layout": "pipeline", "pipeline_parallel_size": 8, "throughput_to_ddp": 0.77},
            {"model": "unknown", "layout": "zero2", "throughput_to_ddp": 0.1},
        ],
    }  # fmt: skip
    monkeypatch.setattr(bench_sections, "study", lambda: published)
    page = page_of(folder)
    section = page.text.partition("Ratios to DDP")[2].partition("Failures")[0]
    bench = read_bench(folder, "bench")
    ours = bench.rate_to_ddp(cell_of(bench, "gptlite-zero2-2x8"))
    assert f"gptlite zero2 throughput 0.90 {ours:.2f}" in section
    assert "the post, on 8 x A100" in section
    held = bench.memory_to_ddp(cell_of(bench, "gptlite-zero3-2x8"))
    assert f"gptlite zero3 average memory 0.50 {held:.2f}" in section
    assert "gptlite pipeline, 8 stages throughput 0.77 " in section  # ours had two
    assert "Ours: Linux x86_64, 2 cores, 24.00 GiB; 2026-11-22." in section
    assert "unknown" not in section


@pytest.mark.parametrize(
    "row",
    [
        {"cell": "a"},
        {"cell": "a", "status": "done"},
        {"cell": "a", "status": "done", "samples_per_second": "fast", "memory": [], "planned": 3, "losses": {}},
        {"cell": "a", "status": "oom", "repeat": [1], "micro_batch": None, "world_size": "two"},
        {"cell": "a", "status": "done", "samples_per_second": 0, "memory": {"peak_bytes": [0], "by_kind": {"a": -1}}},
        {"cell": "a", "status": "done", "pipeline_parallel_size": 0, "planned": {"step_seconds": 0}},
        {"cell": "a", "layout": "ddp", "status": "done", "repeat": [1], "samples_per_second": 2},
        {"cell": "a", "status": "done", "samples_per_second": -1, "step_seconds": [-1], "memory": {"peak_bytes": [-1]}},
        {"cell": "a", "status": "done", "memory": {"peak_bytes": [5]}, "planned": {"peak_bytes": -1}},
        {"no cell": 1},
    ],
    ids=lambda row: str(len(str(row))),
)
def test_a_row_may_lack_anything(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    assert "Summary" in page_of(tmp_path).text


@pytest.mark.parametrize("content", ['{"cells": [[1], {}, null, "b"]}', '{"cells": 1, "scale": []}', "[" * 600])
def test_a_grid_may_hold_anything(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"cell": "a"}\n')
    (tmp_path / "grid.json").write_text(content)
    (tmp_path / "folder.yaml").mkdir()
    assert "Summary" in page_of(tmp_path).text


def test_a_row_s_own_scale_goes_before_that_of_the_grid(folder: Path) -> None:
    (folder / "grid.json").write_text('{"cells": [], "scale": 0.5, "steps": 20}')
    assert "scale of the models 0.5 " in page_of(folder).text
    rows = [{**row, "scale": 0.125, "model_sha256": "ab", "global_batch": 16, "steps": 20} for row in rows_of(folder)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "scale of the models 0.125 " in page_of(folder).text


def test_an_empty_bench_says_so(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    assert "there are no results yet" in page_of(tmp_path).text


def test_hostile_text_stays_text_in_a_bench(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "bench", models=("gptlite",))
    rows = rows_of(folder)
    for row in rows:
        row |= {key: f"{row[key]}{HOSTILE}" for key in ("cell", "model", "layout", "reason", "log", "git_revision")}
        row["versions"] = {HOSTILE: HOSTILE}
        if row["memory"]:
            row["memory"]["by_kind"] = {HOSTILE: GIB}
    rows[0]["status"] = HOSTILE
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(folder)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert page.text.count("<script>alert(1)</script>") > 20


def test_columns_that_hold_nothing_are_left_out(tmp_path: Path) -> None:
    """The MLPs have no tokens."""
    with_text, without = (page_of(bench_folder(tmp_path / m, models=(m,))).texts for m in ("gptlite", "mlp_deep"))
    assert "tokens/s" in with_text
    assert "tokens/s" not in without


def test_a_loss_that_is_not_finite_leaves_the_others_at_their_steps(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "bench", repeats=1, models=("gptlite",))
    rows = [{**row, "losses": [3.0, float("nan"), 2.0]} for row in rows_of(folder)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (curves,) = (block.value for section in bench_sections.bench_sections(read_bench(folder, "bench"))
                 for block in section.blocks if block.kind == "curves")  # fmt: skip
    assert {tuple(curve.points["step"]) for curve in curves.panels[0].curves} == {((1.0, 3.0), (3.0, 2.0))}


def test_runs_and_benches_go_on_one_page(tmp_path: Path) -> None:
    folders = [bench_folder(tmp_path / "bench"), run_folder(tmp_path / "run")]
    write(folders, html=tmp_path / "a.html", markdown=tmp_path / "a.md")
    page = PageReader((tmp_path / "a.html").read_text())
    assert "2 folders: bench, run" in page.text
    assert "Throughput: gptlite" in page.text
    assert "Done: 30 steps" in page.text
    assert "| gptlite-ddp-2x8 | done | 1.00 |" in (tmp_path / "a.md").read_text().replace("\\_", "_")
