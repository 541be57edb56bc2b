"""A step that is not finite: where that comes from, which samples it was, and what is logged of the steps around it."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from finetune.data.numbered import NUMBER
from finetune.data.packing import REAL_TOKENS
from finetune.data.sampling import GlobalBatchSampler
from finetune.data.shares import WHOLE_POSITIONS
from finetune.errors import RequestError, RunError
from finetune.run.flags.guards import GuardArguments
from finetune.training.guards.finder import Finder, Found, FoundLoss, odd_inputs, oddity
from finetune.training.guards.memory import is_out_of_memory
from finetune.training.guards.nan_guard import MOST_SHOWN, Finding, NanGuard, Suspect, _said, poisoned
from finetune.training.guards.replay import groups_in, read_batches, replay, write_batch, write_report
from finetune.training.guards.trainer_adapter import TrainerSuspect
from finetune.training.guards.verdict import Heartbeat, Position, judge
from finetune.training.running_loss import RunningLoss

NAN, INF = float("nan"), float("inf")


# Which tensor


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 2.0], ""),
        ([1.0, NAN], "float32 (2,): 1 NaN, 0 Inf"),
        ([INF, NAN, -INF], "float32 (3,): 1 NaN, 2 Inf"),
        ([-INF, 0.0], ""),  # a mask
        ([-INF], "float32 (1,): 0 NaN, 1 Inf"),  # a loss
        ([INF, 0.0], "float32 (2,): 0 NaN, 1 Inf"),
    ],
)
def test_a_tensor_is_odd_by_what_no_mask_has(values: list[float], said: str) -> None:
    assert oddity(torch.tensor(values)) == said


def test_numbers_that_cannot_be_odd_are_not() -> None:
    assert oddity(torch.tensor([1, 2])) == ""
    assert oddity(torch.full((1000, 3), NAN, dtype=torch.bfloat16)) == "bfloat16 (1000, 3): 3,000 NaN, 0 Inf"
    assert odd_inputs({"ids": torch.tensor([1]), "x": torch.tensor([1.0]), "name": "a"}) is None
    assert odd_inputs({"ids": torch.tensor([1]), "x": torch.tensor([INF, 1.0])}) == Found(
        "", "x of the batch itself, float32 (2,): 0 NaN, 1 Inf"
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        out = self.third(torch.sqrt(self.second(self.first(x)).abs()))
        return SimpleNamespace(loss=out.sum(), logits=out)


def test_the_innermost_module_of_which_it_comes_is_named_with_its_weights() -> None:
    model = Model()
    with torch.no_grad():
        model.second.weight[0, 0] = NAN
    with Finder(model).looking() as finder:
        model(torch.ones(3, 2))
    assert finder.first is not None
    assert finder.first.module == "second"
    assert finder.first.what == (
        "the output of second (Linear), float32 (3, 2): 3 NaN, 0 Inf; its weight is float32 (2, 2): 1 NaN, 0 Inf"
    )
    assert not model.second._forward_hooks


class InPieces(nn.Module):
    """Its output is a tuple, as that of attention is."""

    def forward(self, x: Any) -> Any:
        return x, [torch.log(x - 2)]


def test_an_output_of_several_tensors_is_looked_at_whole() -> None:
    model = nn.Sequential(InPieces())
    with Finder(model).looking() as finder:
        model(torch.ones(2))
    assert finder.first is not None
    assert finder.first.module == "0"


def test_a_gradient_that_is_not_finite_behind_a_finite_loss_is_found_from_the_loss_on() -> None:
    """The root of 0 has an infinite slope: 0 times infinity is none."""
    model = Model()
    with torch.no_grad():
        for parameter in model.second.parameters():
            parameter.zero_()
        model.third.weight.fill_(1.0)
    with Finder(model).looking() as finder:
        loss = model(torch.ones(1, 2)).loss
    assert finder.first is None
    assert math.isfinite(float(loss))
    found = finder.backward(loss, parameters=True)
    assert found is not None
    assert found.module == "second"
    assert found.what.startswith("the gradient of the output of second (Linear), float32 (1, 2): ")
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.second.bias.fill_(1.0)
    with Finder(model).looking() as finder:
        loss = model(torch.ones(1, 2)).loss
    assert finder.backward(loss, parameters=True) is None


def test_the_gradient_of_a_weight_alone_is_found_where_weights_are_looked_at() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1, bias=False)
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> Any:
            return self.inner(x) + torch.sqrt(self.scale)

    model = Scaled()
    with Finder(model).looking() as finder:
        loss = model(torch.ones(1, 2)).sum()
    assert finder.backward(loss, parameters=False) is None
    with Finder(model).looking() as finder:
        loss = model(torch.ones(1, 2)).sum()
    found = finder.backward(loss, parameters=True)
    assert found is not None
    assert found.what == "the gradient of scale, float32 (1,): 0 NaN, 1 Inf"


# Which samples


def test_the_samples_are_those_that_the_sampler_dealt_to_this_reader() -> None:
    """Two readers of three micro-batches of two: a step takes twelve."""
    sampler = GlobalBatchSampler(50, 12, 7)
    sampler.set_epoch(1)
    order = list(sampler)
    steps = len(order) // 12
    for step in (0, 1, steps - 1, steps, 2 * steps + 3):
        trainer = SimpleNamespace(args=SimpleNamespace(train_batch_size=2), state=SimpleNamespace(global_step=step))
        suspect, seen = Suspect(trainer), []
        for number in range(3):
            for reader in range(2):
                found = suspect.finding(sampler, number, None, 2, reader)
                assert (found.micro_batch, found.found) == (number, None)
                seen += found.samples or []
        assert seen == order[step % steps * 12 :][:12]
    assert suspect.finding(None, 0, None, 2, 0).samples is None


def test_a_batch_is_kept_as_a_model_takes_it() -> None:
    suspect = Suspect(None)
    ours = {name: torch.tensor([3]) for name in (REAL_TOKENS, NUMBER, WHOLE_POSITIONS)}
    suspect.window = [{"x": torch.ones(2), **ours, "name": "a"}]
    assert [list(batch) for batch in suspect.batches()] == [["x"]]


@pytest.mark.parametrize(("norm", "bad"), [(1.0, False), (NAN, True), (INF, True), (None, False), (0.0, False)])
def test_the_norm_tells(norm: float | None, bad: bool) -> None:
    suspect = Suspect(None)
    assert suspect.saw(norm) is bad
    assert suspect.bad_norm is bad


def test_an_optimizer_of_torch_is_left_without_gradients_where_they_are_not_finite() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    suspect = Suspect(None)
    for gradient, after in ((2.0, -1.0), (NAN, -1.0)):
        for weight in weights:
            weight.grad = torch.full((2,), 2.0)
        weights[1].grad = torch.full((2,), gradient)
        suspect._before_step(optimizer, (), {})
        optimizer.step()
        assert [weight.tolist() for weight in weights] == [[after, after]] * 2
    weights[0].grad = None
    suspect._before_step(optimizer, (), {})
    assert not suspect.bad_norm


@pytest.mark.parametrize("value", [1.5, 0.0, -3.0])
def test_a_finite_loss_stays_to_the_bit_with_its_gradient(value: float) -> None:
    x = torch.tensor(value, requires_grad=True)
    loss = poisoned(x * 3)
    loss.backward()
    assert float(loss) == value * 3
    assert float(x.grad) == 3.0  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_loss_that_is_not_finite_makes_every_gradient_so(value: float) -> None:
    x = torch.ones(3, requires_grad=True)
    poisoned((x * torch.tensor([0.0, 1.0, 2.0])).sum() * 0 + value).backward()
    assert x.grad is not None
    assert not torch.isfinite(x.grad).any()


# What is said


def finding(rank: int, micro_batch: int, what: str | None, samples: list[int] | None = None) -> Finding:
    return Finding(rank, micro_batch, None if what is None else Found("a", what), samples)


def test_the_first_micro_batch_is_named_with_its_samples() -> None:
    found = [
        finding(1, 2, "late", [9]),
        finding(1, 0, "second", [7]),
        finding(0, 0, "first", [3, 4]),
        finding(0, 1, None),
    ]
    assert _said(found, 5, True) == (
        "step 5 is not finite: first first; rank 0, micro-batch 1, samples 3, 4. "
        "It also happens in 2 more micro-batch(es)."
    )
    assert _said([finding(1, 2, "late")], 5, True) == (
        "step 5 is not finite: first late; rank 1, micro-batch 3, samples not known (a stream)."
    )


def test_a_loss_that_is_not_finite_by_another_micro_batch_is_named_last() -> None:
    """As over the pairs of a whole step, or by KTO's baseline."""
    loss = Finding(0, 0, FoundLoss("", "the loss"), None)
    said = _said([loss, finding(0, 1, "an output", [5])], 5, False)
    assert said.startswith("step 5 is not finite: first an output; rank 0, micro-batch 2, samples 5.")


