"""A pipeline's parts, each by itself and without a launch: who reads which samples, what a step's loss and figures are,
how layers are cut and looked at, whose weights are whose, and how a step that was timed is put together."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import distributed, nn
from transformers import TrainingArguments

from finetune.data.sampling import GlobalBatchSampler
from finetune.errors import RequestError
from finetune.models.mlp import MLPConfig, MLPForClassification
from finetune.models.pipeline import PipelineLayer, PipelineModel, sequential_layers
from finetune.plan.schedule import BACKWARD, FORWARD, Event, Schedule, simulate
from finetune.training.pipeline.batches import EvaluationShard, TrainingShard
from finetune.training.pipeline.checkpoint import Checkpoints
from finetune.training.pipeline.costs import LayerCost, _look, measure_layers
from finetune.training.pipeline.engine import UNUSED, _optimizer
from finetune.training.pipeline.evaluation import StageLoss, note_best
from finetune.training.pipeline.files import FlatStates, file_name, find_tensors, read_tensor, saved_states
from finetune.training.pipeline.partition import describe
from finetune.training.pipeline.stages import Cut, MemoryRule, check_cut, cut, owned
from finetune.training.pipeline.trace import _numbered, _without_gaps, measured, plan_from

# Samples


@given(
    size=st.integers(1, 90),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    pipelines=st.integers(1, 3),
    data=st.data(),
)
def test_pipelines_share_each_global_batch_and_go_on_where_they_were(
    size: int, micro: int, accumulation: int, pipelines: int, data: st.DataObject
) -> None:
    total = micro * accumulation * pipelines
    sampler = GlobalBatchSampler(size, total, 5)
    order = list(sampler)
    steps = len(order) // total
    first = data.draw(st.integers(0, steps))
    shards = [list(TrainingShard(sampler, micro, p, pipelines, first)) for p in range(pipelines)]
    for shard, p in zip(shards, range(pipelines), strict=True):
        assert len(shard) == len(TrainingShard(sampler, micro, p, pipelines, first)) == (steps - first) * accumulation
        assert all(len(batch) == micro for batch in shard)
    # Micro-batch i of the order is the pipeline's i modulo their number, as accelerate deals them out.
    dealt = [shards[i % pipelines][i // pipelines] for i in range((steps - first) * accumulation * pipelines)]
    assert [index for batch in dealt for index in batch] == order[first * total :]


@given(size=st.integers(1, 60), micro=st.integers(1, 5), pipelines=st.integers(1, 4))
def test_an_evaluation_reads_each_sample_once_in_equally_many_micro_batches(
    size: int, micro: int, pipelines: int
) -> None:
    shards = [EvaluationShard(size, micro, p, pipelines) for p in range(pipelines)]
    assert {len(shard) for shard in shards} == {-(-size // (micro * pipelines))}
    seen: list[int] = []
    for shard in shards:
        for indices, real in zip(shard, shard.real_rows, strict=True):
            assert len(indices) == micro
            assert set(indices[real:]) <= {0}
            seen += indices[:real]
    assert sorted(seen) == list(range(size))
    assert shards[0].indices[0][0] == 0
    assert [shard.indices[0][: shard.real_rows[0]] for shard in shards] == [
        list(range(p * micro, min((p + 1) * micro, size))) for p in range(pipelines)
    ]


# The loss


def loss_of(shares: int) -> StageLoss:
    model = SimpleNamespace(
        loss=lambda out, labels: (out * labels).sum(),
        items=lambda labels: (labels > 0).sum(),
        figures=lambda out, labels: torch.stack([out.sum(1), labels.sum(1)], dim=1),
    )
    return StageLoss(model, shares)  # type: ignore[arg-type]


def test_micro_batches_and_pipelines_make_the_mean_over_the_items_of_the_global_batch() -> None:
    """DeepSpeed takes the mean of what each of 2 x 3 micro-batches gives."""
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 4, generator=generator) for _ in range(6)]
    labels = [torch.randint(0, 3, (2, 4), generator=generator).float() for _ in range(6)]
    items = sum(int((some > 0).sum()) for some in labels)
    one = loss_of(6)
    one.items = torch.tensor(items)
    mean = sum(float(one(out, some)) for out, some in zip(outputs, labels, strict=True)) / 6
    expected = sum(float((out * some).sum()) for out, some in zip(outputs, labels, strict=True)) / items
    assert mean == pytest.approx(expected, rel=1e-6)


def test_items_are_counted_over_all_micro_batches_and_are_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 1)
    one = loss_of(2)
    one.count([torch.tensor([1, 0, 2]), torch.tensor([3, 3, 3])], None, torch.device("cpu"))
    assert int(one.items) == 5
    one.count([torch.tensor([0, 0])], None, torch.device("cpu"))
    assert int(one.items) == 1
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda items, group: items.mul_(3))
    one.count([torch.tensor([1, 0, 2])], None, torch.device("cpu"))
    assert int(one.items) == 6


def test_an_evaluation_sums_the_figures_of_real_rows_alone() -> None:
    one = loss_of(2)
    one.real_rows = deque([2, 1])
    outputs, labels = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    assert float(one(outputs, labels)) == 0.0
    assert float(one((outputs + 10), labels)) == 0.0
    assert one.figures is not None
    assert one.figures.dtype == torch.float64
    assert one.figures.tolist() == [15.0 + 33.0, 6.0 + 3.0]
    assert not one.real_rows


@pytest.mark.parametrize(
    ("greater", "values", "best"), [(True, [1.0, 3.0, 3.0, 2.0], 2), (False, [3.0, 1.0, 1.0, 2.0], 2)]
)
def test_the_best_evaluation_is_the_first_of_the_best(greater: bool, values: list[float], best: int) -> None:
    args = SimpleNamespace(metric_for_best_model="eval_score", greater_is_better=greater)
    state = SimpleNamespace(best_metric=None, best_global_step=None, global_step=0)
    found = []
    for step, value in enumerate(values, 1):
        state.global_step = step
        found.append(note_best(args, state, {"eval_score": value}))
    assert found == [True, True, False, False]
    assert (state.best_metric, state.best_global_step) == (values[1], best)
    assert note_best(SimpleNamespace(metric_for_best_model=None), state, {}) is False
    plain = SimpleNamespace(metric_for_best_model="score", greater_is_better=greater)
    assert note_best(plain, state, {"eval_score": 9.0 if greater else 0.0}) is True


# Layers


def cost(parameters: int, seconds: float = 3.0, kept: int = 0) -> LayerCost:
    return LayerCost(parameters, parameters, seconds / 3, seconds * 2 / 3, kept)


class Block(nn.Module):
    def __init__(self, inner: int = 4) -> None:
        super().__init__()
        self.inside = nn.Linear(4, inner)
        self.outside = nn.Linear(inner, 4)

    def forward(self, x: Any) -> Any:
        return self.outside(self.inside(x).relu())


def three_layers() -> PipelineModel:
    return PipelineModel(
        layers=sequential_layers([nn.Linear(6, 4), Block(), Block(32), Block(), nn.Linear(4, 2)]),
        split=lambda batch: (batch["x"], batch["y"]),
        loss=lambda out, y: nn.functional.cross_entropy(out, y, reduction="sum"),
        items=lambda y: torch.tensor(len(y)),
        figures=lambda out, y: torch.zeros(len(y), 1),
        checkpointed=("Block",),
    )


def test_layers_are_measured_by_what_they_hold_and_keep() -> None:
    model, rows = three_layers(), 8
    batch = {"x": torch.randn(rows, 6), "y": torch.zeros(rows, dtype=torch.long)}
    state = torch.get_rng_state()
    costs, handed_on = measure_layers(model, batch, torch.device("cpu"), torch.float32, recomputes=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [one.parameters for one in costs] == [28, 40, 292, 40, 10]
    assert [one.held for one in costs] == [28, 40, 292, 40, 10]
    assert costs[1] == costs[3], "layers that are alike are measured once"
    assert costs[1] != costs[2]
    assert handed_on.shape == (rows, 4)
    assert all(one.forward_seconds > 0 and one.backward_seconds > 0 for one in costs)
    # In fp32: a linear layer keeps its input; a block its own, and the hidden numbers once more, as relu left them.
    assert costs[0].activation_bytes == 4 * rows * 6
    assert costs[1].activation_bytes == 4 * rows * (4 + 4)
    assert costs[2].activation_bytes == 4 * rows * (4 + 32)
    again, _ = measure_layers(model, batch, torch.device("cpu"), torch.float32, recomputes=True)
    assert [one.activation_bytes for one in again[1:4]] == [4 * rows * 4] * 3
    assert again[0].activation_bytes == costs[0].activation_bytes, "which may not be recomputed"
    halves, _ = measure_layers(model, batch | {"x": batch["x"].bfloat16()}, torch.device("cpu"), torch.bfloat16, False)
    assert halves[2].activation_bytes == costs[2].activation_bytes / 2


def test_a_tied_weight_is_held_twice_and_owned_once() -> None:
    tied = nn.Linear(3, 3, bias=False)
    layers = [PipelineLayer(tied, "embed"), PipelineLayer(nn.Linear(3, 2), "middle"), PipelineLayer(tied, "embed")]
    looks = _look(layers)
    assert [(look.own, look.held) for look in looks] == [(9, 9), (8, 8), (0, 9)]
    parts = Cut(layers, [cost(1)] * 3, [0, 1, 3], 4, 0.0, "uniform")
    assert owned(parts, 0) == {"embed.weight"}
    assert owned(parts, 1) == {"middle.weight", "middle.bias"}


def parts_of(seconds: list[float], bounds: list[int], micro_batches: int = 4, transfer: float = 0.0) -> Cut:
    layers = sequential_layers([nn.Linear(2, 2) for _ in seconds])
    return Cut(layers, [cost(6, each) for each in seconds], bounds, micro_batches, transfer, "balanced")


def test_a_cut_says_what_each_stage_has() -> None:
    found = parts_of([3.0, 3.0, 6.0, 12.0], [0, 3, 4])
    assert found.stages == 2
    assert found.sums(lambda one: one.parameters) == [18, 6]
    assert found.balance == 1.0
    assert parts_of([3.0, 9.0], [0, 1, 2]).balance == pytest.approx(12 / (2 * 9))
    lines = found.table()
    assert lines[1].split() == ["0", "0-2", "18", "50.0%", "3", "x", "Linear"]
    assert lines[2].split() == ["1", "3", "6", "50.0%", "Linear"]
    planned = parts_of([3.0, 6.0], [0, 1, 2], micro_batches=3, transfer=0.5).plan()
    assert planned == simulate(3, [1.0, 2.0], [2.0, 4.0], 0.5)


def test_the_start_says_how_much_of_a_step_is_work() -> None:
    lines = describe(parts_of([3.0, 9.0], [0, 1, 2], micro_batches=4))
    # 4 / (4 + 2 - 1) of the time is left by the bubble, and of that 12 / 18 by the stages' balance.
    assert "4/(4+2-1) x balance = 80% x 0.67 = 53% of the stages' time is work" in lines[-1]
    makespan = parts_of([3.0, 9.0], [0, 1, 2], micro_batches=4).plan().makespan
    assert f"{makespan * 1e3:.0f} ms for 4 micro-batches" in lines[-1]
    few = describe(parts_of([3.0, 3.0, 3.0], [0, 1, 2, 3], micro_batches=2))
    assert "2 is less than the 3 stages: 50% of their time is lost to waiting. Raise it to about 12" in few[-1]
    assert "warning" not in describe(parts_of([3.0, 3.0], [0, 1, 2], micro_batches=2))[-1]


def test_more_stages_than_layers_and_classes_of_none_are_refused_before_anything_is_measured() -> None:
    layers = sequential_layers([nn.Linear(2, 2), Block(), nn.Linear(2, 2)])
    check_cut(layers, "uniform", 3)
    with pytest.raises(RequestError, match=r"is 4, but the model has only 3 layers\. Give at most 3\."):
        check_cut(layers, "uniform", 4)
    check_cut(layers, "type:block", 2)
    with pytest.raises(RequestError, match=r"no layer class matches\. The layers are Linear, Block, Linear"):
        check_cut(layers, "type:Conv", 2)
    costs = [cost(2), cost(2), cost(2)]
    assert cut(layers, costs, "type:linear", 2, 4, MemoryRule(1, None)) == [0, 2, 3]


def test_the_optimizer_has_two_groups_on_every_stage(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), weight_decay=0.3, learning_rate=0.25, use_cpu=True, report_to=[])
    module = Block()
    named = {f"model.{name}": p for name, p in module.named_parameters()}
    optimizer, groups = _optimizer(module, named, args)
    decays, rests = optimizer.param_groups
    assert (decays["weight_decay"], rests["weight_decay"], decays["lr"]) == (0.3, 0.0, 0.25)
    assert [sorted(group) for group in groups] == [
        ["model.inside.weight", "model.outside.weight"],
        ["model.inside.bias", "model.outside.bias"],
    ]
    head = nn.Linear(4, 2, bias=False)
    _, groups = _optimizer(head, dict(head.named_parameters()), args)
    assert [sorted(group) for group in groups] == [["weight"], [UNUSED]]
    assert dict(head.named_parameters())[UNUSED].tolist() == [0.0]


# Files


def test_files_of_stages_have_the_names_that_transformers_knows() -> None:
    assert file_name("model", 0, 1) == "model.safetensors"
    assert [file_name("model", stage, 3) for stage in range(3)] == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]


def test_states_are_found_by_name_in_however_many_files_and_filled_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two data-parallel ranks: of six and five elements the flat tensor has eleven and one of padding, six a rank."""
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(10.0, 15.0), "c": torch.tensor([20.0, 21.0])}
    save_file({"exp_avg:a": weights["a"]}, tmp_path / "optimizer-00001-of-00002.safetensors")
    save_file({"exp_avg:b": weights["b"], "exp_avg:c": weights["c"]}, tmp_path / "optimizer-00002-of-00002.safetensors")
    save_file({"a": weights["a"]}, tmp_path / "model.safetensors")
    assert {name: path.name[10:15] for name, path in find_tensors(tmp_path, "optimizer").items()} == {
        "exp_avg:a": "00001",
        "exp_avg:b": "00002",
        "exp_avg:c": "00002",
    }
    assert torch.equal(read_tensor(find_tensors(tmp_path, "model"), "a"), weights["a"])
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    named = [{"a": nn.Parameter(torch.empty(2, 3)), "b": nn.Parameter(torch.empty(5))}]
    named.append({"c": nn.Parameter(torch.empty(2)), UNUSED: nn.Parameter(torch.empty(1))})
    halves = {}
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "get_rank", lambda group, rank=rank: rank)
        flats = [nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(2))]
        adam = torch.optim.AdamW([{"params": [flat]} for flat in flats])
        states = FlatStates(adam, named, None)
        assert states.steps() is None
        states.fill(*saved_states(tmp_path), 7.0)
        assert states.steps() == 7.0
        halves[rank] = [adam.state[flat]["exp_avg"] for flat in flats]
    assert torch.cat([halves[0][0], halves[1][0]]).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 0]
    assert torch.cat([halves[0][1], halves[1][1]]).tolist() == [20, 21, 0, 0]

    def gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        at = 0 if own.numel() == 6 else 1
        for part, half in zip(parts, (halves[0][at], halves[1][at]), strict=True):
            part.copy_(half)

    monkeypatch.setattr(distributed, "all_gather", gather)
    whole = dict(states.whole({"a", "b", "c"}))
    assert {name: value.tolist() for name, value in whole.items()} == {
        f"exp_avg:{name}": value.tolist() for name, value in weights.items()
    }
    assert dict(states.whole({"b"})).keys() == {"exp_avg:b"}


