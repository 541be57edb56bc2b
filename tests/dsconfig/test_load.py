"""From a name to a config that is ready: found, checked, and filled where only we can."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from check_cases import ARGUMENTS, run_of

from finetune.dsconfig.check import check, read
from finetune.dsconfig.load import find_config, load, resolve, wants_cpu_adam
from finetune.errors import RequestError
from finetune.shipped import DS_CONFIGS

a_run = partial(run_of, world_size=2, ranks_per_node=2)


def contents(name: str) -> dict[str, Any]:
    return dict(json.loads((DS_CONFIGS / name).read_text()))


def test_every_shipped_config_is_sound() -> None:
    shipped = sorted(DS_CONFIGS.glob("*.json"))
    assert len(shipped) == 9
    for path in shipped:
        stages = 2 if path.stem == "pipeline" else None
        two_nodes = a_run(has_cuda=True, world_size=16, ranks_per_node=8, pipeline_parallel_size=stages)
        assert check(path.read_text(), two_nodes).found == (), path.name
        assert json.loads(path.read_text())["gradient_clipping"] == "auto"


def test_each_shipped_config_differs_from_its_base_only_where_its_name_says() -> None:
    zero2, offload = contents("zero2.json"), contents("zero2_offload.json")
    del offload["zero_optimization"]["offload_optimizer"]
    del zero2["optimizer"]["params"]["torch_adam"]
    assert zero2 == offload
    zero3, plus = contents("zero3.json"), contents("zeropp.json")
    for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        del plus["zero_optimization"][key]
    assert zero3 == plus


def test_what_only_we_know_is_filled_in() -> None:
    plus = resolve(contents("zeropp.json"), a_run(ranks_per_node=4))
    assert plus["zero_optimization"]["zero_hpz_partition_size"] == 4
    nvme = resolve(contents("zero3_nvme.json"), a_run(output_dir="runs/x"))
    assert nvme["zero_optimization"]["offload_param"]["nvme_path"] == "runs/x/nvme_offload"
    given = resolve(contents("zero3_nvme.json"), a_run(nvme_path="fast"))
    assert given["zero_optimization"]["offload_optimizer"]["nvme_path"] == "fast"


@pytest.mark.parametrize(("half", "adds_up_in"), [("bf16", "fp32"), ("fp16", "fp16"), (None, "fp32")], ids=str)
def test_a_pipeline_has_no_auto_left(half: str | None, adds_up_in: str) -> None:
    arguments = {**ARGUMENTS, **({half: True} if half else {})}
    run = a_run(world_size=8, pipeline_parallel_size=4, has_cuda=True, arguments=arguments)
    config = load("pipeline", run).config
    assert "auto" not in json.dumps(config)
    assert config["train_batch_size"] == 8 * 2 * 2
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_clipping"] == 1.0
    assert config["data_types"]["grad_accum_dtype"] == adds_up_in
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (half == "bf16", half == "fp16")


def test_sections_that_are_all_auto_are_left_to_the_trainer() -> None:
    config = resolve(contents("zero2_offload.json"), a_run())
    assert "optimizer" not in config
    assert "scheduler" not in config
    assert wants_cpu_adam(config)
    fixed = {"optimizer": {"type": "AdamW", "params": {"lr": 5e-5}}, "zero_optimization": {"stage": 2}}
    assert resolve(fixed, a_run())["optimizer"] == fixed["optimizer"]


def test_a_config_is_found_by_name_and_by_path() -> None:
    assert find_config("zero2") == find_config("zero2.json") == DS_CONFIGS / "zero2.json"
    assert find_config(str(DS_CONFIGS / "zero1.json")) == DS_CONFIGS / "zero1.json"
    with pytest.raises(RequestError, match="shipped name: pipeline, zero0, zero1, zero2"):
        find_config("zero9")


def test_every_error_comes_with_the_name_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 2},\n  "train_batch_size": 7,\n  "gradient_cliping": 1\n}')
    with pytest.raises(RequestError) as caught:
        load(str(path), a_run())
    said = [line.split(" ")[0] for line in str(caught.value).splitlines()]
    assert said == ["mine.json:2:3:", "mine.json:3:3:"]


def test_a_check_can_be_switched_off_for_a_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "train_batch_size": 7}')
    with pytest.raises(RequestError, match="DS201"):
        load(str(path), a_run())
    assert load(str(path), a_run(), ["DS201"]).notes == ()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.json: cannot be read"):
        read(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(RequestError, match="UTF-8"):
        read(tmp_path / "latin.json")
    (tmp_path / "big.json").write_text(" " * 100_001)
    with pytest.raises(RequestError, match="more than 100,000 bytes"):
        read(tmp_path / "big.json")


def test_gradients_of_experts_are_reduced_within_their_group() -> None:
    """Any other way, DeepSpeed adds up those of different experts."""
    told = {"zero_optimization": {"stage": 1, "reduce_scatter": False, "contiguous_gradients": False}}
    config = resolve({**told, "prescale_gradients": True}, a_run(expert_parallel_size=2))
    assert config["zero_optimization"] == {"stage": 1, "reduce_scatter": True, "contiguous_gradients": True}
    assert config["prescale_gradients"] is False
    assert resolve(told, a_run())["zero_optimization"] == told["zero_optimization"]
