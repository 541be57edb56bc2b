"""benchmarks/gpu.py where there is no GPU: what it starts, how it goes on, what its pages say. Its parts are stood in
for."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import async_save
import gpu
import kernel_losses
import post_training
import pytest
from conftest import REPO
from gpu import PARTS, Part

from finetune.cli import main as finetune
from finetune.errors import RequestError
from finetune.plan.model import model_of

GOOD = Part("good", "It counts its starts.", ("-c", "open('OUT/starts', 'a').write('x'); print('9%|\\rfigures')"), 1)
BAD = Part("bad", "It fails.", ("-c", "raise ValueError('no such layer in OUT')"), 1)
LATE = Part("late", "It sleeps.", ("-c", "import time; print('asleep', flush=True); time.sleep(60)"), 0.05)
SILENT = Part("silent", "It writes nothing.", ("-c", "pass"), 1, ("silent.json", "silent.md"))
# Sleeps at its first start, and says so; at the second it is done at once.
KILLED = """
import os, pathlib, sys, time
import gpu
from gpu import Part
gpu.gpu_names, gpu.driver_version = lambda: ["A GPU"], lambda: "1"
mark = "import os, pathlib, time; p = pathlib.Path('OUT/pid'); old = p.exists(); p.write_text(str(os.getpid())); "
parts = (Part("good", "", ("-c", "open('OUT/starts', 'a').write('x')"), 1),
         Part("long", "", ("-c", mark + "time.sleep(0 if old else 300)"), 5))