def test_of_a_loss_scale_the_numbers_are_kept() -> None:
    def kept(fp16: bool, **optimizer: Any) -> dict[str, Any]:
        engine = SimpleNamespace(optimizer=SimpleNamespace(**optimizer), fp16_enabled=lambda: fp16)
        return Checkpoints._loss_scale(SimpleNamespace(built=SimpleNamespace(engine=engine)))  # type: ignore[arg-type]

    scaler = SimpleNamespace(cur_scale=8.0, cur_iter=3, name="x")
    assert kept(False) == kept(False, loss_scaler=scaler) == {}
    assert kept(True, loss_scaler=scaler) == {"cur_scale": 8.0, "cur_iter": 3}


# The recorded step


def test_a_computation_lasts_until_the_rank_does_something_else_and_a_transfer_does_not() -> None:
    found = [(FORWARD, (0.0, 1.0)), ("send down", (1.5, 2.0)), (BACKWARD, (3.0, 4.0)), (FORWARD, (6.0, 7.0))]
    assert _without_gaps(found) == [
        (FORWARD, (0.0, 1.5)),
        ("send down", (1.5, 2.0)),
        (BACKWARD, (3.0, 6.0)),
        (FORWARD, (6.0, 7.0)),
    ]
    assert _without_gaps([]) == []


