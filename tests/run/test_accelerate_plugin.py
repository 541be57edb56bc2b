"""The config that accelerate builds from its own fields is ours word for word, and is checked before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from check_cases import run_of

from finetune.entry.main import resolve_here
from finetune.errors import RequestError
from finetune.run.accelerate_plugin import FIELDS, check_fields, config_of_fields
from finetune.run.launch import Launch
from finetune.run.recipes.seq_cls import SEQ_CLS

VARIABLES = dict(FIELDS.values())


@pytest.fixture(autouse=True)
def _no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """As `accelerate launch` does (utils/launch.py)."""
    for field, value in fields.items():
        monkeypatch.setenv(VARIABLES[field], str(value).lower())


CASES: list[dict[str, Any]] = [
    {},
    {"zero_stage": 3, "zero3_save_16bit_model": True},
    {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_clipping": 0.5, "gradient_accumulation_steps": 4},
    {"zero_stage": 3, "offload_param_device": "nvme", "offload_optimizer_device": "nvme", "gradient_clipping": 0.0},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_it_is_the_one_that_accelerate_builds(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import DeepSpeedPlugin

    launched(monkeypatch, **fields)
    theirs = DeepSpeedPlugin().deepspeed_config
    del theirs["steps_per_print"]
    for what in ("offload_optimizer", "offload_param"):
        if theirs["zero_optimization"][what]["nvme_path"] is None:
            del theirs["zero_optimization"][what]["nvme_path"]
    assert config_of_fields() == theirs


def test_a_model_that_would_not_be_saved_is_refused_by_the_fields_name(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, zero_stage=3, zero3_save_16bit_model=False)
    with pytest.raises(RequestError, match=r"deepspeed_config, zero3_save_16bit_model: error DS501"):
        check_fields(run_of(engine="trainer"), ())
    check_fields(run_of(engine="trainer"), ("DS501",))


def test_a_number_that_the_flags_contradict_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, gradient_accumulation_steps=4)
    with pytest.raises(RequestError, match="gradient_accumulation_steps is 4, but the run asks for 2"):
        check_fields(run_of(engine="trainer"), ())


@pytest.mark.parametrize("fields", CASES[:3], ids=str)
def test_sound_fields_are_taken(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, **fields)
    check_fields(run_of(engine="trainer", arguments={}), ())


def test_a_search_for_the_batch_is_refused_under_zero3_by_fields_too(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, zero_stage=3)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    launch = Launch(world_size=2, local_world_size=2, launcher="accelerate")
    with pytest.raises(RequestError, match=r"--auto_find_batch_size is True .*, which ZeRO-3 \(by accelerate\) cannot"):
        resolve_here(SEQ_CLS, ["--auto_find_batch_size", "True"], launch)


@pytest.mark.parametrize("flag", ["load_in_4bit", "lora_use_dora", "model_name_or_path"])
@pytest.mark.parametrize(
    "engine", [["--deepspeed", "zero3"], ["--fsdp", "True"], []], ids=["zero3", "fsdp", "by fields"]
)
def test_an_adapter_that_cannot_be_sharded_is_refused_before_anything_is_built(
    engine: list[str], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"use_dora": true}')
    launched(monkeypatch, zero_stage=3)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true" if not engine else "false")
    launch = Launch(world_size=2, local_world_size=2, launcher="torchrun" if engine else "accelerate")
    asked = {"use_peft": True, "model_name_or_path": "a", flag: tmp_path if flag == "model_name_or_path" else True}
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    with pytest.raises(RequestError, match=rf"--{flag} is .*, but ZeRO-3 and FSDP shard weights"):
        resolve_here(SEQ_CLS, [*words, *engine], launch)


def test_a_disk_without_a_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, zero_stage=3, zero3_save_16bit_model=True, gradient_clipping=1.0)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "none")
    check_fields(run_of(), ())
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/tmp")
    with pytest.raises(RequestError, match=r"offload_optimizer_device: error DS609: .* nothing is offloaded"):
        check_fields(run_of(), ())
