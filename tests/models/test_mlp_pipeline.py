"""The benchmark MLP as a list of layers is the model, and its samples are the same whoever reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import default_data_collator

from finetune.bench.data import MadeUp, build
from finetune.bench.meter import bytes_by_kind
from finetune.bench.models import PRESETS, find_model
from finetune.models.mlp import MLPConfig, MLPForClassification

SCALE = 0.02


def test_the_layers_have_the_names_and_weights_of_the_model() -> None:
    config = MLPConfig(width=16, layers=3, num_labels=5)
    model = MLPForClassification(config)
    model.draw_weights(7)
    layers = MLPForClassification.pipeline(config, seed=7)
    built = [layer.build() for layer in layers.layers]
    weights = {
        layer.weight_name(name): weight
        for layer, one in zip(layers.layers, built, strict=True)
        for name, weight in one.named_parameters()
    }
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())
    inputs, labels = layers.split({"inputs": torch.randn(6, 16), "labels": torch.arange(6) % 5})
    loss = layers.loss(nn.Sequential(*built)(inputs), labels).item() / layers.items(labels).item()
    assert loss == pytest.approx(model(inputs=inputs, labels=labels).loss.item(), abs=1e-6)


def test_layers_of_one_seed_differ_from_one_another() -> None:
    first, second = (
        MLPForClassification.pipeline(MLPConfig(width=8, layers=2), seed=7).layers[i].build() for i in (0, 1)
    )
    assert not torch.equal(first.linear.weight, second.linear.weight)


def test_the_class_is_the_sum_of_squares_modulo_the_classes() -> None:
    what = find_model("wide", SCALE)
    sample = MadeUp(what, 10, seed=3)[4]
    numbers = sample["inputs"]
    assert numbers.abs().max() < 1
    assert numbers.min() < -0.5
    assert sample["labels"] == int((numbers.double() ** 2).sum()) % what.config["num_labels"]


@pytest.mark.parametrize("name", PRESETS)
def test_samples_are_those_of_their_index_and_the_model_takes_them(name: str) -> None:
    what = find_model(name, SCALE)
    here, there = MadeUp(what, 8, seed=3), MadeUp(what, 99, seed=3)
    assert all(torch.equal(here[5][key], there[5][key]) for key in here[5])
    key = next(iter(here[5]))
    assert not torch.equal(here[5][key], here[6][key])
    assert not torch.equal(here[5][key], MadeUp(what, 8, seed=4)[5][key])
    loss = build(what, 1)(**default_data_collator([here[i] for i in range(4)])).loss
    assert torch.isfinite(loss)


def test_a_made_up_text_has_the_same_targets_in_a_pipeline() -> None:
    what = find_model("gptlite", SCALE)
    here, there = (MadeUp(what, 1, 3, for_pipeline)[0] for for_pipeline in (False, True))
    assert torch.equal(here["input_ids"], there["input_ids"])
    assert there["shift_labels"].tolist() == [*here["labels"][1:].tolist(), -100]


def test_memory_is_told_by_kind_and_no_storage_is_counted_twice() -> None:
    model = build(find_model("wide", SCALE), 1)
    size = sum(p.numel() for p in model.parameters()) * 4
    optimizer = torch.optim.AdamW(model.parameters())
    model(**default_data_collator([MadeUp(find_model("wide", SCALE), 2, 1)[i] for i in (0, 1)])).loss.backward()
    optimizer.step()
    kinds = bytes_by_kind(model, optimizer, "cpu")
    steps = 4 * len(list(model.parameters()))  # one fp32 number each
    assert kinds == {"parameters": size, "gradients": size, "optimizer states": 2 * size + steps, "buffers": 0}
