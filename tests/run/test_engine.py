"""Who shards: the flags, the launcher and accelerate's environment settle it, and contradictions are refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from asked import run_of

from finetune.errors import RequestError
from finetune.run.engine import deepspeed_config_of, fsdp_of, settle_engine
from finetune.run.launch import Launch
from finetune.run.run import Run

TWO = {"world_size": 2, "local_world_size": 2}


def request(*argv: str, launcher: str = "torchrun", **launch: Any) -> Run:
    return run_of(*argv, launch=Launch(launcher=launcher, **{**TWO, **launch}), do_train=True)


@pytest.fixture(autouse=True)
def _no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "launcher", "config"),
    [
        ([], "deepspeed", "zero2"),
        ([], "torchrun", None),
        (["--deepspeed", "zero3"], "torchrun", "zero3"),
        (["--deepspeed_config", "a.json"], "torchrun", "a.json"),
        (["--deepspeed", "none"], "deepspeed", None),
        (["--fsdp", "True"], "deepspeed", None),
        (["--fsdp", "True", "--deepspeed", "none"], "torchrun", None),
    ],
    ids=["default", "nothing", "name", "path", "switched off", "FSDP under its launcher", "FSDP alone"],
)
def test_the_config_is_the_one_asked_for_or_the_launchers(argv: list[str], launcher: str, config: str | None) -> None:
    assert deepspeed_config_of(request(*argv, launcher=launcher)) == config


@pytest.mark.parametrize("words", [["--deepspeed"], ["--deepspeed", "--deepspeed_config"]], ids=" ".join)
def test_a_trial_of_deepspeeds_autotuning_is_told_what_does_it_here(words: list[str]) -> None:
    """The launcher's log repeats what follows the first \"error\" on its line."""
    config = {"zero_optimization": {"stage": 3}, "autotuning": {"enabled": True, "metric_path": "a" * 300}}
    given = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    with pytest.raises(RequestError, match=r"plan RUN\.yaml --autotune") as met:
        settle_engine(request(*words, given, launcher="deepspeed"))
    assert "\n" not in str(met.value)
    assert given not in str(met.value)


def test_a_name_that_is_too_long_for_a_file_is_no_config() -> None:
    with pytest.raises(RequestError, match="there is no such DeepSpeed config"):
        settle_engine(request("--deepspeed", "a" * 300))


@pytest.mark.parametrize(
    ("word", "meant"),
    [("True", True), ("true", True), ("False", None), ("none", None), ("full_shard", "full_shard")],
)
def test_fsdp_is_a_switch_or_an_older_word(word: str, meant: Any) -> None:
    assert fsdp_of(request("--fsdp", word)) == meant


def test_two_that_shard_are_refused() -> None:
    with pytest.raises(RequestError, match=r"both shard the model\. Keep one"):
        deepspeed_config_of(request("--fsdp", "True", "--deepspeed", "zero3"))


def test_accelerate_with_deepspeed_and_fsdp_by_flag_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RequestError, match="accelerate launch asks for DeepSpeed: both shard"):
        deepspeed_config_of(request("--fsdp", "True", launcher="accelerate"))


def test_accelerate_with_fsdp_and_deepspeed_by_flag_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RequestError, match=r"--deepspeed is 'zero2' \(command line\): both shard"):
        deepspeed_config_of(request("--deepspeed", "zero2", launcher="accelerate"))
    assert deepspeed_config_of(request(launcher="accelerate")) is None


def test_all_that_is_wrong_with_an_engine_is_said_at_once() -> None:
    with pytest.raises(RequestError, match=r"(?s)but this is one\..*\n.*both shard the model"):
        settle_engine(request("--fsdp", "True", "--deepspeed", "zero2", launcher="python", world_size=1))


def test_fsdp_that_is_off_shards_nothing() -> None:
    run = settle_engine(request("--fsdp", "False", "--deepspeed", "zero2"))
    assert (run.value("fsdp"), run.value("deepspeed")) == (None, "zero2")


def test_fsdp_needs_ranks_and_training() -> None:
    with pytest.raises(RequestError, match=r"this is one\. Drop it, or launch with `torchrun"):
        fsdp_of(request("--fsdp", "True", launcher="python", world_size=1))
    with pytest.raises(RequestError, match="shards training, but --do_train is False"):
        fsdp_of(request("--fsdp", "True", "--do_train", "False"))