@pytest.mark.parametrize(("count", "rest"), [(MOST_SHOWN, ""), (MOST_SHOWN + 1, " and 1 more")])
def test_of_many_samples_the_first_are_shown(count: int, rest: str) -> None:
    shown = ", ".join(map(str, range(MOST_SHOWN)))
    assert f"samples {shown}{rest}." in _said([finding(0, 0, "it", list(range(count)))], 1, True)
    assert MOST_SHOWN == 16


@pytest.mark.parametrize(("finite", "what"), [(True, "the gradients are"), (False, "the loss is")])
def test_what_no_module_explains_is_said_so(finite: bool, what: str) -> None:
    assert _said([finding(0, 0, None)], 4, finite).startswith(
        f"step 4: {what} not finite, but running the same batch again"
    )


def test_the_logged_loss_is_the_mean_of_the_steps_that_were_taken() -> None:
    guard = NanGuard(GuardArguments(on_nan="skip", nan_limit=9), Suspect(None))
    guard.logged_step = 10
    assert guard.window(20, 2.0) == {}
    guard.hits = guard.left_out = 2
    assert guard.window(30, 4.0) == {"loss": 4.0 * 10 / 8, "nonfinite_steps": 2}
    assert guard.window(40, 4.0) == {"loss": 4.0, "nonfinite_steps": 2}
    guard.left_out = 5
    assert math.isnan(guard.window(45, 0.0)["loss"])


