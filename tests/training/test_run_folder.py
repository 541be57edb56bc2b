"""Records without secrets, predictions in order, and pages that hostile names cannot break."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from asked import run_of
from transformers import TrainerState

from finetune.data.columns import Labels
from finetune.entry.main import resolve_here
from finetune.errors import RequestError, RunError
from finetune.models.gptlite import GPTLiteConfig
from finetune.report.charts import confusion_picture
from finetune.report.png import write_png
from finetune.report.run_curves import training_curves
from finetune.report.run_folder import read_run
from finetune.report.shapes import WIDE, Box, Picture
from finetune.run.engine import deepspeed_config_of
from finetune.run.files import FAILURE, LOCK
from finetune.run.launch import Launch
from finetune.run.parse import Setting
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.run import Run
from finetune.training import run_folder, runtime
from finetune.training.checkpoints.lock import lock_run_folder
from finetune.training.model_card import Card, model_card, write_card
from finetune.training.results import write_predictions
from finetune.training.run_folder import (
    MetricsFile,
    command_line,
    explained_disk_errors,
    kept_failure,
    open_output_dir,
    read_metrics,
    write_records,
    write_whole,
)
from finetune.training.runtime import choose_precision


def test_no_secret_reaches_the_records(tmp_path: Path) -> None:
    argv = ["--hub_token", "hf_CANARY1", "--push_to_hub_token=hf_CANARY2", "--max_steps", "3", "--local_rank=0"]
    kept = {"hub_token": "hf_CANARY1", "max_steps": 3, "push_to_hub_token": "x", "overwrite_output_dir": True}
    settings = {name: Setting(value, "test") for name, value in kept.items()}
    write_records(tmp_path, Run(SEQ_CLS, Launch(), tuple(argv), settings))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "CANARY" not in written
    assert command_line(argv, Launch()).endswith("--hub_token '***' '--push_to_hub_token=***' --max_steps 3")
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()) == {"recipe": "seq_cls", "max_steps": 3}


@pytest.mark.parametrize("words", [["--deepspeed_config", "zero2"], ["--deepspeed", "--deepspeed_config", "zero2"]])
def test_a_config_by_its_longer_flag_can_be_run_again_from_the_record(words: list[str], tmp_path: Path) -> None:
    write_records(tmp_path, resolve_here(SEQ_CLS, [*words, "--output_dir", str(tmp_path / "run")], Launch()))
    again = resolve_here(SEQ_CLS, ["--config", str(tmp_path / "recipe.yaml")], Launch())
    assert deepspeed_config_of(again) == "zero2"


def test_deepspeed_that_is_switched_off_stays_off(tmp_path: Path) -> None:
    launch = Launch(0, 0, 2, 2, "deepspeed")
    words = ["--deepspeed_config", "none", "--output_dir", str(tmp_path / "run")]
    write_records(tmp_path, resolve_here(SEQ_CLS, words, launch))
    assert deepspeed_config_of(resolve_here(SEQ_CLS, ["--config", str(tmp_path / "recipe.yaml")], launch)) is None


@pytest.mark.parametrize(
    ("launch", "start"),
    [
        (Launch(), "python "),
        (Launch(0, 0, 4, 2, "deepspeed"), "deepspeed --num_gpus 2 "),
        (Launch(0, 0, 2, 2, "torchrun"), "torchrun --nproc_per_node 2 "),
        (Launch(0, 0, 4, 2, "accelerate"), "accelerate launch --num_processes 4 "),
    ],
)
def test_the_recorded_command_can_be_run_again(launch: Launch, start: str) -> None:
    assert command_line(["--max_steps", "3"], launch).startswith(start)


def test_predictions_have_probabilities_that_add_up(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    write_predictions(path, np.array([[0.0, 2.0], [3.0, 0.0]]), Labels("classification", ("no", "yes")), [1, 0], [0, 2])
    rows = list(csv.DictReader(path.open()))
    assert [row["index"] for row in rows] == ["0", "2"]
    assert [row["prediction"] for row in rows] == [row["label"] for row in rows] == ["yes", "no"]
    assert all(
        float(row["probability_no"]) + float(row["probability_yes"]) == pytest.approx(1, abs=1e-5) for row in rows
    )
    write_predictions(path, np.array([[0.5], [1.5]]), Labels("regression", ()), None, [0, 1])
    assert path.read_text().splitlines() == ["index,prediction", "0,0.5", "1,1.5"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device"),
        RuntimeError(f"rank 1: {OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))}"),
    ],
)
def test_a_full_disk_is_told_from_other_errors(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is full"), explained_disk_errors(tmp_path):
        raise error
    with pytest.raises(KeyError), explained_disk_errors(tmp_path):
        raise KeyError("something else")


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (RunError("no space for hf_" + 30 * "x"), "no space for ***"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_a_run_folder_keeps_why_its_last_start_failed(error: BaseException, kept: str, tmp_path: Path) -> None:
    for one in (error, RunError("which failed because the first did")):
        with pytest.raises(type(one)), kept_failure(tmp_path):
            raise one
    assert json.loads((tmp_path / FAILURE).read_text()) == {"rank": 0, "error": kept}
    assert f"Its last start ended with: {kept}" in read_run(tmp_path, "run").notes
    open_output_dir(run_of("--output_dir", str(tmp_path), "--resume", "allow"))
    assert not (tmp_path / FAILURE).exists(), "a new start forgets it"
    with pytest.raises(KeyError), kept_failure(tmp_path / "gone"):
        raise KeyError("x")


def test_a_run_folder_that_somebody_has_deleted_is_said_to_be_gone(tmp_path: Path) -> None:
    gone = tmp_path / "run"
    with (
        pytest.raises(RunError, match="run is gone: it was deleted"),
        explained_disk_errors(gone),
    ):
        (gone / "metrics.jsonl").open("a")


def test_a_run_that_logs_locks_its_folder_again_if_the_lock_was_deleted(tmp_path: Path) -> None:
    assert lock_run_folder(tmp_path, "a test") is None
    (tmp_path / LOCK).unlink()
    MetricsFile().on_log(SimpleNamespace(output_dir=tmp_path), TrainerState(), None, {"loss": 1.0})
    assert (tmp_path / LOCK).is_file()


@pytest.mark.parametrize("words", ["[enforce fail at inline_container.cc:595]", "basic_ios::clear: iostream error"])
def test_torchs_words_mean_a_full_disk_only_where_it_is_full(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"basic_ios|inline"), explained_disk_errors(tmp_path):
        raise RuntimeError(words)
    monkeypatch.setattr(run_folder, "FULL_DISK_BYTES", 2**60)
    with pytest.raises(RunError, match="is full"), explained_disk_errors(tmp_path):
        raise RuntimeError(words)


def test_two_that_write_one_file_at_once_leave_it_whole_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept"

    def slow(file: Any) -> None:
        file.write(b"slow")
        write_whole(path, lambda other: other.write(b"fast"))
        assert path.read_bytes() == b"fast"

    write_whole(path, slow)
    assert path.read_bytes() == b"slow"

    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(path, full)
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_the_model_card_survives_hostile_names() -> None:
    hostile = "a|b</td><script>alert(1)</script>\n# title"
    environment = {"command": "python x ```\n# y", "packages": {"torch": "2.13"}}
    card = Card(
        task="text classification",
        pipeline_tag="text-classification",
        model=hostile,
        base_model=None,
        recipe="r.py",
        source=hostile,
        table=[("split", "rows"), ("train", hostile)],
        facts=[hostile],
        pictures=[],
        use="print()",
    )
    card = model_card(card, {"eval_accuracy": 0.5, "peaks": [1, 2]}, environment)
    front, body = card.split("---\n")[1:3]
    assert yaml.safe_load(front)["pipeline_tag"] == "text-classification"
    assert "<script" not in body.replace("\\<script", "")
    assert "\n# " not in body
    assert "| eval_accuracy | 0.5 |" in body


@pytest.mark.parametrize(
    "resumed",
    [
        "",
        " --resume auto",
        " --resume=auto",
        " '--resume=my runs/checkpoint-2'",
        " --resume 'my runs/checkpoint-2' --resume_changed seed max_steps",
    ],
)
def test_the_card_of_a_resumed_run_says_how_to_begin_it_anew(resumed: str) -> None:
    environment = {"command": f"python r.py --seed 1{resumed} '--text_column=my text' --output_dir run", "packages": {}}
    card = Card(task="text", pipeline_tag="text-generation", table=[("split",)], facts=[], pictures=[], use="print()")
    assert "```\npython r.py --seed 1 '--text_column=my text' --output_dir run\n```" in model_card(
        card, {}, environment
    )


@pytest.mark.parametrize(
    ("kind", "is_own"), [(GPTLiteConfig.model_type, True), ("mixtral", False), ("of_its_own_code", False)]
)
@pytest.mark.parametrize("with_deepspeed", [True, False])
def test_a_card_names_only_what_the_run_had(kind: str, is_own: bool, with_deepspeed: bool, tmp_path: Path) -> None:
    source = SimpleNamespace(description="a model", hub_id=None, config=SimpleNamespace(model_type=kind))
    (tmp_path / "environment.json").write_text('{"command": "python x", "packages": {}}')
    if with_deepspeed:
        (tmp_path / "ds_config.json").write_text("{}")
    session: Any = SimpleNamespace(folder=tmp_path, run=run_of())
    card = Card(
        task="language modelling",
        pipeline_tag="text-generation",
        table=[("split",)],
        facts=[],
        pictures=[],
        use="print()",
    )
    write_card(session, source, SimpleNamespace(source="built-in data"), card)
    text = (tmp_path / "README.md").read_text()
    tags = yaml.safe_load(text.split("---\n")[1])["tags"]
    assert ("deepspeed" in tags, "ds_config.json" in text) == (with_deepspeed, with_deepspeed)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    known = "import finetune.models.gptlite  # makes the model known to transformers\n"
    assert code == known * is_own + "print()\n"


def confusion_of(names: list[str]) -> Picture:
    counts = np.eye(len(names), dtype=int).tolist()
    picture = confusion_picture({"labels": names, "counts": counts}, WIDE, len(names))
    assert picture is not None
    return picture


def test_pictures_are_drawn_for_one_class_and_for_many(tmp_path: Path) -> None:
    many = [f"a long label number {i}" for i in range(40)], [str(i) for i in range(1500)]
    for number, names in enumerate((["only"], *many)):
        picture = confusion_of(names)
        boxes = [shape for shape in picture.shapes if isinstance(shape, Box)]
        assert len(boxes) == 1 + len(names)  # the ground, and what is right
        assert all(box.x + box.width <= WIDE and box.y + box.height <= picture.height for box in boxes)
        write_png(tmp_path / f"{number}.png", [picture])
        assert (tmp_path / f"{number}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_training_curve_has_the_loss_and_what_was_evaluated_more_than_once(tmp_path: Path) -> None:
    assert training_curves([], "eval_accuracy") == []
    rows = [{"step": step, "loss": 1.0 / step, "eval_accuracy": 0.1 * step} for step in (1, 2)]
    assert [picture.title for picture in training_curves(rows, "eval_accuracy")] == [
        "Loss", "Accuracy of the evaluation"
    ]  # fmt: skip
    write_png(tmp_path / "curve.png", training_curves(rows[:1], "eval_accuracy"))
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx512f amx_bf16 amx_tile", "bf16"),
        ("fpu avx512_bf16", "bf16"),
        ("fpu avx512f avx2", "fp32"),
        ("", "fp32"),
    ],
)
def test_bf16_on_a_cpu_only_where_it_is_faster(flags: str, expected: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nflags\t\t: {flags}\n")
    assert choose_precision(False, cpuinfo) == expected
    assert choose_precision(False, tmp_path / "none") == "fp32"


@pytest.mark.parametrize(
    ("bf16", "fp16", "fastest", "said"),
    [
        (True, False, "bf16", "bf16"),
        (True, False, "fp32", "bf16, which this CPU emulates (fp32 is faster)"),
        (False, True, "fp32", "fp16"),
        (False, False, "bf16", "fp32"),
    ],
)
def test_the_opening_line_says_if_the_cpu_emulates_bf16(
    bf16: bool, fp16: bool, fastest: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "choose_precision", lambda has_cuda: "bf16" if has_cuda else fastest)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.precision_words(bf16, fp16) == said


def test_json_never_holds_nan(tmp_path: Path) -> None:
    from finetune.training.run_folder import write_json

    write_json(tmp_path / "a.json", {"a": float("nan"), "b": [float("inf"), 1.0]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None, "b": [None, 1.0]}


def test_a_run_in_fp32_is_not_trained_in_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer takes accelerate's variable where neither --bf16 nor --fp16 is on (5.23, training_args.py)."""
    from finetune.training import start

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    in_fp32 = Run(SEQ_CLS, Launch(), (), {"bf16": Setting(False, "command line")})
    assert start.choose_precision(in_fp32, False, None) == {"bf16": False, "fp16": False}
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert start.choose_precision(Run(SEQ_CLS, Launch(), (), {}), False, None) == {"bf16": True, "fp16": False}
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize("by_accelerate", [False, True])
def test_fp16_is_refused_on_a_cpu_where_it_would_be_fp32(by_accelerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.training import start

    given = {} if by_accelerate else {"fp16": Setting(True, "command line")}
    if by_accelerate:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    run = Run(SEQ_CLS, Launch(launcher="accelerate" if by_accelerate else "python"), (), given)
    assert start.choose_precision(run, True, None)["fp16"]
    with pytest.raises(RequestError, match=r"fp16 is on .*does not train on a CPU"):
        start.choose_precision(run, False, None)


def test_an_evaluation_that_was_logged_before_a_kill_at_the_end_is_not_logged_twice(tmp_path: Path) -> None:
    args, state = SimpleNamespace(output_dir=str(tmp_path)), TrainerState(max_steps=4, is_world_process_zero=True)
    trained, other = {"loss": 1.5}, {"eval_loss": 1.0, "eval_runtime": 0.3}
    at_end = {"eval_loss": 0.5, "eval_runtime": 0.1}

    def run(resumed_at: int, *logs: tuple[int, dict[str, float]]) -> list[tuple[int, str]]:
        state.global_step = resumed_at
        (callback := MetricsFile()).on_train_begin(args, state, None)
        for state.global_step, row in logs:
            callback.on_log(args, state, None, row)
        return [(row["step"], next(name for name in row if "loss" in name)) for row in read_metrics(tmp_path)]

    uncut = run(0, (2, trained), (2, at_end), (4, trained), (4, at_end))
    assert uncut == [(2, "loss"), (2, "eval_loss"), (4, "loss"), (4, "eval_loss")]
    assert run(4, (4, at_end | {"eval_runtime": 0.2})) == uncut
    assert run(4, (4, at_end | {"eval_loss": 0.5000001})) == uncut, "at another number of ranks"
    assert run(2, (4, trained), (4, at_end)) == uncut, "before the end all comes anew"
    assert run(4, (4, other)) == [*uncut, (4, "eval_loss")], "of other weights, such as the best"
