"""What is counted as work, and whose peak it is held against."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig, TrainerControl

from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.multiplied import multiplied_parameters
from finetune.training import speed
from finetune.training.speed import SpeedMeter, by_steady_clock, peak_flops


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_counted_once_and_an_embedding_that_is_only_looked_up_never(tied: bool) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    model = GPTLiteForCausalLM(GPTLiteConfig(**shape, max_position_embeddings=8, tie_word_embeddings=tied))
    body = sum(p.numel() for p in model.transformer.parameters()) - 50 * 16
    assert multiplied_parameters(model) == body + 50 * 16


SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 50}
GATED = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "num_experts_per_tok": 2}
APART = {"moe_intermediate_size": 12, "num_experts": 8}


@pytest.mark.parametrize(
    ("config", "an_expert", "idle", "layers"),
    [
        (MixtralConfig(**GATED, num_local_experts=8), 3 * 24 * 16, 6, 3),
        (Qwen3MoeConfig(**GATED, **APART, mlp_only_layers=[0]), 3 * 12 * 16, 6, 2),
        (Qwen2MoeConfig(**GATED, **APART, shared_expert_intermediate_size=20), 3 * 12 * 16, 6, 3),
        (GPTLiteConfig(**SIZES, num_experts=4, num_experts_per_tok=1), 2 * 64 * 16, 3, 3),
    ],
    ids=["Mixtral", "Qwen3, one layer dense", "Qwen2, with a shared expert", "GPT-lite"],
)
def test_of_the_experts_a_token_is_multiplied_by_those_that_it_gets(
    config: Any, an_expert: int, idle: int, layers: int
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    every = sum(p.numel() for p in model.parameters()) - 50 * 16  # the embedding
    assert multiplied_parameters(model) == every - layers * idle * an_expert


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("Tesla T4", 65e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
    ],
)
def test_a_card_has_its_own_peak_or_none(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the cards themselves cost money
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_flops() == peak


@pytest.mark.parametrize("masked", [True, False])
def test_real_tokens_are_those_that_the_mask_shows(masked: bool) -> None:
    meter = SpeedMeter(10, 1)
    for real in (3, 5):
        inputs: dict[str, Any] = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}
        if masked:
            inputs["attention_mask"] = (torch.arange(8) < real).view(2, 4).long()
        meter.count(inputs)
    meter._window_seconds, meter._window_steps = 2.0, 2
    figures = meter.window(lambda counted: counted)
    assert figures["samples_per_second"] == 2
    assert figures["real_tokens_per_second"] == (4 if masked else 8)
    assert figures["padding_share"] == (0.5 if masked else 0)


def test_a_row_of_two_texts_is_one_sample() -> None:
    meter = SpeedMeter(10, 1)
    meter.count({"labels": torch.ones(2, dtype=torch.long), "input_ids": torch.zeros(4, 3, dtype=torch.long)})
    meter._window_seconds, meter._window_steps = 1.0, 1
    assert meter.window(lambda counted: counted)["samples_per_second"] == 2


def test_closing_figures_are_by_a_clock_that_nobody_sets() -> None:
    told = {"train_runtime": -86_390.0, "train_samples_per_second": -1.0, "train_steps_per_second": -0.1}
    mended = by_steady_clock(told, 10.0)
    assert mended == {"train_runtime": 10.0, "train_samples_per_second": 8639.0, "train_steps_per_second": 863.9}
    assert by_steady_clock({**told, "train_runtime": 10.2}, 10.0) == {}


@pytest.mark.parametrize(("slow_every", "p95"), [(8, 3.0), (50, 1.0)])
def test_step_times_take_no_more_memory_in_a_longer_run_and_keep_the_share_of_slow_steps(
    slow_every: int, p95: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "KEPT_STEPS", 512)
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    meter, control = SpeedMeter(10, 1), TrainerControl()
    for step in range(1, 10_001):
        meter.count({"input_ids": torch.zeros(1, 4, dtype=torch.long)})
        meter.on_step_begin(None, None, control)
        clock[0] += 3.0 if step % slow_every == 0 else 1.0
        meter.on_step_end(None, None, control)
    assert len(meter.step_seconds) == 512
    found = meter.summary(lambda counted: counted)
    assert (found["step_seconds_median"], found["step_seconds_p95"]) == (1.0, p95)
    assert found["samples_per_second"] == pytest.approx(10_000 / clock[0]), "of all steps"
