"""In which order cells are run, what is made of their ends, and what is run again; the launcher is stood in for."""

from __future__ import annotations

import json
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
    content = {"scale": 0.02, "repeats": 2, "timeout_seconds": 1, "grid": [block]}
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
        bench = Bench(bench_of(folder, repeats=1).grid, folder / status, None, folder / "grid.yaml")
        rows = ran(bench)
        assert [row.status for row in rows] == ["done", status, "done"]
        assert rows[1].reason
        assert not (folder / status / "work").exists()
        assert (folder / status / str(rows[1].log)).is_file()


def test_a_run_that_left_no_figures_has_crashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"none": "true"})
    (row,) = ran(bench_of(folder, repeats=1), only="none")
    assert (row.status, row.step_seconds) == ("crashed", [])
    assert "rank-0.json" in str(row.reason)


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
    with pytest.raises(RequestError, match="something that is no benchmark"):
        bench_of(folder).open(resume=False)


def test_a_name_that_no_cell_has_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"--only zero9: no cell has such a name. There are wide-none-1x4,"):
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
