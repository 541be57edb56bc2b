"""AlexNet as a model and as a list of layers: the same function, the same weights, whoever builds them."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageClassification

from finetune.models.alexnet import (
    LAYERS,
    AlexNetConfig,
    AlexNetForImageClassification,
)
from finetune.run.sizes import ALEXNET_SIZES
from finetune.training.loss import honours_num_items_in_batch
from finetune.training.pipeline.evaluation import StageLoss


def a_model(seed: int = 3, **changes: Any) -> AlexNetForImageClassification:
    config = AlexNetConfig(**{**ALEXNET_SIZES["tiny"], "num_labels": 10, "dropout": 0.0, **changes})
    model = AlexNetForImageClassification(config)
    model.draw_weights(seed)
    return model


@pytest.mark.parametrize(
    ("size", "pixels", "channels", "parameters"),
    [
        pytest.param("tiny", 8, 1, None, id="digits"),
        pytest.param("small", 32, 3, None, id="CIFAR"),
        # torchvision's alexnet, which is this layout: 61,100,840 (its documentation, AlexNet_Weights.num_params).
        pytest.param("original", 224, 3, 61_100_840, id="the paper's"),
    ],
)
def test_each_size_reads_the_pictures_it_is_for(size: str, pixels: int, channels: int, parameters: int | None) -> None:
    config = AlexNetConfig(**ALEXNET_SIZES[size], num_channels=channels, num_labels=1000)
    with torch.device("meta"):
        model = AlexNetForImageClassification(config)
        logits = model(torch.ones(2, channels, pixels, pixels)).logits
    assert logits.shape == (2, 1000)
    assert parameters in (None, model.num_parameters())


def test_layers_built_apart_and_in_any_order_are_the_model() -> None:
    model = a_model()
    found: dict[str, torch.Tensor] = {}
    layers = AlexNetForImageClassification.pipeline(model.config, seed=3).layers
    built = {index: layers[index].build() for index in reversed(range(LAYERS))}
    for index, module in built.items():
        found |= {layers[index].weight_name(name): p for name, p in module.named_parameters()}
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    pictures = x = torch.randn(4, 3, 32, 32)
    for index in range(LAYERS):
        x = built[index](x)
    assert torch.equal(x, model(pictures).logits)


def test_the_loss_of_micro_batches_of_uneven_size_adds_up() -> None:
    model = a_model()
    assert honours_num_items_in_batch(model)
    pictures, labels = torch.randn(5, 3, 16, 16), torch.arange(5)
    parts = [model(pictures[part], labels[part], num_items_in_batch=5).loss for part in (slice(0, 2), slice(2, 5))]
    assert sum(part.item() for part in parts) == pytest.approx(model(pictures, labels).loss.item(), rel=1e-6)


def test_an_evaluation_sums_a_confusion_matrix_once_and_leaves_filling_out() -> None:
    model = a_model()
    pictures, labels = torch.randn(5, 3, 16, 16), torch.arange(5)
    pipeline = AlexNetForImageClassification.pipeline(model.config, seed=3)
    evaluation = StageLoss(pipeline, shares=1)
    evaluation.real_rows = deque([3, 2])
    for part in (slice(0, 3), slice(3, 5)):
        filled = [torch.cat([rows[part], rows[:1].expand(2, *rows.shape[1:])]) for rows in (pictures, labels)]
        evaluation(model(filled[0]).logits, filled[1])
    figures = evaluation.figures  # (1 + classes^2)
    assert figures is not None
    assert figures[0].item() / 5 == pytest.approx(model(pictures, labels).loss.item(), rel=1e-6)
    counts = figures[1:].reshape(10, 10)
    assert counts.sum(dim=1).tolist() == [1.0] * 5 + [0.0] * 5
    of_many = pipeline.figures(torch.randn(64, 1000), torch.arange(64))
    assert of_many.shape == (1, 1 + 1000**2), "a row of it for each picture would be 0.5 GiB"


def test_the_first_loss_is_that_of_a_guess() -> None:
    loss = a_model()(torch.randn(64, 3, 32, 32), torch.arange(64) % 10).loss.item()
    assert loss == pytest.approx(math.log(10), abs=0.1)


def test_a_saved_one_opens_by_its_auto_class(tmp_path: Path) -> None:
    model = a_model()
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    pictures = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(pictures).logits, model(pictures).logits)


def test_weights_in_bf16_take_pictures_as_they_come() -> None:
    """DeepSpeed's pipeline engine casts weights, not what goes in."""
    config = AlexNetConfig(**{**ALEXNET_SIZES["tiny"], "num_labels": 10})
    model = AlexNetForImageClassification(config).to(torch.bfloat16)
    assert model(torch.ones(2, 3, 32, 32)).logits.dtype == torch.bfloat16
