"""In which order cells are run, what is made of their ends, and what is run again; the launcher is stood in for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.bench import runner
from finetune.bench.grid import read_grid
from finetune.bench.result import Row, read_rows
from finetune.bench.runner import Bench
from finetune.cli import main
from finetune.errors import RequestError

FIGURES = {"seconds": [0.1, 0.3, 0.2], "losses": [2.5, 2.4], "parameters": 10, "peak_bytes": 9, "average_bytes": 5,
           "rss_peak_bytes": 99, "by_kind": {"parameters": 4}, "measured_by": "bytes of tensors"}  # fmt: skip
GOOD = f"for rank in 0 1; do echo '{json.dumps(FIGURES)}' > $0/rank-$rank.json; done"
ENDS = {
    "oom": "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried'; exit 1",
    "unsupported": "echo 'error: zeropp.json: no such kernel'; exit 2",
    "crashed": "echo '[rank1]: ValueError: no such layer'; exit 1",
    "timeout": "sleep 60",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    block = {"models": "wide", "layouts": ["none", "zero1", "zero2"], "world_sizes": 2, "micro_batches": 4}
    content = {"scale": 0.02, "repeats": 2, "grid": [block]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def bench_of(folder: Path, **asked: Any) -> Bench:
    return Bench(read_grid(str(folder / "grid.yaml"), **asked), folder / "out", None, folder / "grid.yaml")


def stand_in(monkeypatch: pytest.MonkeyPatch, codes: dict[str, str] | None = None) -> None:
    """Shell code by layout, in place of the launcher; `$0` is the folder for the figures."""

    def command(cell: Any, grid: Any, work: Path, on_cpu: bool) -> list[str]:
        return ["sh", "-c", (codes or {}).get(cell.layout, GOOD), str(work)]

    monkeypatch.setattr(runner, "command_of", command)


def ran(bench: Bench, resume: bool = False, only: str | None = None) -> list[Row]:
    bench.open(resume)
    return list(bench.run(only))


def test_repeats_are_interleaved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    rows = ran(bench_of(folder))
    cells = ["wide-none-1x4", "wide-zero1-2x4", "wide-zero2-2x4"]
    assert [(row.repeat, row.cell) for row in rows] == [(repeat, cell) for repeat in (0, 1) for cell in cells]
    assert read_rows(folder / "out") == rows


def test_a_row_holds_what_was_measured_and_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    row = ran(bench_of(folder), only="zero1")[0]
    assert row.step_seconds == [0.1, 0.3, 0.2]
    assert row.samples_per_second == 8 / 0.2
    assert row.memory["peak_bytes"] == [9, 9]
    assert (row.tokens_per_second, row.status, row.log) == (None, "done", "logs/wide-zero1-2x4-r0.txt")
    assert row.versions["torch"]
    assert row.machine["cores"] > 0
    assert row.ds_config_sha256
    assert len(row.git_revision) >= 7


def test_whatever_becomes_of_a_cell_is_a_row_and_not_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, code in ENDS.items():
        stand_in(monkeypatch, {"zero1": code})
        grid = replace(bench_of(folder, repeats=1).grid, timeout_seconds=2 if status == "timeout" else 60)
        bench = Bench(grid, folder / status, None, folder / "grid.yaml")
        rows = ran(bench)
        assert rows[1].status == status
        assert rows[1].reason
        if status != "timeout":  # which may be too short for the others as well
            assert [row.status for row in rows] == ["done", status, "done"]
        assert not (folder / status / "work").exists()
        assert (folder / status / str(rows[1].log)).is_file()


def test_a_run_that_left_no_figures_has_crashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"none": "true"})
    (row,) = ran(bench_of(folder, repeats=1), only="none")
    assert (row.status, row.step_seconds) == ("crashed", [])
    assert "rank-0.json" in str(row.reason)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("echo '{\"seconds\": [0.1' > $0/rank-0.json", "JSONDecodeError"),
        (GOOD + "; echo '{\"seconds\": [0.1]}' > $0/rank-1.json", "ValueError: zip"),
        (GOOD.replace("[0.1, 0.3, 0.2]", "[]"), "StatisticsError"),
        (GOOD.replace("[0.1, 0.3, 0.2]", "[0.0]"), "ZeroDivisionError"),
        (GOOD.replace('"average_bytes"', '"mean"'), "KeyError: 'average_bytes'"),
    ],
    ids=["torn", "unequal", "empty", "nought", "other keys"],
)
def test_figures_that_cannot_be_used_are_not_the_end(
    left: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, {"zero1": left})
    rows = ran(bench_of(folder, repeats=1))
    assert [row.status for row in rows] == ["done", "crashed", "done"]
    assert said in str(rows[1].reason)
    assert read_rows(folder / "out") == rows


def test_a_launcher_that_is_not_there_is_no_figure_that_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "command_of", lambda *_: [str(folder / "no" / "deepspeed")])
    with pytest.raises(FileNotFoundError, match="no/deepspeed"):
        ran(bench_of(folder, repeats=1), only="zero1")


def test_rows_and_record_say_how_large_the_models_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    (row,) = ran(bench_of(folder, scale=0.03, repeats=1), only="zero1")
    assert (row.scale, row.global_batch, row.steps) == (0.03, 8, 5)
    record = json.loads((folder / "out" / "grid.json").read_text())
    assert (record["scale"], record["models"]["wide"]["config"]["width"]) == (0.03, 256)
    assert row.model_sha256 != bench_of(folder).grid.models["wide"].sha256


@pytest.mark.parametrize("killed_at", ["replace", "mkdir of logs"])
def test_a_folder_whose_making_was_killed_is_gone_on_with(
    killed_at: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        if killed_at == "replace":
            context.setattr(Path, "replace", killed)
        else:
            context.setattr(shutil, "copyfile", killed)
        with pytest.raises(KeyboardInterrupt):
            bench_of(folder).open(resume=False)
    stand_in(monkeypatch)
    assert len(ran(bench_of(folder), resume=True)) == 6
    assert (folder / "out" / "grid.yaml").is_file()


def test_resume_runs_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"zero1": ENDS["crashed"]})
    first = ran(bench_of(folder), only="none,zero1")
    assert len(first) == 4
    with pytest.raises(RequestError, match=r"holds a benchmark. --resume runs what is missing"):
        bench_of(folder).open(resume=False)
    rest = ran(bench_of(folder, repeats=3), resume=True)
    had = [(row.repeat, row.cell) for row in first]
    assert len(rest) == 5
    assert not set(had) & {(row.repeat, row.cell) for row in rest}


def test_resume_only_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", str(folder / "grid.yaml"), "--output_dir", str(folder / "out"), "--resume"]
    assert main(asked) == 2
    assert "holds no benchmark to continue. Leave --resume out" in capsys.readouterr().err
    assert not (folder / "out").exists()


@pytest.mark.parametrize("only", [None, "none,zero1"])
def test_ctrl_c_writes_what_is_there_and_says_how_to_go_on(
    only: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    real, calls = runner.run, list[int]()

    def interrupted(*asked: Any) -> int | None:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return real(*asked)

    grid, out = str(folder / "grid.yaml"), folder / "out"
    asked = ["bench", grid, "--output_dir", str(out), *(["--only", only] if only else [])]
    monkeypatch.setattr(runner, "run", interrupted)
    assert main(asked) == 130
    many = 6 if only is None else 4
    assert f"stopped; 1 of {many} launches done; the same command with --resume goes on" in capsys.readouterr().err
    assert all((out / name).is_file() for name in ("results.md", "report.html"))
    assert "Not run yet" in (out / "report.md").read_text()
    assert main([*asked, "--resume"]) == 130
    assert f"stopped; 1 of {many - 1} launches done; the same command goes on" in capsys.readouterr().err


def test_ctrl_c_before_any_row_writes_no_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    stand_in(monkeypatch)
    monkeypatch.setattr(runner, "run", interrupted)
    assert main(["bench", str(folder / "grid.yaml"), "--output_dir", str(folder / "out")]) == 130
    assert "stopped; 0 of 6 launches done" in capsys.readouterr().err
    assert not (folder / "out" / "results.md").exists()


def test_the_status_is_1_where_no_cell_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, {"zero1": ENDS["crashed"]})
    grid, out = str(folder / "grid.yaml"), str(folder / "out")
    assert main(["bench", grid, "--output_dir", out, "--only", "zero1"]) == 1
    assert "no cell was measured" in capsys.readouterr().err
    assert main(["bench", out]) == 1
    assert main(["bench", grid, "--output_dir", out, "--resume", "--only", "zero2"]) == 0


def test_a_folder_says_what_is_left_of_it_and_the_command_that_runs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    grid, out = str(folder / "grid.yaml"), str(folder / "out")
    assert main(["bench", grid, "--output_dir", out, "--scale", "0.03", "--repeats", "3", "--only", "zero1"]) == 0
    capsys.readouterr()
    with Path(out, "results.jsonl").open("a") as file:
        file.write('{"cell": "torn')
    assert main(["bench", out]) == 0
    said = capsys.readouterr().out
    assert "1 line of its results skipped: incomplete, after a kill" in said
    command = f"finetune bench {out}/grid.yaml --output_dir {out} --resume --scale 0.03 --repeats 3"
    assert f"6 of 9 launches have not run yet; `{command}` runs them" in said
    assert main(["bench", out, "--resume"]) == 2
    assert f"{out} has run, and is only shown. To go on: `{command}`." in capsys.readouterr().err
    assert main(command.split()[1:]) == 0
    capsys.readouterr()
    assert main(["bench", out]) == 0
    assert "not run yet" not in capsys.readouterr().out


def test_a_folder_that_is_no_bench_is_named_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "docs").mkdir()
    for asked in (["bench", str(folder / "docs")], ["bench", str(folder), "--compare", str(folder / "docs")]):
        assert main(asked) == 2
        assert "docs: holds no benchmark (no results.jsonl)." in capsys.readouterr().err


def test_an_interrupted_bench_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    bench = bench_of(folder)
    bench.open(resume=False)
    rows = bench.run(None)
    next(rows)

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(rows)
    assert len(read_rows(folder / "out")) == 1
    assert len(ran(bench_of(folder), resume=True)) == 5


def test_another_grid_is_not_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    bench_of(folder).open(resume=False)
    with pytest.raises(RequestError, match="holds another grid"):
        bench_of(folder, scale=0.03).open(resume=True)


def test_a_folder_of_something_else_is_left_alone(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").touch()
    with pytest.raises(RequestError, match="something other than a benchmark"):
        bench_of(folder).open(resume=False)


def test_a_name_that_no_cell_has_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"--only zero9: no cell matches. There are wide-none-1x4,"):
        bench_of(folder).due("zero9")


def test_the_command_shows_compares_and_tells_by_its_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    grid, out = str(folder / "grid.yaml"), str(folder / "out")
    assert main(["bench", grid, "--output_dir", out, "--dry_run"]) == 0
    assert "6 launches; nothing was started" in capsys.readouterr().out
    assert not Path(out).exists()
    assert main(["bench", grid, "--output_dir", out]) == 0
    assert all((folder / "out" / name).is_file() for name in ("results.md", "report.html", "report.md"))
    assert "[6/6] wide-zero2-2x4, repeat 1: 40.0 samples/s" in capsys.readouterr().out
    assert main(["bench", grid, "--output_dir", out]) == 2
    assert main(["bench", out, "--compare", out]) == 0
    slower = folder / "slower.jsonl"
    slower.write_text(Path(out, "results.jsonl").read_text().replace("0.1, 0.3, 0.2", "0.11, 0.33, 0.22"))
    assert main(["bench", str(slower), "--compare", out]) == 1
    assert "worse by more than 5%: wide-none-1x4" in capsys.readouterr().out
    assert main(["bench", str(slower), "--compare", out, "--threshold", "0.2"]) == 0


def test_flags_of_a_run_are_refused_where_results_are_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    ran(bench_of(folder, repeats=1))
    out = str(folder / "out")
    for flag in (["--dry_run"], ["--only", "zero1"], ["--repeats", "3"], ["--scale", "0.1"]):
        assert main(["bench", out, *flag]) == 2
        assert f"{flag[0]}: {out} has run, and is only shown" in capsys.readouterr().err


def test_one_repeat_decides_nothing_and_an_empty_benchmark_is_not_compared_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    ran(bench_of(folder, repeats=1))
    out, slower = str(folder / "out"), folder / "slower.jsonl"
    slower.write_text(Path(out, "results.jsonl").read_text().replace("0.1, 0.3, 0.2", "1.0, 3.0, 2.0"))
    assert main(["bench", str(slower), "--compare", out]) == 0
    said = capsys.readouterr().out
    assert "undecided: 3 cells have one repeat" in said
    assert "worse" not in said
    empty = folder / "empty.jsonl"
    empty.touch()
    assert main(["bench", out, "--compare", str(empty)]) == 2
    assert "it has no results yet" in capsys.readouterr().err
