"""Every launcher with every shipped DeepSpeed config: the same losses and gradients, and a folder that opens."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from conftest import REPO, TINY, Finished, gate_has, launch

from finetune.data.builtin import docstring_rows
from finetune.dsconfig.load import find_config

pytestmark = pytest.mark.usefixtures("built_ops")

# All but the pipeline's own, which the Trainer refuses.
CONFIGS = sorted({path.stem for path in (REPO / "ds_configs").glob("*.json")} - {"pipeline"})
GLOBAL_BATCH = 32


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The truth: plain python, no DeepSpeed, the whole global batch at once."""
    folder = tmp_path_factory.mktemp("truth") / "run"
    return launch("python", folder, {**TINY, "per_device_train_batch_size": GLOBAL_BATCH})


def assert_same_training(run: Finished, truth: Finished) -> None:
    assert len(run.steps) == len(truth.steps) == TINY["max_steps"]
    assert run.column("loss") == pytest.approx(truth.column("loss"), rel=0.01)
    assert run.column("grad_norm") == pytest.approx(truth.column("grad_norm"), rel=0.01)
    assert run.json("eval_results.json")["eval_loss"] == pytest.approx(
        truth.json("eval_results.json")["eval_loss"], rel=0.01
    )


def assert_opens(folder: Path) -> None:
    from transformers import pipeline

    found = pipeline("text-classification", str(folder), device="cpu")("Return the path of the parsed URL.")
    assert found[0]["label"] in docstring_rows()["label"]


def config_values(config: str, folder: Path) -> dict[str, str]:
    """Flags for a shipped config. qwZ needs a GPU (DeepSpeed's quantizer has no CPU build), so it is off here."""
    if config == "none":
        return {"deepspeed": "none"}
    if config == "zeropp":
        content = json.loads((REPO / "ds_configs" / "zeropp.json").read_text())
        content["zero_optimization"]["zero_quantized_weights"] = False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "zeropp_without_qwz.json"
        path.write_text(json.dumps(content))
        return {"deepspeed": str(path)}
    return {"deepspeed": config}


def skip_without_compilers(config: str) -> None:
    if "offload" in config or "nvme" in config:
        if not shutil.which("g++"):
            pytest.skip("g++ is absent: DeepSpeed cannot build its CPU optimizer")
        if "nvme" in config and not Path("/usr/include/libaio.h").exists():
            pytest.skip("libaio-dev is absent: DeepSpeed cannot build its async_io op")


def test_there_are_shipped_configs() -> None:
    assert CONFIGS == ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload", "zeropp"]


# torchrun starts a rank as deepspeed does, in the same variables, and has the plain stages in the test of accumulation.
# accelerate reads the config by itself; its stage 1 is in the test of its flags.
PAIRS = [
    *((launcher, config) for launcher in ("python", "deepspeed") for config in ("none", *CONFIGS)),
    *(("torchrun", config) for config in ("zero3_offload", "zeropp")),
    *(("accelerate", config) for config in ("none", "zero2", "zero3", "zero3_nvme")),
]


def in_gate(launcher: str, config: str) -> bool:
    """Each launcher alone, and with an engine. Others have the plain stages with torchrun, and one with accelerate."""
    return config == "none" or (config == "zero3" and launcher != "accelerate")


@pytest.mark.parametrize(("launcher", "config"), gate_has([pair for pair in PAIRS if in_gate(*pair)], PAIRS))
def test_training_is_the_same_under_every_launcher_and_config(
    launcher: str, config: str, one_process: Finished, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    skip_without_compilers(config)
    if config == "zero3_nvme":
        request.getfixturevalue("built_async_io")
    ranks = 1 if launcher == "python" else 2
    values = {**TINY, "per_device_train_batch_size": GLOBAL_BATCH // ranks, **config_values(config, tmp_path)}
    words: list[str] = []
    if launcher == "accelerate" and config != "none":
        # Its own way: the config goes to its DeepSpeed plugin, not to the recipe.
        words = ["--use_deepspeed", "--deepspeed_config_file", str(find_config(values.pop("deepspeed")))]
    run = launch(launcher, tmp_path / "run", values, ranks=ranks, words=words)
    assert_same_training(run, one_process)
    assert_opens(run.folder)
    if config != "none":
        resolved = run.json("ds_config.json")
        assert "auto" not in json.dumps(resolved)
        assert resolved["train_batch_size"] == GLOBAL_BATCH


@pytest.mark.parametrize("config", ["none", "zero0", "zero1", "zero2", "zero3"])
def test_accumulation_changes_nothing(config: str, one_process: Finished, tmp_path: Path) -> None:
    values = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, **config_values(config, tmp_path)}
    run = launch("torchrun", tmp_path / "run", {**TINY, **values}, ranks=2)
    assert_same_training(run, one_process)


def test_two_ranks_under_deepspeed_train_as_one_process_does(one_process: Finished, tmp_path: Path) -> None:
    """The quick form of the tests above: the default config of the deepspeed launcher, with accumulation."""
    values = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    left = set(Path("/dev/shm").glob("deepspeed_*"))
    run = launch("deepspeed", tmp_path / "run", {**TINY, **values}, ranks=2)
    assert_same_training(run, one_process)
    assert run.json("ds_config.json")["zero_optimization"]["stage"] == 2
    assert run.output.count("run: 2 rank(s)") == 1
    for _ in range(60):  # the tests beside this one have theirs for as long as they run
        if set(Path("/dev/shm").glob("deepspeed_*")) <= left:
            return
        time.sleep(1)
    raise AssertionError("shared memory is left behind")


def test_the_plugin_flags_of_accelerate_work(one_process: Finished, tmp_path: Path) -> None:
    values = {**TINY, "per_device_train_batch_size": 16}
    run = launch("accelerate", tmp_path / "run", values, ranks=2, words=["--use_deepspeed", "--zero_stage", "1"])
    assert_same_training(run, one_process)
    assert run.json("ds_config.json")["zero_optimization"]["stage"] == 1
