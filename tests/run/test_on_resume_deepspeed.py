"""Each key of a DeepSpeed config that is another on resume is in one class, and is treated so."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import REPO

from finetune.dsconfig.shape import schema
from finetune.errors import RequestError
from finetune.run.on_resume_deepspeed import APPLIED, CLASSES, HALVES, OTHER_NAMES, REFUSED, WITHIN, arithmetic_of
from finetune.training.same_run import ARITHMETIC, _of_arithmetic

FP16 = {"fp16": {"enabled": True}}


def test_each_key_that_deepspeed_knows_is_in_one_class() -> None:
    known = set()
    for name, section in schema()["properties"].items():
        if name in WITHIN:
            known |= {f"{name}.{key}" for key in section["properties"]}
        elif name not in OTHER_NAMES:
            known.add(name)
    assert set().union(*CLASSES.values()) == known
    for one, other in combinations(CLASSES.values(), 2):
        assert not one & other


def resumed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    course = cast(Any, SimpleNamespace(step=4))
    then, here = ({ARITHMETIC: arithmetic_of(one, max_grad_norm=1.0)} for one in (before, now))
    return _of_arithmetic(course, "checkpoint-4", then, here)


def config(place: str, value: Any) -> dict[str, Any]:
    section, _, name = place.partition(".")
    whole: dict[str, Any] = {section: {name: value} if name else value}
    return {section: {"enabled": True, name: value}} if section in HALVES else whole


@pytest.mark.parametrize("place", sorted(APPLIED))
def test_what_is_applied_is_said_and_kept_in_the_lineage(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = place.partition(".")[0]
    base = {section: {"enabled": True}} if section in HALVES else {}
    value = {"enabled": True} if place in ("torch_autocast", "zero_optimization.zenflow") else 0.25
    assert resumed(base, config(place, value)) == {f"DeepSpeed's {place}": (None, value)}
    said = capsys.readouterr().out
    unsaid = "that of --max_grad_norm" if place == "gradient_clipping" else "DeepSpeed's default"
    assert said.startswith(f"resume: DeepSpeed's {place} is {value} from step 5 on (until then {unsaid})")
    assert resumed(config(place, value), base) == {f"DeepSpeed's {place}": (value, None)}
    assert resumed(config(place, value), config(place, value)) == {}
    assert resumed(config(place, value), config(place, "other")) == {f"DeepSpeed's {place}": (value, "other")}


@pytest.mark.parametrize("place", sorted(REFUSED))
def test_another_loss_scale_than_the_checkpoints_is_refused(place: str) -> None:
    for before, now in ((FP16, config(place, 3)), (config(place, 3), FP16), (config(place, 3), config(place, 7))):
        with pytest.raises(RequestError, match=f"config {place} was .* checkpoint-4 has its own loss scaler"):
            resumed(before, now)
    assert resumed(config(place, 3), config(place, 3)) == {}


@pytest.mark.parametrize(
    "same",
    [
        {"gradient_predivide_factor": 1.0},
        {"prescale_gradients": False},
        {"communication_data_type": None},
        {"gradient_clipping": "auto"},
        {"gradient_clipping": 1.0},
        {"data_types": {"grad_accum_dtype": "auto"}},
        {"fp16": {"enabled": "auto", "loss_scale": 128, "initial_scale_power": 4}},
        {"fp16": {"enabled": False, "hysteresis": 9}},
        {"bf16": {"enabled": False, "check_grad_overflow": False}},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 7, "overlap_comm": True}},
        {"train_batch_size": 64, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ],
    ids=str,
)
def test_what_says_the_same_goes_on_without_a_word(same: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert resumed({}, same) == resumed(same, {}) == {}
    assert capsys.readouterr().out == ""


def test_another_precision_has_no_loss_scale_to_compare() -> None:
    static = {"fp16": {"enabled": True, "loss_scale": 128}}
    bf16 = {"bf16": {"enabled": True}}
    assert resumed(static, bf16) == resumed(bf16, static) == resumed(static, {}) == {}


def test_a_key_of_a_precision_is_not_said_where_that_itself_came_or_went(capsys: pytest.CaptureFixture[str]) -> None:
    static = {"fp16": {"enabled": True, "auto_cast": True, "fp16_master_weights_and_grads": True}}
    bf16 = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    assert resumed(static, bf16) == resumed(bf16, static) == resumed(bf16, {}) == {}
    assert capsys.readouterr().out == ""


def test_the_page_on_checkpoints_names_what_is_applied_and_what_is_refused() -> None:
    page = (REPO / "docs" / "checkpoints.md").read_text()
    assert [place for place in sorted(APPLIED | REFUSED) if f"`{place}`" not in page] == []


def test_a_checkpoint_of_an_older_version_has_nothing_to_compare() -> None:
    assert _of_arithmetic(cast(Any, None), "checkpoint-4", {}, {ARITHMETIC: {"gradient_clipping": 3}}) == {}
