"""Bad input ends a real run with one message, on one rank, with status 2, and nothing written."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import LAUNCHERS, RECIPE, TINY, flags, launch
from living import living

pytestmark = pytest.mark.usefixtures("built_ops")

GOOD_CSV = "text,label\n" + "".join(f"some words {i},{'a' if i % 2 else 'b'}\n" for i in range(40))


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


CASES = [
    pytest.param(lambda f: {"max_step": 3}, r"Did you mean --max_steps\?", id="flag"),
    pytest.param(lambda f: {"max_steps": "many"}, r"--max_steps is 'many'", id="value of a flag"),
    pytest.param(
        lambda f: {"config": write(f, "c.yaml", "learning_rat: 1")}, "Did you mean --learning_rate", id="YAML key"
    ),
    pytest.param(
        lambda f: {"config": write(f, "c.yaml", "a: [1")},
        r"c\.yaml:\d+:\d+: cannot be read as YAML: .*Check this line's",
        id="broken YAML",
    ),
    pytest.param(lambda f: {"train_file": f / "no.csv"}, r"no such file", id="missing file"),
    pytest.param(
        lambda f: {"train_file": write(f, "a.csv", GOOD_CSV), "label_column_name": "lable"},
        r"no column 'lable' .*text .*label",
        id="wrong column",
    ),
    pytest.param(
        lambda f: {"train_file": write(f, "a.csv", "text,label\na b,x\nc d,x\n")},
        "'x' in every row",
        id="one class only",
    ),
    pytest.param(
        lambda f: {
            "train_file": write(f, "a.csv", GOOD_CSV),
            "validation_file": write(f, "v.csv", "text,label\nwords,zzz\n"),
        },
        r"'zzz' \(1 rows\)",
        id="label in evaluation that is not in training",
    ),
    pytest.param(
        lambda f: {"deepspeed": write(f, "d.json", '{\n "a": 1,\n}')}, r"d\.json:\d:\d+: .*comma", id="unreadable JSON"
    ),
    pytest.param(
        lambda f: {"deepspeed": write(f, "d.json", '{"train_batch_size": 7, "gradient_clipping": "auto"}')},
        r"train_batch_size is 7, but .* 16 x 1 x 1 = 16",
        id="batch equation",
    ),
    pytest.param(lambda f: {"deepspeed": "zeropp"}, "needs a GPU", id="qwZ on a CPU"),
    pytest.param(
        lambda f: {"model_name_or_path": "distilbert-base-uncased"},
        r"distilbert-base-uncased: cannot be loaded; tried a folder of this name, .* and the hub .*Give a folder",
        id="hub model while offline",
    ),
    pytest.param(
        lambda f: {"dataset_name": "stanfordnlp/imdb"},
        r"imdb: not a local folder, .*--train_file",
        id="hub data offline",
    ),
    pytest.param(lambda f: {"model_name_or_path": f}, r"no config\.json; it holds", id="folder without a model"),
    pytest.param(lambda f: {"max_seq_length": 1}, "is 1 .*, but it must be 8 or more", id="too short"),
    pytest.param(lambda f: {"do_predict": True}, "--do_predict is True .* needs a test split", id="nothing to predict"),
    pytest.param(lambda f: {"report_to": "wandb"}, "WANDB_MODE=offline", id="wandb without a login"),
    pytest.param(lambda f: {"do_train": False}, "there is no trained model", id="evaluation of random weights"),
    pytest.param(
        lambda f: {"dataset_name": "org/data", "test_file": write(f, "t.csv", GOOD_CSV)},
        "--dataset_name is 'org/data' .*--test_file is .*Keep one",
        id="hub data and a file",
    ),
    pytest.param(
        lambda f: {"train_file": write(f, "a.csv", "text,stars,rating\na b,x,1\nc d,y,2\n")},
        r"cannot tell which column is the label.*--label_column_name",
        id="two columns named like labels",
    ),
    pytest.param(
        lambda f: {"deepspeed": "zero2_offload", "optim": "adafactor"}, "Drop --optim", id="optimizer under offload"
    ),
    pytest.param(
        lambda f: {"metric_for_best_model": "acuracy"},
        "acuracy.*the evaluations of this recipe report loss, accuracy",
        id="no such metric",
    ),
    pytest.param(
        lambda f: {"deepspeed": "zero2", "bf16": False, "bf16_full_eval": True},
        "--bf16_full_eval is True .*Add --bf16 True",
        id="evaluation in another precision",
    ),
    pytest.param(lambda f: {"num_train_epochs": -1}, "must be more than 0", id="no epochs"),
    pytest.param(lambda f: {"train_file": str(f)}, "is a folder", id="a folder as a file"),
    pytest.param(lambda f: {"resume": "auto"}, "holds no checkpoint", id="nothing to resume"),
]


@pytest.mark.parametrize(("make", "message"), CASES)
def test_bad_input_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").touch()
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": ""}
    run = launch("python", tmp_path / "run", {**TINY, **make(tmp_path)}, env=env, check=False)
    assert run.status == 2, run.output[-2000:]
    assert len(run.errors) == 1, run.output[-2000:]
    assert re.search(message, run.output[run.output.index("error: ") :], re.DOTALL)
    assert "Traceback" not in run.output
    assert not run.folder.exists()


@pytest.mark.parametrize("flags", [{"model_name_or_path": "org/model"}, {"dataset_name": "org/data"}], ids=str)
def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(flags: dict[str, str], tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    run = launch("python", tmp_path / "run", {**TINY, **flags}, env=env, check=False)
    assert run.status == 2
    assert "Offline? Give" in run.errors[0]
    assert "Retry" not in run.output


def test_two_ranks_say_it_once_and_the_launcher_exits_with_2(tmp_path: Path) -> None:
    values = {**TINY, "train_file": write(tmp_path, "a.csv", "text,label\na,\nb,x\nc,y\n")}
    run = launch("deepspeed", tmp_path / "run", values, ranks=2, check=False)
    assert run.status == 2
    assert len(run.errors) == 1, run.output[-3000:]
    assert "1 of 3 rows with empty text or label" in run.errors[0]
    assert "Traceback" not in run.output


def ages(folder: Path) -> dict[str, int]:
    """When each file was last written; but for the lock, which says who looked last."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "_lock"}


