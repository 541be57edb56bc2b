"""Batch norm over several ranks, kept as trained, and its replacement that looks at one picture at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batch_norm_ranks import ROWS, SHAPE, a_model, batch
from conftest import run_script
from torch import nn
from transformers import AutoModelForImageClassification, ResNetForImageClassification

from finetune.data.columns import Labels
from finetune.data.images import ImageAccount, ImageData
from finetune.errors import RequestError
from finetune.models.alexnet import AlexNetConfig
from finetune.models.batch_norm import (
    AllRanksBatchNorm,
    batch_norms,
    freeze_batch_norm,
    keep_statistics_in_fp32,
    synchronise_batch_norm,
)
from finetune.models.images import (
    ImageSource,
    build_image_classifier,
    find_image_source,
    image_pipeline,
    settled_image_config,
)
from finetune.models.resnet_group_norm import GroupNormResNetConfig, GroupNormResNetForImageClassification
from finetune.run.flags.images import ImageModelArguments
from finetune.run.sizes import ALEXNET_SIZES
from finetune.training.loss import honours_num_items_in_batch

SCRIPT = Path(__file__).with_name("batch_norm_ranks.py")


def test_over_all_ranks_it_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    run_script(SCRIPT, [tmp_path], 2)
    found = torch.load(tmp_path / "found.pt")
    model = a_model()
    pictures, labels = batch()
    model(pictures, labels=labels).loss.backward()
    for mine, theirs in zip(found["grads"], (p.grad for p in model.parameters()), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5, rtol=1e-3)
    expected = model.state_dict()
    assert found["state"].keys() == expected.keys(), "it must save as a plain one"
    for name, value in expected.items():
        assert torch.allclose(found["state"][name].float(), value.float(), atol=1e-5), name

    # Without it, the running statistics are the mean of both ranks' after each step.
    halves = []
    for rank in range(2):
        alone = a_model()
        alone(pictures[rank * ROWS // 2 : (rank + 1) * ROWS // 2])
        halves.append(alone.state_dict())
    names = [name for name in expected if "running" in name]
    assert names
    for name in names:
        assert torch.allclose(found["alone"][name], (halves[0][name] + halves[1][name]) / 2, atol=1e-6), name
    assert any(not torch.allclose(halves[0][name], halves[1][name], rtol=0.05) for name in names)


def test_a_single_process_keeps_plain_batch_norm() -> None:
    assert not any(isinstance(norm, AllRanksBatchNorm) for norm in batch_norms(synchronise_batch_norm(a_model())))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_cast_as_deepspeed_casts_it_keeps_statistics_in_fp32(frozen: bool) -> None:
    """DeepSpeed casts parameters and leaves buffers, which torch's own batch norm refuses."""
    models = [a_model(), a_model()]
    keep_statistics_in_fp32(models[0])
    for weight in models[0].parameters():
        weight.data = weight.data.bfloat16()
    pictures, labels = batch()
    for model in models:
        if frozen:
            freeze_batch_norm(model)
        model(pictures.to(model.dtype), labels=labels).loss.backward()
        assert all(weight.grad is not None for weight in model.parameters())
    cast, plain = (model.state_dict() for model in models)
    assert cast.keys() == plain.keys(), "it must save as a plain one"
    for name in (name for name in plain if "running" in name):
        assert cast[name].dtype == torch.float32
        assert torch.allclose(cast[name], plain[name], atol=0.02, rtol=0.02), name
    logits = [model.eval()(pictures.to(model.dtype)).logits.float() for model in models]
    assert torch.allclose(*logits, atol=0.1)


def test_a_frozen_one_normalises_as_in_evaluation_and_gathers_nothing() -> None:
    model = a_model()
    pictures, _ = batch()
    model(pictures)  # gathers some statistics
    expected = model.eval()(pictures).logits
    before = {name: value.clone() for name, value in model.state_dict().items()}
    freeze_batch_norm(model)
    assert torch.equal(model.train()(pictures).logits, expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_group_norm_makes_each_picture_independent_and_opens_again(tmp_path: Path) -> None:
    model = GroupNormResNetForImageClassification(GroupNormResNetConfig(**SHAPE)).train()
    assert not batch_norms(model)
    assert sum(isinstance(module, nn.GroupNorm) for module in model.modules()) > 4
    pictures, _ = batch()
    whole = model(pictures).logits
    assert torch.allclose(whole[:2], model(pictures[:2]).logits, atol=1e-5)
    plain = a_model().train()
    assert not torch.allclose(plain(pictures).logits[:2], plain(pictures[:2]).logits, atol=1e-2)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(again) is GroupNormResNetForImageClassification
    assert torch.equal(again.eval()(pictures).logits, model.eval()(pictures).logits)


def test_a_resnet_does_not_divide_by_the_items_that_the_trainer_counts() -> None:
    """So the Trainer must be told not to multiply its loss."""
    assert honours_num_items_in_batch(a_model()) is False


def data(side: int) -> ImageData:
    account = ImageAccount("a test", False, {"train": 1}, {}, {}, side, [], [0.5] * 3, [0.5] * 3, [])
    return ImageData({}, Labels("classification", ("a", "b")), account, None, {})


def build(side: int = 32, **flags: object) -> object:
    arguments = ImageModelArguments(**flags)  # type: ignore[arg-type]
    source = find_image_source(arguments, None)
    config = settled_image_config(arguments, source, data(side), will_train=True)
    return build_image_classifier(arguments, source, config, side, seed=1)


def test_resnet18_is_the_published_network() -> None:
    arguments = ImageModelArguments(model_size="resnet18")
    source = find_image_source(arguments, None)
    config = settled_image_config(arguments, source, data(224), will_train=True)
    config.num_labels = 1000
    with torch.device("meta"):
        model = ResNetForImageClassification(config)
    assert model.num_parameters() == 11_689_512  # torchvision's documentation, ResNet18_Weights.num_params


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param({"sync_batch_norm": True, "norm": "group"}, "the model has no batch norm", id="nothing to sync"),
        pytest.param({"model_type": "alexnet", "model_size": "original"}, "too small for this alexnet", id="too small"),
        pytest.param({"model_name_or_path": "./nowhere"}, "there is no such folder", id="no folder"),
    ],
)
def test_flags_that_contradict_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(**flags)


@pytest.mark.parametrize("flag", ["sync_batch_norm", "freeze_batch_norm"])
def test_a_pipeline_refuses_flags_of_batch_norm(flag: str, tmp_path: Path) -> None:
    config = AlexNetConfig(**ALEXNET_SIZES["tiny"], num_labels=2)
    source = ImageSource(config, None, str(tmp_path), None)
    arguments = ImageModelArguments(model_name_or_path=str(tmp_path), **{flag: True})
    with pytest.raises(RequestError, match=f"--{flag}: the model has no batch norm"):
        image_pipeline(arguments, source, config, seed=1)


def test_a_resnet_is_no_pipeline() -> None:
    arguments = ImageModelArguments()
    source = find_image_source(arguments, None)
    config = settled_image_config(arguments, source, data(32), will_train=True)
    with pytest.raises(
        RequestError, match=r"only an alexnet runs as a pipeline.*Drop it, or give --model_type alexnet"
    ):
        image_pipeline(arguments, source, config, seed=1)