class EveryStep(Suspect):
    """A loop whose steps are all bad, and that has nothing to show of them."""

    def hit(self) -> bool:
        return True

    def losses_are_finite(self) -> bool:
        return False

    def is_scaled(self) -> bool:
        return False

    def look(self, backward: bool) -> list[Finding]:
        return []

    def forget_loss(self) -> None: ...

    def advance_schedule(self) -> None: ...

    def finish_saves(self) -> None: ...


@pytest.mark.parametrize(("third", "ends"), [(1000, True), (1001, False)])
def test_only_the_bad_steps_of_the_last_thousand_count_towards_the_limit(
    third: int, ends: bool, tmp_path: Path
) -> None:
    guard = NanGuard(GuardArguments(on_nan="skip", nan_limit=2), EveryStep(None))
    args = SimpleNamespace(output_dir=str(tmp_path), max_grad_norm=1.0, process_index=0)
    for step in (1, 501, third):
        state = SimpleNamespace(global_step=step - 1, epoch=0.5, is_world_process_zero=True)
        guard.on_step_begin(args, state, None)
        with pytest.raises(RunError, match="more than --nan_limit 2") if ends and step == third else nullcontext():
            guard.on_optimizer_step(args, state, None)


# The batch, alone


def test_a_batch_is_run_again_from_its_file(tmp_path: Path) -> None:
    batches = [{"x": torch.randn(2, 2), "ids": torch.tensor([1, 2])} for _ in range(11)]
    rng = {"cpu": torch.get_rng_state()}
    write_batch(tmp_path / "step-3", batches, rng)
    read, states = read_batches(tmp_path / "step-3" / "rank-0.safetensors")
    assert len(read) == 11
    for one, other in zip(batches, read, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(states["cpu"], rng["cpu"])
    write_report(tmp_path / "step-3", 3, 0.5, "said", [vars(finding(0, 1, "it", [4])), vars(finding(1, 0, None))])
    report = json.loads((tmp_path / "step-3" / "report.json").read_text())
    assert (report["step"], report["epoch"], report["said"]) == (3, 0.5, "said")
    assert report["micro_batches"][0]["found"] == {"module": "a", "what": "it"}
    assert report["micro_batches"][1]["found"] is None


def test_each_micro_batch_of_a_file_gets_a_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.ones(2, 2)}, {"x": torch.tensor([[NAN, 1.0]])}]
    write_batch(tmp_path, batches, {"cpu": torch.get_rng_state()})
    lines = replay(Model().eval(), tmp_path / "rank-0.safetensors")
    assert lines[0].startswith("micro-batch 1: loss ")
    assert lines[0].endswith("; all is finite")
    assert lines[1] == "micro-batch 2: loss nan; x of the batch itself, float32 (1, 2): 1 NaN, 0 Inf"


