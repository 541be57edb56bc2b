"""--fix changes nothing of what a run does beyond what its findings name, by DeepSpeed's own resolved configs."""

from __future__ import annotations

import copy
import json
from enum import Enum
from typing import Any

from check_cases import run_of
from check_configs import configs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finetune.dsconfig.check import check, mended, mendings

# What DeepSpeed calls a part of its resolved config, where that is not the key of the file.
KEYS = {
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing",
    "checkpoint_tag_validation_enabled": "checkpoint",
    "zero_optimization_stage": "stage",
    "zero_enabled": "stage",
    "optimizer_name": "optimizer",
    "optimizer_params": "optimizer",
    "scheduler_name": "scheduler",
    "scheduler_params": "scheduler",
}
NAMELESS = ("_param_dict", "world_size", "global_rank")


def resolved(text: str) -> dict[str, Any] | None:
    """Every value that DeepSpeed takes from the config, by its name; None where it refuses the file."""
    from deepspeed import DeepSpeedConfig

    try:
        config = DeepSpeedConfig(copy.deepcopy(json.loads(text)))
    except Exception:
        return None
    return dict(_leaves({name: value for name, value in vars(config).items() if name not in NAMELESS}, ""))


def _leaves(node: Any, name: str) -> Any:
    if hasattr(node, "model_dump"):
        node = {key: getattr(node, key, None) for key in type(node).model_fields}
    elif hasattr(node, "__dict__") and not isinstance(node, Enum | type):
        node = vars(node)
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(node)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(["recipe", "trainer", "accelerate", "deepspeed"]))
@example(seed=4036, engine="recipe")
def test_fix_changes_nothing_that_it_does_not_name(seed: int, engine: str) -> None:
    (text,) = configs(2, seed).popitem()[1:]
    run = run_of(engine=engine, arguments={}, has_cuda=None)
    before = resolved(text)
    if before is None:  # DeepSpeed alone refuses it; so it would an "auto" size, which the Trainer fills
        return
    after = resolved(json.dumps({key: one for key, one in json.loads(mended(text, run)).items() if one != "auto"}))
    assert after is not None, "what DeepSpeed took it takes still"
    said = " ".join(placed.finding.message for one in mendings(text, run) for placed in check(one, run).found)
    for name in before.keys() | after.keys():
        if before.get(name) not in (after.get(name), "auto"):  # DeepSpeed alone keeps some as they are; left out above
            *above, key = name.split(".")
            names = {key.removeprefix("stage3_"), KEYS.get(key, key), *(KEYS.get(part, part) for part in above)}
            names -= {"zero_optimization"} if key != "zero_config" else set()
            assert any(one in said for one in names), (name, before.get(name), after.get(name), text)
