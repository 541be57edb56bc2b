"""What gets an adapter in a mixture of experts: linear layers, and experts that are named."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_experts import DEEPSEEK, LOCAL, SHAPE
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from finetune.errors import RequestError
from finetune.models.adapters import targets_of
from finetune.run.flags.adapter import AdapterArguments


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**LOCAL))


def targets(*names: str, model: torch.nn.Module | None = None, **more: object) -> tuple[list[str] | str, list[str]]:
    return targets_of(model or mixtral(), AdapterArguments(lora_target_modules=list(names) or None, **more))


def test_by_default_experts_and_routers_get_none() -> None:
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert targets() == targets("all-linear") == (attention, [])
    adapted = get_peft_model(mixtral(), LoraConfig(target_modules=attention))
    assert {name.split(".")[-4] for name, one in adapted.named_parameters() if one.requires_grad} == set(attention)
    assert targets(model=LlamaForCausalLM(LlamaConfig(**SHAPE))) == ("all-linear", [])


def test_experts_are_adapted_if_they_are_named() -> None:
    assert targets("q_proj", "down_proj") == (["q_proj"], ["experts.down_proj"])
    assert targets("experts.gate_up_proj", "mlp.experts.down_proj")[1] == ["experts.down_proj", "experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (("nothing",), {}, r"nothing: no linear layer has this name.*q_proj \(2\).*of experts: experts\.gate_up_proj"),
        (("down_proj",), {"lora_dropout": 0.1}, r"--lora_dropout 0\.1: peft has no such adapter for experts"),
        (("down_proj",), {"lora_use_dora": True}, "--lora_use_dora True: peft has no such adapter"),
    ],
)
def test_what_experts_cannot_have_is_refused(names: tuple[str, ...], more: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        targets(*names, **more)
    assert targets("q_proj", **more) == (["q_proj"], [])


def test_a_name_that_peft_takes_for_experts_is_refused_for_other_layers() -> None:
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
    with pytest.raises(RequestError, match=r"gate_proj: peft takes this name for a part of the experts' tensors"):
        targets("gate_proj", model=model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["gate_proj", "up_proj"]))  # this is why
    trained = [name for name, one in adapted.named_parameters() if one.requires_grad]
    assert all(".experts." in name for name in trained)
