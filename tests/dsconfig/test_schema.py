"""The shipped schema is that of the installed DeepSpeed, and DeepSpeed agrees with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from make_schema import SCHEMA, text

from finetune.dsconfig.shape import REMOVED, schema, shape_findings
from finetune.shipped import DS_CONFIGS


def test_the_schema_is_made_from_the_installed_deepspeed() -> None:
    assert SCHEMA.read_text() == text(), "run: python benchmarks/make_schema.py"


def test_the_schema_is_one_and_the_shipped_configs_keep_it() -> None:
    Draft202012Validator.check_schema(schema())
    shipped = sorted(DS_CONFIGS.glob("*.json"))
    assert len(shipped) == 9
    for path in shipped:
        assert list(shape_findings(json.loads(path.read_text()))) == [], path.name


def test_what_was_removed_is_what_deepspeed_refuses() -> None:
    from deepspeed.runtime import config

    refused = [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    refused += [f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS]
    assert sorted(REMOVED) == sorted(refused)


def test_an_older_release_has_what_a_newer_one_removed() -> None:
    config = {"compression_training": {}, "elasticity": {}}
    assert [finding.path for finding in shape_findings(config, (0, 19, 8))] == [
        ("compression_training",),
        ("elasticity",),
    ]
    assert [finding.path for finding in shape_findings(config, (0, 19, 7))] == [("compression_training",)]
    assert list(shape_findings(config, (0, 19, 6))) == []


DEEPSPEED = [
    ({"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8}}, True),
    ({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5}}, True),
    ({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5}}, True),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, True),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": None}}, True),
    ({"zero_optimization": {"stage": 4}}, False),
    ({"zero_optimization": {"overlap_com": True}}, False),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, False),
    ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, False),
    ({"zero_optimization": {"offload_optimizer": {"ratio": 2.0}}}, False),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, True),
    ({"fp16": {"enabled": []}}, False),
    ({"bf16": {"enable": True}}, False),
]


@pytest.mark.parametrize(("config", "sound"), DEEPSPEED, ids=str)
def test_deepspeed_itself_says_the_same(config: dict[str, Any], sound: bool) -> None:
    from deepspeed import DeepSpeedConfig

    assert (list(shape_findings(config)) == []) is sound
    try:
        DeepSpeedConfig({"train_batch_size": 1, **config})
    except Exception:
        assert not sound
    else:
        assert sound