def test_a_folder_that_holds_a_run_is_neither_written_over_nor_lost(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch("python", folder, {**TINY, "max_steps": 1})
    before = ages(folder)
    again = launch("python", folder, {**TINY, "max_steps": 1}, check=False)
    assert again.status == 2
    assert "It has no checkpoint: start it again with --resume allow, delete it with" in again.errors[0]
    (folder / "checkpoint-1").mkdir()
    again = launch("python", folder, {**TINY, "max_steps": 1}, check=False)
    assert "Continue it with --resume auto, delete it with" in again.errors[0]
    (folder / "checkpoint-1").rmdir()
    assert ages(folder) == before
    (foreign := tmp_path / "foreign").mkdir()
    (foreign / "note.txt").touch()
    assert "holds 1 files" in launch("python", foreign, {**TINY, "resume": "allow"}, check=False).errors[0]
    wrong = {**TINY, "overwrite_output_dir": True, "tokenizer_name": foreign}  # without a tokenizer
    assert launch("python", folder, wrong, check=False).status == 2
    assert ages(folder) == before
    reused = {**TINY, "overwrite_output_dir": True, "do_train": False, "model_name_or_path": folder}
    refused = launch("python", folder, reused, check=False)
    assert refused.status == 2
    assert "would delete" in refused.errors[0]
    assert ages(folder) == before
    launch("python", folder, {**TINY, "max_steps": 2, "overwrite_output_dir": True})
    assert "overwrite" not in (folder / "recipe.yaml").read_text()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    refused = launch("python", mine, {**TINY, "overwrite_output_dir": True}, check=False)
    assert refused.status == 2
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_run_is_not_resumed_with_other_data_and_its_record_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch("python", folder, {**TINY, "max_steps": 2, "save_strategy": "steps", "save_steps": 2})
    (folder / "README.md").unlink()
    record = (folder / "recipe.yaml").read_text()
    other = write(tmp_path, "a.csv", "text,label\n" + "".join(f"words {i},{'xyz'[i % 3]}\n" for i in range(60)))
    run = launch("python", folder, {**TINY, "train_file": other, "resume": "auto"}, check=False)
    assert run.status == 2
    assert "has another model than these data and flags make: id2label" in run.errors[0]
    assert (folder / "recipe.yaml").read_text() == record


def test_a_run_that_is_stopped_by_hand_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, RECIPE, *flags({**TINY, "max_steps": 100_000, "output_dir": tmp_path / "run"})]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it, and pass that on
    with living(command, RECIPE, tmp_path / "log", preexec_fn=heard) as run:
        run.wait_for((tmp_path / "run" / "metrics.jsonl").exists)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert "holds no checkpoint. Start again with --resume allow" in run.output
        assert "Traceback" not in run.output


def test_accelerate_with_deepspeed_of_its_own_refuses_another_config(tmp_path: Path) -> None:
    words = ["--config_file", "recipes/launch/accelerate_zero2.yaml"]
    values = {**TINY, "deepspeed": "zero1"}
    run = launch("accelerate", tmp_path / "run", values, ranks=2, words=words, check=False)
    assert run.status != 0
    assert [error for error in run.errors if "Drop --deepspeed" in error] == run.errors
    assert len(run.errors) == 1


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs here: mount needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room_for_a_checkpoint_is_named_before_the_first_step(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "6m") as small:
        run = launch("python", small / "run", {**TINY, "save_strategy": "steps", "save_steps": 3}, check=False)
    assert run.status == 1, run.output[-2000:]
    assert "before the first step: a checkpoint needs about 9 MiB, but the disk of " in run.errors[0]
    assert "--save_total_limit" in run.errors[0]


@pytest.mark.parametrize("variable", ["FINETUNE_CACHE", "HF_HOME"])
def test_a_disk_that_data_fills_is_named(variable: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text,label\n" + "".join(f"some words {i},{i % 2}\n" for i in range(20_000)))
    with small_disk(tmp_path / "small", "400k") as small:
        env = {"FINETUNE_CACHE": str(tmp_path / "cache"), variable: str(small)}
        run = launch(
            "python", tmp_path / "run", {**TINY, "train_file": path, "max_train_samples": 19_000}, env=env, check=False
        )
    assert run.status == 1, run.output[-2000:]
    assert "$FINETUNE_CACHE" in run.errors[0]
    assert not run.folder.exists()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(launcher: str, tmp_path: Path) -> None:
    values = {**TINY, "max_steps": 100_000, "output_dir": tmp_path / "run"}
    with living([*LAUNCHERS[launcher](2), RECIPE, *flags(values)], RECIPE, tmp_path / "log") as run:
        run.wait_for((tmp_path / "run" / "metrics.jsonl").exists)
        ranks = run.ranks()
        ranks[1].kill()
        assert run.end(60) != 0
        assert not any(rank.is_running() for rank in ranks.values())
        found = re.findall(r"^error: (.*?),", run.output, re.MULTILINE)
        # A launcher that reaps the dead process first leaves no trace of its signal, or of how it died.
        ways = ("was killed by SIGKILL", "was killed", "is gone")
        assert found in [[f"rank 1 {way}"] for way in ways], run.output[-3000:]