def test_intervals_of_a_kind_are_of_one_micro_batch_after_another() -> None:
    found = [(FORWARD, (0.0, 1.0)), (FORWARD, (1.0, 2.0)), (BACKWARD, (2.0, 3.0))]
    assert list(_numbered(found)) == [(FORWARD, 0), (FORWARD, 1), (BACKWARD, 0)]


def test_a_transfer_begins_when_both_ends_have_come_to_it() -> None:
    first = [(FORWARD, (0.0, 2.0)), ("send down", (2.0, 5.0)), ("receive up", (5.0, 9.0)), (BACKWARD, (9.0, 11.0))]
    second = [("receive down", (0.0, 5.0)), (FORWARD, (5.0, 6.0)), (BACKWARD, (6.0, 8.0)), ("send up", (8.0, 9.0))]
    found = measured([first, second], 1)
    assert (found.stages, found.micro_batches) == (2, 1)
    at = {(event.stage, event.kind, event.end): event.start for event in found.events}
    assert at[1, "receive", 5.0] == 2.0
    assert at[0, "send", 5.0] == 2.0
    assert at[0, "receive", 9.0] == 8.0
    assert at[1, "send", 9.0] == 8.0
    assert list(found.events) == sorted(found.events, key=lambda event: (event.stage, event.start))


def test_a_step_is_planned_from_the_median_of_the_one_before() -> None:
    def events(stage: int, kind: str, *took: float) -> list[Event]:
        return [Event(stage, kind, m, 10.0 * m, 10.0 * m + seconds) for m, seconds in enumerate(took)]

    found = [*events(0, FORWARD, 1, 2, 9), *events(0, BACKWARD, 3, 3, 3), *events(1, FORWARD, 4, 4, 4)]
    found += [*events(1, BACKWARD, 5, 6, 7), *events(0, "send", 1, 1, 8), *events(1, "receive", 2, 3, 4)]
    assert plan_from(Schedule(2, 3, tuple(found))) == simulate(3, [2.0, 4.0], [3.0, 6.0], 1.0)


def test_the_layers_of_an_mlp_are_those_of_its_pipeline() -> None:
    model = MLPForClassification.pipeline(MLPConfig(width=8, layers=3, num_labels=5), seed=1)
    costs = [replace(cost(look.own), held=look.held) for look in _look(model.layers)]
    assert sum(one.parameters for one in costs) == sum(
        p.numel() for layer in model.layers for p in layer.build().parameters()
    )
