"""Results on the disk, compared, and as tables."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rows import row

from finetune.bench import table
from finetune.bench.compare import compare, ratio
from finetune.bench.result import Row, append, read_rows
from finetune.errors import RequestError
from finetune.report.bench import read_bench
from finetune.report.bench_sections import bench_sections
from finetune.report.published import AVERAGE_MEMORY, THROUGHPUT, published, ratios, study
from finetune.report.table import Table


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [row(), row(repeat=1, status="oom", reason="out of memory")]
    for one in written:
        append(tmp_path, one)
    assert read_rows(tmp_path) == read_rows(tmp_path / "results.jsonl") == written


def test_a_torn_line_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    append(tmp_path, row())
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"cell": "wide-ddp-2x8", "mod')
    assert read_rows(tmp_path) == [row()]
    append(tmp_path, row(repeat=1))
    assert read_rows(tmp_path) == [row(), row(repeat=1)]


def test_keys_of_a_later_version_are_left_out_and_other_files_refused(tmp_path: Path) -> None:
    append(tmp_path, row())
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "red"}) + "\n")
    assert read_rows(tmp_path) == [row()]
    path.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(RequestError, match=r"results.jsonl:1: is not a benchmark result"):
        read_rows(tmp_path)
    with pytest.raises(RequestError, match="cannot be read"):
        read_rows(tmp_path / "nowhere")
    (tmp_path / "docs").mkdir()
    with pytest.raises(RequestError, match=r"docs: holds no benchmark \(no results.jsonl\)"):
        read_rows(tmp_path / "docs")


def repeats(*seconds: float, cell: str = "wide-ddp-2x8") -> list[Row]:
    return [row(cell, repeat, one) for repeat, one in enumerate(seconds)]


def test_the_interval_is_welchs_on_logarithms() -> None:
    found = ratio(repeats(1.0, 1.1, 1.2), repeats(0.5, 0.6), lambda one: one.median_seconds)
    # Worked out by scipy.stats.ttest_ind(log(new), log(old), equal_var=False).confidence_interval(0.95).
    from scipy import stats

    expected = stats.ttest_ind([math.log(x) for x in (1.0, 1.1, 1.2)], [math.log(x) for x in (0.5, 0.6)],
                               equal_var=False).confidence_interval(0.95)  # fmt: skip
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert found.value == pytest.approx((1.0 * 1.1 * 1.2) ** (1 / 3) / (0.5 * 0.6) ** 0.5)


@pytest.mark.parametrize(
    ("new", "old", "is_worse"),
    [
        ((1.2, 1.21, 1.22), (1.0, 1.01, 1.02), True),
        ((1.0, 1.01, 1.02), (1.2, 1.21, 1.22), False),
        ((1.2, 0.9, 1.6), (1.0, 1.01, 1.02), False),  # slower in the mean, but the interval holds 1.05
        ((1.04, 1.041, 1.042), (1.0, 1.001, 1.002), False),  # surely slower, by less than the threshold
        ((2.0,), (1.0,), False),  # nobody knows how much repeats differ
        ((1.2, 1.2), (1.0, 1.0), True),
    ],
    ids=["slower", "faster", "noisy", "a little slower", "one repeat", "no scatter"],
)
def test_a_regression_is_past_the_threshold_with_its_whole_interval(
    new: tuple[float, ...], old: tuple[float, ...], is_worse: bool
) -> None:
    (change,) = compare(repeats(*new), repeats(*old))
    assert change.is_worse(0.05) == is_worse


def test_more_memory_is_a_regression_too() -> None:
    more = {"peak_bytes": [2**22, 2**22], "average_bytes": [1, 1]}
    new = [row(repeat=repeat, memory=more) for repeat in (0, 1)]
    (change,) = compare(new, repeats(0.1, 0.1))
    assert change.bytes is not None
    assert change.bytes.value == 2.0
    assert change.is_worse(0.05)


def test_what_ran_and_no_longer_does_is_a_regression() -> None:
    failed = row(status="crashed", reason="ValueError: no")
    (change,) = compare([failed], [row()])
    assert change.is_worse(0.05)
    assert change.why == "ran before, now crashed: ValueError: no"
    (mended,) = compare([row()], [failed])
    assert not mended.is_worse(0.05)
    new, gone = compare([row("wide-zero1-2x8")], [row()])
    assert (new.why, gone.why) == ("new", "not run this time")


def test_the_median_of_the_repeats_that_were_done_stands_for_a_cell() -> None:
    late = row(repeat=3, status="timeout", reason="late")
    ((_, _, milliseconds, *_),) = table.results([*repeats(0.3, 0.1, 0.2), late])
    assert milliseconds == "200.0"
    ((_, why, *_),) = table.results([late])
    assert why == "timeout: late"
    ((*_, loss),) = table.results([row(losses=[2.0, math.nan])])
    assert loss == ""  # and not that of a step before


def test_ratios_are_to_ddp_of_the_same_model_and_global_batch() -> None:
    rows = [row(), row("wide-zero1-2x8", seconds=0.2), row("wide-zero1-2x16", seconds=0.2, micro_batch=16)]
    lines = table.results(rows)
    column = table.HEADER.index("x DDP")
    assert [line[column] for line in lines] == ["1.00", "0.50", ""]
    assert all(len(line) == len(table.HEADER) for line in lines)


def test_published_figures_are_ratios_to_ddp_and_blank_where_there_is_no_number() -> None:
    assert published("wide", "zero1", 1, AVERAGE_MEMORY) == pytest.approx(1.17 / 2.39)
    assert published("wide", "ddp", 1, AVERAGE_MEMORY) == 1
    assert published("wide", "zero1", 1, THROUGHPUT) is None
    assert published("deep", "zero1", 1, THROUGHPUT) == 0.35
    assert published("gptlite", "pipeline", 8, THROUGHPUT) is published("resnet", "ddp", 1, THROUGHPUT) is None


def test_pipelines_that_were_published_without_ddp_are_ratios_to_fewer_stages() -> None:
    (found,) = [one for one in ratios(study()["figures"]) if one.layout == "pipeline"]
    assert (found.model, found.stages, found.by_stages, found.ratio) == ("gptlite", 8, 4, pytest.approx(8.1 / 10.9))


def test_pipelines_stand_beside_the_published_ones(tmp_path: Path) -> None:
    for stages, rate in ((4, 50.0), (8, 40.0)):
        changes = {"pipeline_parallel_size": stages, "accumulation": stages, "samples_per_second": rate}
        append(tmp_path, row(f"gptlite-pipeline{stages}-8x8", layout="pipeline", world_size=8, **changes))
    (section,) = [one for one in bench_sections(read_bench(tmp_path, "bench")) if one.title.startswith("Published")]
    (found,) = [block.value for block in section.blocks if isinstance(block.value, Table)]
    assert ("gptlite", "pipeline, 8 stages", "throughput, relative to 4 stages", "0.74", "0.80", "1.08x") in found.rows
    assert {cells[4] for cells in found.rows} == {"", "0.80"}


def test_ddp_that_computes_activations_again_is_not_the_base() -> None:
    rows = [row("wide-ddp-2x8-c1", seconds=0.4, checkpoint_interval=1), row("wide-ddp-2x8", seconds=0.2),
            row("wide-zero1-2x8")]  # fmt: skip
    column = table.HEADER.index("x DDP")
    assert [line[column] for line in table.results(rows)] == ["0.50", "1.00", "2.00"]


def test_the_ratio_to_ddp_is_that_of_the_page(tmp_path: Path) -> None:
    for one in (*repeats(0.1, 0.2, 0.4), *repeats(0.2, 0.2, 0.2, cell="wide-zero1-2x8")):
        append(tmp_path, one)
    told = table.results(read_rows(tmp_path))[1][table.HEADER.index("x DDP")]
    bench = read_bench(tmp_path, "bench")
    assert told == f"{bench.rate_to_ddp(bench.cells[1]):.2f}" == "1.00"  # of 0.5, 1 and 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step_seconds": []}, "it is done, but step_seconds is []"),
        ({"step_seconds": [0.1, 0.0]}, "it is done, but step_seconds is [0.1, 0.0]"),
        ({"step_seconds": [0.1, math.nan]}, "it is done, but step_seconds is [0.1, nan]"),
        ({"step_seconds": "fast"}, "step_seconds is 'fast'"),
        ({"samples_per_second": None}, "it is done, but samples_per_second is [None]"),
        ({"memory": {}}, "it is done, but memory.peak_bytes is None"),
        ({"memory": None}, "memory is None"),
        ({"memory": {"peak_bytes": [1], "average_bytes": []}}, "it is done, but memory.average_bytes is []"),
        ({"memory": {"peak_bytes": [math.inf], "average_bytes": [1]}}, "it is done, but memory.peak_bytes is [inf]"),
        ({"losses": ["low"]}, "it is done, but losses is ['low']"),
        ({"machine": None}, "machine is None"),
        ({"planned": [1]}, "planned is [1]"),
        ({"started": 5}, "started is 5"),
        ({"cell": ["a"]}, "cell is ['a']"),
        ({"repeat": "first"}, "repeat is 'first'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_row_with_values_of_another_kind_or_without_figures_is_refused_with_its_line(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    append(tmp_path, row())
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps({**asdict(row(repeat=1)), **changes}) + "\n")
    with pytest.raises(RequestError, match=re.escape(f"results.jsonl:2: is not a benchmark result ({said})")):
        read_rows(tmp_path)


def test_the_notes_name_every_machine_on_which_rows_were_measured() -> None:
    on_gpu = {"machine": {"gpus": ["NVIDIA H200"]}, "versions": {"torch": "3"}}
    said = table.notes([row(), row(repeat=1), row("wide-zero1-2x8", **on_gpu)])[0]
    assert said.startswith("P, 2 core(s); torch 2, deepspeed None | NVIDIA H200; torch 3, deepspeed None; 2026-01-02;")


def test_zeros_divide_nothing(tmp_path: Path) -> None:
    nothing = {"peak_bytes": [0], "average_bytes": [0]}
    rows = [row(losses=[0.0, 2.0], memory=nothing), row("wide-zero1-2x8", losses=[0.0, 1.0], memory=nothing)]
    assert [line[table.HEADER.index("average") + 1] for line in table.results(rows)] == ["", ""]
    assert table.losses_apart(rows) == 0.5
    assert math.isnan(table.losses_apart([row(losses=[math.nan]), row("wide-zero1-2x8", losses=[1.0])]))
    (found, _) = compare(rows, rows)
    assert found.bytes is None
    assert found.seconds is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": 0.5}, "not compared: scale is 0.5, and was 0.25"),
        ({"model_sha256": "b"}, "not compared: the model's sizes differ"),
        ({"global_batch": 32}, "not compared: global_batch is 32, and was 16"),
        ({"steps": 9, "scale": None}, "not compared: scale is None, and was 0.25, steps is 9, and was 5"),
    ],
    ids=str,
)
def test_other_work_is_not_compared(changes: dict[str, Any], said: str) -> None:
    before = {"scale": 0.25, "model_sha256": "a", "global_batch": 16, "steps": 5}
    old = [row(repeat=repeat, **before) for repeat in range(2)]
    new = [row(repeat=repeat, seconds=9.0, **{**before, **changes}) for repeat in range(2)]
    (found,) = compare(new, old)
    assert (found.why, found.seconds, found.is_worse(0.05)) == (said, None, False)
    (same,) = compare(old, old)
    assert (same.why, same.is_undecided) == (None, False)


def test_losses_are_compared_among_layouts_that_train_the_same() -> None:
    same = [row(losses=[2.0, 1.0]), row("wide-zero1-2x8", losses=[2.02, 1.0]), row("deep-ddp-2x8", losses=[9.0, 9.0])]
    assert table.losses_apart(same) == pytest.approx(0.02 / 2.02)


def test_nothing_is_said_of_losses_that_were_not_compared() -> None:
    alone = [row(), row(repeat=1), row("deep-ddp-2x8"), row("wide-zero1-2x8", status="oom", reason="full")]
    assert table.losses_apart(alone) is None
    assert not any("losses" in note for note in table.notes(alone))
    nobody = table.notes([row(status="oom", reason="full")])
    assert not any("by nobody" in note or "losses" in note for note in nobody)
    assert any("losses" in note for note in table.notes([*alone, row("wide-zero2-2x8")]))


def test_markdown_holds_every_cell_and_keeps_its_columns(tmp_path: Path) -> None:
    rows = [row(), row("wide-zero3-2x8", status="crashed", reason="a | b\n<b> é")]
    text = table.write_markdown(tmp_path, rows).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert "crashed: a \\| b \\<b\\> é |" in lines[-1]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(table.HEADER) + 1}
    assert "brunomaga.github.io" in text