sys.exit(gpu.main(sys.argv[1:], parts))
"""


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(gpu, "gpu_names", lambda: ["A GPU"])
    monkeypatch.setattr(gpu, "driver_version", lambda: "1.2")


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads((folder / "gpu.json").read_text())["parts"])


def start(folder: Path, *words: str, parts: tuple[Part, ...]) -> int:
    return gpu.main(["--out", str(folder), *words], parts)


def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    env = {**os.environ, "PATH": "", "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "benchmarks/gpu.py"], cwd=REPO, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: nvidia-smi lists no GPU, but this benchmark needs one. --list shows what it would run."
    ]


def test_the_list_needs_neither_a_gpu_nor_torch() -> None:
    code = "import gpu, sys; gpu.main(['--list']); sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PATH": "", "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'benchmarks'}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(part.name in done.stdout for part in PARTS)


def test_a_part_that_fails_or_is_late_stops_no_other(tmp_path: Path) -> None:
    assert start(tmp_path, parts=(BAD, LATE, SILENT, GOOD)) == 1
    found = rows(tmp_path)
    assert [row["status"] for row in found.values()] == ["crashed", "timeout", "crashed", "done"]
    assert found["bad"]["reason"] == "ValueError: no such layer in OUT"  # and not where that is
    assert found["late"]["seconds"] < 30
    assert found["late"]["said"] == ["asleep"]
    assert found["silent"]["reason"] == "it succeeded, but did not write silent.json, silent.md"
    assert found["good"]["said"] == ["figures"]
    assert str(tmp_path) not in (tmp_path / "gpu.json").read_text()
    assert (tmp_path / "gpu.md").read_text() == gpu.page({"parts": found})


def test_a_file_of_an_earlier_start_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    for name in SILENT.files:
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1, 1))
    assert start(tmp_path, parts=(SILENT,)) == 1


def test_a_second_start_runs_only_what_is_new_or_asked_for_again(tmp_path: Path) -> None:
    assert start(tmp_path, parts=(GOOD,)) == 0
    assert start(tmp_path, parts=(GOOD, BAD)) == 1
    assert start(tmp_path, parts=(GOOD, BAD)) == 0  # what failed is a result, too
    assert (tmp_path / "starts").read_text() == "x"
    assert start(tmp_path, "--again", "good", parts=(GOOD, BAD)) == 0
    assert (tmp_path / "starts").read_text() == "xx"
    assert list(rows(tmp_path)) == ["good", "bad"]
    with pytest.raises(SystemExit):
        start(tmp_path, "--again", "godo", parts=(GOOD, BAD))


def test_no_part_is_started_that_might_end_too_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = Part("long", "", GOOD.command, 7)
    assert start(tmp_path, "--minutes", "3", parts=(long, GOOD)) == 0
    assert list(rows(tmp_path)) == ["good"]
    assert "long: left for another start; it may take 7 minutes, 3.0 are left" in capsys.readouterr().out


def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'benchmarks'}"}
    pid = out / "pid"
    with subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while not (pid.is_file() and pid.read_text()):
            assert time.monotonic() < end, "the long part has not begun"
            time.sleep(0.1)
        process.kill()
    os.kill(int(pid.read_text()), signal.SIGKILL)  # nobody was left to end it
    assert {name: row["status"] for name, row in rows(out).items()} == {"good": "done"}
    assert subprocess.run(command, cwd=REPO, env=env, stdout=subprocess.DEVNULL).returncode == 0
    assert {name: row["status"] for name, row in rows(out).items()} == {"good": "done", "long": "done"}
    assert (out / "starts").read_text() == "x"


class UnderstoodError(Exception):
    """The command line was understood."""


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_command_takes_the_flags_that_it_is_given(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    understand = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> None:
        raise UnderstoodError(understand(self, *given))

    script, *words = part.command
    if script == "-m":
        script, *words = words
        main = finetune
        assert script == finetune.__module__
    else:
        assert (REPO / script).is_file()
        main = importlib.import_module(Path(script).stem).main
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(UnderstoodError):
        main()


def test_parts_have_names_of_their_own_and_fit_into_a_command_of_ten_minutes() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS) > 9
    assert max(part.minutes for part in PARTS) <= 9


def test_the_large_llama_has_as_many_parameters_as_the_published_one() -> None:
    assert model_of({"model_type": "llama", **post_training.SHAPES["8b"]}, "8b", None).parameters == 8_030_261_248


def test_the_page_links_to_the_pages_of_what_is_done_and_says_why_what_is_not() -> None:
    row = {"command": "python x.py", "what": "Speed.", "seconds": 61.0, "gpu": "A GPU", "driver": "1", "said": [],
           "versions": {"torch": "2"}, "date": "2026-01-01", "files": ["x_gpu.json", "x_gpu.md"]}  # fmt: skip
    done = {**row, "status": "done", "reason": None}
    late = {**row, "status": "timeout", "reason": "not done after 60 s", "said": ["step 3"]}
    page = gpu.page({"parts": {"one": done, "two": late}})
    assert "| one | Speed. | done | 61 | [x_gpu](x_gpu.md) |" in page
    assert "| two | Speed. | timeout | 61 | - |" in page
    assert "Status `timeout`: not done after 60 s\n\n```\nstep 3\n```" in page
    assert "A GPU, driver 1; torch 2; 2026-01-01." in page


def test_pages_of_a_gpu_say_nothing_of_cpus() -> None:
    times = dict.fromkeys(async_save.MODES, 0.5)
    saves = {"versions": {"torch": "2"}, "repeats": 1, "machine": "A GPU"}
    saves["rows"] = [
        {
            "parameters": 10**8,
            "layout": "plain",
            "turn": 0,
            "copied_bytes": 2**20,
            "bytes": 2**21,
            "steps_during": 3,
            **times,
        }
    ]
    page = async_save.render(saves)
    assert "one rank on A GPU" in page
    assert "CPU" not in page
    assert "Kills" not in page
    figures = {"step_seconds": 1.0, "bytes": 1.0, "rows": 10}
    setting = dict.fromkeys(("command", "machine", "versions", "model", "block_size", "batch", "steps"), "")
    turns = [{"lora": dict.fromkeys(post_training.IMPORTS, figures)}]
    assert "does not show" not in post_training.render({"setting": {**setting, "on_gpu": True}, "turns": turns})


def test_the_page_of_kernels_shows_how_far_apart_losses_are_and_what_was_refused() -> None:
    base = {"loss": [2.0, 1.0], "grad_norm": [1.0, 1.0], "step_seconds": [1.0] * 4}
    runs = {"eager": base, "sdpa": {**base, "loss": [2.0, 1.5]}, "Liger": {"refused": "error: no liger-kernel"}}
    page = kernel_losses.page({"setting": "", "runs": runs})
    assert "| sdpa | 5.0e-01 | 0.0e+00 | 1000.0 |" in page
    assert "| Liger | error: no liger-kernel | - | - |" in page


def test_a_request_without_a_gpu_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "gpu_names", list)
    with pytest.raises(RequestError):
        start(tmp_path / "out", parts=(GOOD,))
    assert not (tmp_path / "out").exists()
