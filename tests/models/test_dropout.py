"""Dropout on CPUs where torch draws slowly: the same distribution and gradients as torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from finetune.models import dropout
from finetune.models.dropout import Dropout, mask_like, use_fast_dropout

NUMBERS = 2**20


@pytest.fixture
def slow_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "draws_slowly", lambda: True)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_dropped_with_the_probability_and_the_others_scaled_as_torch_does(
    dtype: torch.dtype, p: float
) -> None:
    torch.manual_seed(0)
    mask = mask_like(torch.empty(NUMBERS, dtype=dtype), p)
    share = (mask == 0).double().mean().item()
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / NUMBERS) ** 0.5 + 2**-15)
    torch_scale = nn.functional.dropout(torch.ones(NUMBERS, dtype=dtype), p).max()
    assert mask.unique().tolist() == pytest.approx([0, torch_scale.item()], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neighbors_in_one_draw_are_independent(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dropped = (mask_like(torch.empty(NUMBERS, dtype=dtype), 0.5) == 0).double() - 0.5
    for apart in range(1, 9):
        correlation = 4 * (dropped[apart:] * dropped[:-apart]).mean().item()
        assert abs(correlation) < 5 / NUMBERS**0.5
    for lane in range(8 // dtype.itemsize):  # of a draw of 64 bits
        assert abs(dropped[lane :: 8 // dtype.itemsize].mean().item()) < 0.005


@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (5, 7, 3)])
def test_any_shape_is_masked(shape: tuple[int, ...]) -> None:
    assert mask_like(torch.empty(shape, dtype=torch.bfloat16), 0.1).shape == shape


def test_the_gradient_is_dropped_and_scaled_as_the_output(slow_draws: None) -> None:
    layer, x = Dropout(0.25), torch.ones(64, 8).T.requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(out, x.grad)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])


def test_the_seed_decides_what_is_dropped(slow_draws: None) -> None:
    layer, x = Dropout(0.5), torch.ones(100)
    state = torch.get_rng_state()
    first, second = layer(x), layer(x)
    torch.set_rng_state(state)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_or_everything_can_be_dropped(p: float, slow_draws: None) -> None:
    assert torch.equal(Dropout(p)(torch.ones(10)), torch.full((10,), 1 - p))


def test_a_model_keeps_its_rates_and_evaluates_as_before(slow_draws: None) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20,
                        hidden_dropout_prob=0.2, classifier_dropout=0.3)  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    ids = torch.arange(20)[None]
    names, before = [*model.state_dict()], model(input_ids=ids).logits
    rates = {name: one.p for name, one in model.named_modules() if isinstance(one, nn.Dropout)}
    use_fast_dropout(model)
    own = {name: one.p for name, one in model.named_modules() if isinstance(one, Dropout)}
    assert own == rates
    assert set(own.values()) >= {0.2, 0.3}
    assert [*model.state_dict()] == names
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.equal(model.train()(input_ids=ids).logits, before)


def test_draws_are_shared_out_only_where_torch_does_not_use_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    monkeypatch.setattr(dropout, "mask_like", lambda x, p: drawn.append(p) or torch.ones_like(x))
    for is_slow in (True, False):
        monkeypatch.setattr(dropout, "draws_slowly", lambda is_slow=is_slow: is_slow)
        Dropout(0.5)(torch.ones(8))
    assert drawn == [0.5]


# DeepSpeed's module fixes its process group, so it is made in a process of its own.
PIPELINE = """
import os
import sys
import torch
from torch import distributed, nn
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from finetune.models import dropout

dropout.draws_slowly = lambda: True
os.environ["LOCAL_RANK"] = "0"
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
deepspeed.init_distributed("gloo")
inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
pipeline = PipelineModule([nn.Linear(8, 8), nn.Dropout(0.5), LayerSpec(nn.Dropout, 0.5), inner], num_stages=1)
dropout.use_fast_dropout_in_layers(pipeline)
x = torch.ones(64, 8)
kinds = {type(one).__module__ for one in pipeline.modules() if isinstance(one, nn.Dropout)}
pipeline.train()
drops = not torch.equal(pipeline(x), pipeline(x))
pipeline.eval()
print("RESULT", drops, torch.equal(pipeline(x), pipeline(x)), sorted(kinds), type(inner[1]).__module__)
"""


def test_a_pipeline_with_dropout_as_a_layer_evaluates_without_it(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", PIPELINE, str(tmp_path / "meeting")], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    result = next(line for line in made.stdout.splitlines() if line.startswith("RESULT"))
    assert result == (
        "RESULT True True ['finetune.models.dropout', 'torch.nn.modules.dropout'] finetune.models.dropout"
    )
