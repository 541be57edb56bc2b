"""What a shell's environment says of a launch is of one, or it is refused in a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.environment import left_over
from finetune.run.launch import Launch, own_rank, read_launch
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve
from finetune.run.run import Run

RECIPE = str(REPO / "recipes" / "seq_cls.py")
TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
WITHOUT = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "CROSS_",
    "ACCELERATE_",
    "FSDP_",
    "OMPI_",
    "PMI_",
    "MV2_",
    "SLURM_",
)
NOT_A_LAUNCH = [
    ({"RANK": "two"}, "RANK is 'two'"),
    ({"RANK": ""}, "RANK is ''"),
    ({"RANK": "-1"}, "RANK is '-1'"),
    ({"RANK": "9" * 5000}, "RANK is '999"),
    ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0 in the environment, but WORLD_SIZE is 0"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 in the environment, but WORLD_SIZE is 2"),
    ({"RANK": "1"}, "RANK is 1 in the environment, but WORLD_SIZE is 1"),
    ({**TWO, "LOCAL_RANK": "1.5"}, "LOCAL_RANK is '1.5'"),
    ({**TWO, "LOCAL_RANK": "7"}, "LOCAL_RANK is 7 in the environment, but LOCAL_SIZE is 2"),
    ({**TWO, "LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
    ({**TWO, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is 3 in the environment, but WORLD_SIZE is 2"),
    ({"LOCAL_RANK": "0"}, "LOCAL_RANK is '0' in the environment, without RANK"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2' in the environment, without RANK"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is '2'"),
    ({"PMI_SIZE": "two"}, "PMI_SIZE is 'two'"),
]
NO_MEETING = [
    ({**TWO, "MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'"),
    ({**TWO, "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ({**TWO, "MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
    ({**TWO, "LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
    ({name: value for name, value in TWO.items() if name != "LOCAL_RANK"}, "without LOCAL_RANK"),
]


@pytest.fixture(autouse=True)
def _nothing_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(WITHOUT)]:
        monkeypatch.delenv(name)


def said(*argv: str) -> str:
    """What is wrong with a run here; "" for nothing."""
    try:
        resolve_here(SEQ_CLS, argv, read_launch())
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("env", "words"), [*NOT_A_LAUNCH, *NO_MEETING], ids=lambda one: str(one)[:60])
def test_what_is_of_no_launch_is_refused_in_a_line(
    env: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = said("--output_dir", str(tmp_path / "run"))
    assert found.startswith(words) or words in found
    assert "\n" not in found
    assert own_rank() in (0, 1)


@pytest.mark.parametrize("env", [{"RANK": "two"}, {"RANK": "1"}, {"LOCAL_RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "x"}])
def test_a_recipe_says_it_once_with_status_2(env: dict[str, str]) -> None:
    every = {**os.environ, **env, "PYTHONPATH": str(REPO)}
    ended = subprocess.run([sys.executable, RECIPE], env=every, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert (ended.stdout, len(ended.stderr.strip().splitlines())) == ("", 1)
    assert ended.stderr.strip().startswith("error: ")
    helped = subprocess.run([sys.executable, RECIPE, "--help"], env=every, capture_output=True, text=True, check=False)
    assert (helped.returncode, "--model_name_or_path" in helped.stdout) == (0, True)


@pytest.mark.parametrize("env", [{"WORLD_SIZE": "1"}, {"LOCAL_RANK": "-1"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {}])
def test_what_says_one_process_is_one(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch()


REFUSED = [
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, ()),
    ({"ACCELERATE_USE_DEEPSPEED": "1"}, ("--deepspeed", "none")),
    ({"ACCELERATE_USE_FSDP": "True"}, ()),
    ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, ("--deepspeed", "zero2")),
    ({"ACCELERATE_DEEPSPEED_CONFIG_FILE": "x.json"}, ("--deepspeed", "zero2")),
    ({"ACCELERATE_CONFIG_DS_FIELDS": "zero_stage"}, ("--deepspeed", "zero2")),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, ("--deepspeed", "zero2")),
    ({"ACCELERATE_GRADIENT_CLIPPING": "0.1", **TWO, "ACCELERATE_MIXED_PRECISION": "bf16"}, ("--deepspeed", "zero2")),
    ({"ACCELERATE_GRADIENT_CLIPPING": "0.1"}, ("--deepspeed", "zero2")),
    ({"ACCELERATE_MIXED_PRECISION": "fp8"}, ()),
    ({"ACCELERATE_MIXED_PRECISION": "half"}, ()),
    ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ()),
    ({"ACCELERATE_TORCH_DEVICE": "meta"}, ()),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, ()),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "yes"}, ()),
    ({"ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL", "ACCELERATE_USE_SAGEMAKER": "true"}, ()),
    ({"ACCELERATE_USE_CPU": "true"}, ("--use_cpu", "false")),
    ({**TWO, "FSDP_OFFLOAD_PARAMS": "true"}, ("--fsdp", "true")),
]


@pytest.mark.parametrize(("env", "argv"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_accelerate_would_heed_and_nobody_asked_for_is_refused(
    env: dict[str, str], argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    name = next(name for name in env if name not in TWO)
    found = said("--output_dir", str(tmp_path / "run"), *argv)
    assert found.startswith(f"{name} is ")
    assert "\n" not in found


HARMLESS = [
    ({"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO"}, ()),
    ({**TWO, "ACCELERATE_USE_FSDP": "true"}, ("--fsdp", "true")),
    ({"ACCELERATE_DYNAMO_BACKEND": "inductor"}, ("--torch_compile", "true")),
    ({"ACCELERATE_GRADIENT_CLIPPING": "0.1"}, ()),
]


@pytest.mark.parametrize(("env", "argv"), HARMLESS, ids=lambda one: str(one)[:60])
def test_what_changes_nothing_is_taken(
    env: dict[str, str], argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert said("--output_dir", str(tmp_path / "run"), *argv) == ""


USUAL = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
}
BY_DEEPSPEED = {**TWO, "CROSS_SIZE": "1", "CROSS_RANK": "0", "LOCAL_SIZE": "2"}
LAUNCHERS = [
    (TWO, "torchrun"),
    ({**TWO, "ACCELERATE_MIXED_PRECISION": "bf16"}, "torchrun"),
    (BY_DEEPSPEED, "deepspeed"),
    ({**BY_DEEPSPEED, "ACCELERATE_MIXED_PRECISION": "bf16"}, "deepspeed"),
    ({**BY_DEEPSPEED, "LOCAL_WORLD_SIZE": "8"}, "deepspeed"),
    ({**TWO, **USUAL}, "accelerate"),
    ({**BY_DEEPSPEED, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage"}, "accelerate"),
]


@pytest.mark.parametrize(("env", "launcher"), LAUNCHERS, ids=lambda one: str(one)[-60:])
def test_a_launcher_is_told_by_what_it_alone_sets(
    env: dict[str, str], launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(0, 0, 2, 2, launcher)


def test_accelerates_config_may_ask_for_a_compiled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TWO, **USUAL, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}.items():
        monkeypatch.setenv(name, value)
    run = noted("--output_dir", str(tmp_path / "run"))
    assert (run.value("torch_compile"), run.value("torch_compile_backend")) == (True, "inductor")
    assert any("ACCELERATE_DYNAMO_BACKEND is 'INDUCTOR'" in note for note in run.notes)


def test_what_accelerate_launch_sets_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` has it for a run by DDP and for one by DeepSpeed (accelerate 1.15, utils/launch.py)."""
    fields = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    for env in (USUAL, {**USUAL, "ACCELERATE_USE_CPU": "False"}, {**TWO, **USUAL}, {**TWO, **USUAL, **fields}):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            run = resolve(SEQ_CLS, [], read_launch())
            assert list(left_over(run, None)) == []


def noted(*argv: str) -> Run:
    return resolve_here(SEQ_CLS, argv, read_launch())


def test_what_is_obeyed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ("--output_dir", str(tmp_path / "run"))
    assert noted(*folder).notes == ()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    run = noted(*folder)
    assert run.value("use_cpu") is True
    on_cpu, of_slurm, precision = run.notes
    assert on_cpu.startswith("ACCELERATE_USE_CPU is 'true' in the environment")
    assert of_slurm.startswith("this is one of 4 tasks of a Slurm step")
    assert precision.startswith("ACCELERATE_MIXED_PRECISION is 'bf16' in the environment")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    assert noted(*folder).notes[-1].startswith("NVIDIA_TF32_OVERRIDE is '0' in the environment: on a GPU")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "it is not valid Python in line 1"),
        ("x = 1\0\n", "it is not valid Python"),
        ("(" * 500 + "\n", "it is not valid Python"),
    ],
    ids=["syntax", "NUL", "nested"],
)
def test_a_metric_that_is_no_python_is_said_before_torch(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(text)
    found = said("--metrics", str(tmp_path / "my.py"), "--output_dir", str(tmp_path / "run"))
    assert words in found