class Joined(nn.Module):
    """Not finite where a 9 comes after a 7, as attention may be that sees both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, ids: Any) -> Any:
        fails = bool((ids == 7).any() and (ids == 9).any())
        return SimpleNamespace(loss=self.weight.sum() * (NAN if fails else 1.0))


def test_parts_of_shared_texts_are_joined_before_they_are_run_again(tmp_path: Path) -> None:
    place, rng = tmp_path / "step-3", {"cpu": torch.get_rng_state()}
    halves = {"rank-0": [7, 8], "rank-1": [1, 9], "rank-2": [1, 2], "rank-3": [3, 9]}
    for name, ids in halves.items():
        write_batch(place, [{"ids": torch.tensor([ids])}], rng)
        (place / "rank-0.safetensors").rename(place / f"{name}.of")
    for name in halves:
        (place / f"{name}.of").rename(place / f"{name}.safetensors")
    write_report(place, 3, 0.5, "said", [], sharing=2)
    groups = groups_in(place)
    assert [[file.stem for file in files] for files in groups] == [["rank-0", "rank-1"], ["rank-2", "rank-3"]]
    parts = [read_batches(file)[0][0]["ids"] for file in groups[0]]
    assert torch.cat(parts, dim=1).tolist() == [[7, 8, 1, 9]]
    model = Joined()
    assert replay(model, *groups[0])[0].startswith("micro-batch 1: loss nan")
    assert all(replay(model, file)[0].endswith("; all is finite") for file in groups[0])
    assert replay(model, *groups[1])[0].endswith("; all is finite")


def test_a_part_of_a_shared_text_is_not_run_again_alone(tmp_path: Path) -> None:
    write_batch(tmp_path, [{"ids": torch.tensor([[1, 2]])}], {"cpu": torch.get_rng_state()})
    assert [[file.stem for file in files] for files in groups_in(tmp_path)] == [["rank-0"]]
    write_report(tmp_path, 3, 0.5, "said", [], sharing=2)
    with pytest.raises(RequestError, match="ranks 0 to 1 shared each text, but some of their files are missing"):
        groups_in(tmp_path)


# Out of memory, and who is to blame, at their bounds


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("a GPU's"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (ValueError("out of memory"), False),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_memory_that_is_not_enough_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def stands(rank: int, collective: str, still: float, idle: float) -> Heartbeat:
    return Heartbeat(rank, 1, Position("here", collective, "key"), still, idle)


@pytest.mark.parametrize(("waits", "idle", "blamed"), [(40.0, 40.0, True), (39.9, 40.0, False), (40.0, 39.9, False)])
def test_a_rank_is_blamed_from_the_limit_on(waits: float, idle: float, blamed: bool) -> None:
    reports = {0: stands(0, "all_reduce", waits, 0.0), 1: stands(1, "", idle, idle)}
    found = judge(reports, {1: 0.0}, 40.0, str)
    assert (found is not None and found.ranks == (1,)) is blamed


def test_who_waits_is_counted_by_how_long_it_has_not_moved_and_shown_up_to_four() -> None:
    reports = {rank: stands(rank, "barrier", 50.0, 0.0) for rank in range(6)} | {6: stands(6, "", 60.0, 45.0)}
    found = judge(reports, {}, 40.0, lambda rank: f"r{rank}")
    assert found is not None
    assert found.ranks == (6,)
    assert "r6 has not moved for 45 s (--hang_timeout), in here" in found.said
    assert "r0 in barrier [here], r1 in barrier [here], r2 in barrier [here] and r3 in barrier [here] wait for it" in (
        found.said
    )


def test_one_that_waits_alone_hangs_nobody() -> None:
    assert judge({0: stands(0, "barrier", 90.0, 90.0)}, {}, 40.0, str) is None
    moving = {0: stands(0, "barrier", 90.0, 90.0), 1: stands(1, "barrier", 90.0, 39.0)}
    assert judge(moving, {}, 40.0, str) is None
    both = {0: stands(0, "barrier", 90.0, 40.0), 1: stands(1, "barrier", 90.0, 40.0)}
    found = judge(both, {}, 40.0, str)
    assert found is not None
    assert found.ranks == ()


# What it costs


class WalkCounted(nn.Sequential):
    walks = 0

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.walks += 1
        return super().named_modules(*args, **kwargs)


def test_a_step_keeps_running_statistics_without_a_walk_over_the_model() -> None:
    model = WalkCounted(nn.Linear(2, 2), nn.BatchNorm1d(2))
    loop: Any = SimpleNamespace(model=model, clips_itself=True, running_loss=RunningLoss())
    suspect = TrainerSuspect(loop)
    suspect.prepare()
    walks = model.walks
    for _ in range(3):
        suspect.begin([], None)
    assert walks
    assert model.walks == walks
    before = model[1].running_mean.clone()
    model(torch.ones(4, 2))
    assert not torch.equal(model[1].running_mean, before)
    suspect.forget_loss()
    assert torch.equal(model[1].running_mean, before)


def test_labels_under_two_names_are_written_twice(tmp_path: Path) -> None:
    labels = torch.arange(6).reshape(2, 3).T
    write_batch(tmp_path, [{"labels": labels, "shift_labels": labels}], {})
    read = load_file(tmp_path / "rank-0.safetensors")
    assert torch.equal(read["0.labels"], labels)
    assert torch.equal(read["0.shift_labels"], labels)
