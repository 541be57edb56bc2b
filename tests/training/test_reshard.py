"""Moving a checkpoint to another layout, without a launch: shards as DeepSpeed lays them out, the arithmetic of the
global batch, what is refused, and what is left behind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asked import run_of
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils.tensor_fragment import fragment_address

from finetune.errors import RequestError, RunError, UnevenBatchError
from finetune.run.launch import Launch
from finetune.run.run import Run
from finetune.run.supervised import tell
from finetune.training.checkpoints.manifest import Layout, Manifest, files_of, write_manifest
from finetune.training.checkpoints.tag import newest_tag
from finetune.training.reshard import loading
from finetune.training.reshard.batch import keep_global_batch, refuse_other_batch
from finetune.training.reshard.links import PREFIX, Links
from finetune.training.reshard.loading import load_everything, load_weights, settle_optimizer
from finetune.training.reshard.one_file import Names
from finetune.training.reshard.portable import Group, Portable, settings_of
from finetune.training.reshard.reading import with_rates
from finetune.training.reshard.sharding import Sharding, can_load_as_it_stands, sharding_of
from finetune.training.reshard.zero_shards import read_zero

KEYS = ("exp_avg", "exp_avg_sq")
STEPS = 7.0
# Two groups, as the Trainer makes them; no size divides by 2 or 4 without a rest.
SHAPES = ({"a.weight": (3, 5), "b.weight": (7,)}, {"a.bias": (3,), "b.bias": (1,)})
DECAYS = (0.1, 0.0)


def whole_tensors() -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    names = [(name, shape) for group in SHAPES for name, shape in group.items()]
    return {key: {n: torch.randn(shape, generator=generator) for n, shape in names} for key in ("fp32", *KEYS)}


def settings() -> list[dict[str, Any]]:
    return [{"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": decay, "params": [i]} for i, decay in enumerate(DECAYS)]


def record(stage: int, **more: Any) -> dict[str, Any]:
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES]
    zero = {"zero_optimization": {"stage": stage}}
    counters = {"global_steps": 7, "skipped_steps": 0, "global_samples": 112}
    fixed = {"buffer_names": [], "module": {}, "lr_scheduler": None, "optimizer": None}
    return {"param_shapes": shapes, "ds_config": zero, **fixed, **counters, **more}


def states_of(flat: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    states = {i: {"step": torch.tensor(STEPS), **{key: flat[key][i] for key in KEYS}} for i in range(len(SHAPES))}
    return {"state": states, "param_groups": settings()}


def write_first_stages(folder: Path, ranks: int, stage: int = 2) -> None:
    """ZeRO-1 and 2: all weights of a group from end to end, filled up, and cut into equal parts anywhere."""
    folder.mkdir(parents=True)
    tensors = whole_tensors()
    torch.save(record(stage), folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        parts: dict[str, list[torch.Tensor]] = {key: [] for key in tensors}
        mappings = []
        for group in SHAPES:
            size = math.ceil(sum(math.prod(s) for s in group.values()) / ranks)
            for key, found in tensors.items():
                flat = torch.cat([found[name].flatten() for name in group])
                flat = torch.nn.functional.pad(flat, (0, size * ranks - len(flat)))
                parts[key].append(flat[rank * size : (rank + 1) * size].clone())
            mapping, at = {}, 0
            for name, shape in group.items():
                first, last = max(at, rank * size), min(at + math.prod(shape), (rank + 1) * size)
                if first < last:
                    mapping[name] = fragment_address(numel=last - first, start=first - rank * size)
                at += math.prod(shape)
            mappings.append(mapping)
        optimizer = {
            "base_optimizer_state": states_of(parts),
            "single_partition_of_fp32_groups": parts["fp32"],
            "param_slice_mappings": mappings,
            "partition_count": [ranks] * len(SHAPES),
            "loss_scaler": LossScaler(scale=1.0),
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def swapped_out(flat: torch.Tensor, folder: Path, name: str) -> torch.Tensor:
    """What NVMe offload keeps of it: a file that is longer, and an empty tensor with the file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.tensor.swp").write_bytes(torch.nn.functional.pad(flat, (0, 3), value=9.0).numpy().tobytes())
    left = torch.empty(0)
    left.ds_id = name  # type: ignore[attr-defined]
    return left


def write_third_stage(folder: Path, ranks: int, swaps: bool = False) -> None:
    """ZeRO-3: of every weight an equal part a rank, filled up at the last. With `swaps`, the first group is on NVMe
    (the second one is too small for that)."""
    folder.mkdir(parents=True)
    tensors = whole_tensors()
    for rank in range(ranks):
        parts: dict[str, list[torch.Tensor]] = {}
        for key, found in tensors.items():
            parts[key] = []
            for group in SHAPES:
                own = []
                for name in group:
                    flat = found[name].flatten()
                    size = math.ceil(len(flat) / ranks)
                    own.append(torch.nn.functional.pad(flat, (0, size * ranks - len(flat)))[rank * size :][:size])
                parts[key].append(torch.cat(own))
            if swaps:
                name = "4_11" if key == "fp32" else f"{key}-4_11"
                parts[key][0] = swapped_out(parts[key][0], folder / "offloaded_tensors" / f"rank{rank:02d}", name)
        optimizer = {
            "optimizer_state_dict": states_of(parts),
            "fp32_flat_groups": parts["fp32"],
            "partition_count": ranks,
            "loss_scaler": LossScaler(scale=1.0),
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save(record(3), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def assert_whole(portable: Portable) -> None:
    for key, tensors in whole_tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(portable.read(name, key), tensor), (key, name)
    assert portable.keys == KEYS
    assert portable.steps == STEPS
    assert [group.names for group in portable.groups] == [tuple(group) for group in SHAPES]
    assert [group.settings["weight_decay"] for group in portable.groups] == list(DECAYS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_and_states_are_put_together_from_the_shards_of_any_number_of_ranks(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    folder = tmp_path / "global_step7"
    write_first_stages(folder, ranks) if stage == 2 else write_third_stage(folder, ranks)
    assert_whole(read_zero(folder))


@pytest.mark.parametrize("ranks", [1, 3])
def test_states_on_nvme_are_read_from_the_swap_files(ranks: int, tmp_path: Path) -> None:
    write_third_stage(tmp_path / "global_step7", ranks, swaps=True)
    assert_whole(read_zero(tmp_path / "global_step7"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../../secret", r"'\.\./\.\./\.\./secret' is not the name of a swap file"),
        ("4_12", "there is no such file"),
        ("5_11", "is a link that leads out of"),
        ("6_11", r"do not hold all of fp32 of b\.weight"),
    ],
    ids=["a path", "missing", "a link", "too short"],
)
def test_no_other_file_is_read_as_a_swap_file(name: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "global_step7"
    write_third_stage(folder, 1, swaps=True)
    (tmp_path / "secret.tensor.swp").write_bytes(bytes(400))
    (folder / "offloaded_tensors" / "rank00" / "5_11.tensor.swp").symlink_to(tmp_path / "secret.tensor.swp")
    (folder / "offloaded_tensors" / "rank00" / "6_11.tensor.swp").write_bytes(bytes(20))
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["fp32_flat_groups"][0].ds_id = name
    torch.save(content, path)
    with pytest.raises(RequestError, match=message):
        read_zero(folder).read("b.weight", "fp32")


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_that_end_before_a_weight_are_refused(stage: int, tmp_path: Path) -> None:
    folder = tmp_path / "global_step7"
    write_first_stages(folder, 2) if stage == 2 else write_third_stage(folder, 2)
    last = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(last, weights_only=False)
    flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups" if stage == 2 else "fp32_flat_groups"]
    flat[0] = flat[0][:5].clone()
    torch.save(content, last)
    with pytest.raises(RequestError, match=r"do not hold all of fp32 of b\.weight"):
        read_zero(folder).read("b.weight", "fp32")


def test_the_shard_of_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_third_stage(tmp_path / "global_step7", 3)
    (tmp_path / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(RequestError, match="has 2 shards, but none for rank 1"):
        read_zero(tmp_path / "global_step7")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_a_shard_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_third_stage(tmp_path / "global_step7", 1)
    torch.save({"optimizer_state_dict": Bomb()}, tmp_path / "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(RequestError, match=r"zero_pp_rank_0_mp_rank_00_optim_states\.pt"):
        read_zero(tmp_path / "global_step7")
    assert not (tmp_path / "exploded").exists()


NAMES = Names(
    tuple(Group(tuple(group), {"weight_decay": decay}) for group, decay in zip(SHAPES, DECAYS, strict=True)), {}
)


def checkpoint(folder: Path, stage: int, ranks: int) -> Path:
    """As the Trainer leaves it, with its manifest."""
    place = folder / "checkpoint-7"
    step = place / "global_step7"
    write_first_stages(step, ranks, stage) if stage < 3 else write_third_stage(step, ranks)
    (place / "trainer_state.json").write_text("{}")
    (place / "latest").write_text("global_step7")
    for rank in range(ranks):
        torch.save({"rank": rank}, place / (f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"))
    write_own_manifest(place, 16, Layout("deepspeed", ranks, stage))
    return place


def write_own_manifest(place: Path, batch: int, layout: Layout) -> None:
    place.mkdir(exist_ok=True)
    write_manifest(place, Manifest(7, 0.5, "2026-01-01T00:00:00Z", batch, layout, {}, {}))


def test_links_leave_the_checkpoint_as_it_is_and_go_when_it_is_done(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, 3, 2)
    before = files_of(place)
    leftover = tmp_path / (PREFIX + "checkpoint-3")
    leftover.mkdir()
    links = Links(place, tmp_path, 1)
    links.make(random_states=True)
    assert not leftover.exists()
    assert links.folder.name.startswith("unfinished-")
    assert torch.load(links.folder / "rng_state.pth") == {"rank": 0}
    assert sorted(path.name for path in links.folder.iterdir()) == [
        "global_step7", "latest", "manifest.json", "rng_state.pth", "trainer_state.json",
    ]  # fmt: skip
    assert all(path.is_symlink() for path in links.folder.iterdir())
    links.clear()
    assert files_of(place) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7"]


@pytest.mark.parametrize(
    ("error", "said"),
    [(OSError(28, "No space left on device"), r"written \(No space left on device\)"), (OSError("odd"), r"\(odd\)")],
)
def test_what_a_disk_answers_is_said_in_its_words(
    error: OSError, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Path, target: Path) -> None:
        raise error

    monkeypatch.setattr(Path, "symlink_to", fails)
    links = Links(checkpoint(tmp_path, 2, 1), tmp_path, 1)
    with pytest.raises(RunError, match=said):
        links.make(random_states=True)
    assert not links.folder.exists()


class Plain(torch.nn.Module):
    """With the weights of SHAPES, and batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = torch.nn.Module(), torch.nn.Module(), torch.nn.BatchNorm1d(2, affine=False)
        for name, shape in [pair for group in SHAPES for pair in group.items()]:
            part, _, last = name.partition(".")
            getattr(self, part).register_parameter(last, torch.nn.Parameter(torch.ones(shape)))


def plain_trainer() -> Any:
    """With one more group, which has no weights."""
    model = Plain()
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in names], "lr": 1.0, "weight_decay": 0.5} for names in (*SHAPES, ())]
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(groups))
    return SimpleNamespace(is_deepspeed_enabled=False, model=model, optimizer=optimizer)


def portable(**changes: Any) -> Portable:
    tensors = whole_tensors()
    groups = tuple(Group(tuple(names), settings_of(one)) for names, one in zip(SHAPES, settings(), strict=True))
    made = Portable(
        shapes={name: torch.Size(shape) for group in SHAPES for name, shape in group.items()},
        keys=KEYS,
        groups=groups,
        steps=STEPS,
        read=lambda name, key: tensors[key][name].clone(),
        buffers={"norm.running_mean": torch.tensor([1.0, 2.0])},
        counters={"global_steps": 7, "skipped_steps": 1, "global_samples": 112},
    )
    return replace(made, **changes)


def test_weights_and_states_are_loaded_by_name_into_the_trainers_optimizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = plain_trainer()
    monkeypatch.setattr(loading, "TELL_SECONDS", -1.0)
    load_everything(trainer, portable())
    assert capsys.readouterr().out.splitlines() == [f"resume: {done} of 4 weights moved" for done in (1, 2, 3, 4)]
    adam = trainer.optimizer.optimizer
    tensors, named = whole_tensors(), dict(trainer.model.named_parameters())
    for name, weight in named.items():
        assert torch.equal(weight, tensors["fp32"][name])
        state = adam.state[weight]
        assert all(torch.equal(state[key], tensors[key][name]) for key in KEYS)
        assert (float(state["step"]), state["step"].dtype) == (STEPS, torch.float32)
    assert [group["weight_decay"] for group in adam.param_groups] == [*DECAYS, 0.5]
    assert [group["lr"] for group in adam.param_groups] == [0.01, 0.01, 1.0]
    assert trainer.model.norm.running_mean.tolist() == [1.0, 2.0]
    sum(p.sum() for p in named.values()).backward()
    adam.step()
    assert {float(state["step"]) for state in adam.state.values()} == {STEPS + 1}


def test_states_find_their_weights_in_an_optimizer_with_one_group_in_the_models_order() -> None:
    """As DeepSpeed makes it from `optimizer` in a config."""
    model = Plain()
    adam = torch.optim.AdamW(model.parameters())
    names = tuple(dict(model.named_parameters()))
    one = (Group(names[::-1], {"lr": 0.5}),)
    trainer = SimpleNamespace(is_deepspeed_enabled=False, model=model, optimizer=SimpleNamespace(optimizer=adam))
    load_everything(trainer, portable(groups=one))
    tensors = whole_tensors()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, tensors["fp32"][name])
        assert all(torch.equal(adam.state[weight][key], tensors[key][name]) for key in KEYS)
    with pytest.raises(RequestError, match=r"has 2 group\(s\) of weights, and this run's 1"):
        load_everything(trainer, portable())


def test_a_weight_of_another_shape_is_refused() -> None:
    read = portable().read
    wide = portable(read=lambda name, key: torch.ones(1) if name == "a.weight" else read(name, key))
    with pytest.raises(RequestError, match=r"a\.weight is \(1,\) in the checkpoint, but"):
        load_weights(Plain(), wide)


def test_groups_get_the_rates_that_a_schedule_has_reached(tmp_path: Path) -> None:
    own = (Group(("a",), {"lr": 1.0}), Group(("b",), {"lr": 1.0}))
    assert with_rates(own, tmp_path) == own
    torch.save({"_last_lr": [0.1, 0.2]}, tmp_path / "scheduler.pt")
    assert [group.settings["lr"] for group in with_rates(own, tmp_path)] == [0.1, 0.2]


def test_the_best_weights_are_loaded_without_the_optimizers_states() -> None:
    model = Plain()
    load_weights(model, portable())
    assert torch.equal(model.a.weight, whole_tensors()["fp32"]["a.weight"])
    assert model.norm.running_mean.tolist() == [1.0, 2.0]


def test_a_weight_that_the_model_lacks_is_named() -> None:
    lacks = portable(shapes={**portable().shapes, "c.weight": torch.Size([1])})
    with pytest.raises(RequestError, match=r"has no weight c\.weight, which the checkpoint has"):
        load_weights(Plain(), lacks)


def test_more_ranks_than_before_share_the_random_states(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, 2, 2)
    links = Links(place, tmp_path, 4)
    links.make(random_states=True)
    found = [torch.load(links.folder / f"rng_state_{rank}.pth")["rank"] for rank in range(4)]
    assert found == [0, 1, 0, 1]


def test_each_group_gets_its_own_settings_and_each_state_its_own_step() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in SHAPES]
    optimizer = torch.optim.AdamW([{"params": [weight], "weight_decay": 0.1} for weight in weights])
    shared = torch.tensor(3.0)
    for weight in weights:
        optimizer.state[weight] = {"step": shared, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    groups = tuple(Group(tuple(g), {"weight_decay": d}) for g, d in zip(SHAPES, DECAYS, strict=True))
    portable = Portable({}, KEYS, groups, STEPS, lambda name, key: torch.zeros(0))
    settle_optimizer(optimizer, portable)
    assert [group["weight_decay"] for group in optimizer.param_groups] == list(DECAYS)
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [STEPS + 1, STEPS + 1]


ZERO = Sharding("deepspeed", 2, 2)


@pytest.mark.parametrize(
    ("written", "here", "stands"),
    [
        pytest.param(ZERO, ZERO, True, id="the same"),
        pytest.param(ZERO, Sharding("deepspeed", 2, 3), False, id="another stage"),
        pytest.param(ZERO, Sharding("deepspeed", 1, 2), False, id="another world size"),
        pytest.param(ZERO, Sharding("deepspeed", 2, 2, "cpu"), False, id="offload"),
        pytest.param(ZERO, Sharding("deepspeed", 2, 2, precision="bf16"), False, id="another precision"),
        pytest.param(ZERO, Sharding("ddp", 2), False, id="without DeepSpeed"),
        pytest.param(Sharding("deepspeed", 2, 0), Sharding("deepspeed", 4, 0), True, id="ZeRO-0 is whole on each rank"),
        pytest.param(Sharding("ddp", 2), Sharding("ddp", 1), True, id="so is DDP"),
        pytest.param(Sharding("pipeline", 2), Sharding("pipeline", 4), True, id="a pipeline's goes by name"),
        pytest.param(Sharding("pipeline", 2), ZERO, False, id="to the Trainer"),
        pytest.param(Sharding("fsdp", 2), Sharding("fsdp", 4), True, id="torch reshards FSDP"),
        pytest.param(Sharding("fsdp", 2), ZERO, False, id="FSDP"),
        pytest.param(ZERO, Sharding("fsdp", 2), False, id="to FSDP"),
        pytest.param(Sharding("deepspeed", 2, 3, "nvme"), ZERO, False, id="from NVMe"),
    ],
)
def test_only_what_the_engine_cannot_load_is_moved(written: Sharding, here: Sharding, stands: bool) -> None:
    assert can_load_as_it_stands(written, here) is stands


@pytest.mark.parametrize(
    ("written", "here"),
    [
        pytest.param(Sharding("deepspeed", 2, 3, "nvme"), Sharding("deepspeed", 1, 3, "nvme"), id="other ranks"),
        pytest.param(ZERO, Sharding("deepspeed", 2, 3, "nvme"), id="other states"),
    ],
)
def test_a_move_to_nvme_is_refused_with_both_layouts(written: Sharding, here: Sharding) -> None:
    with pytest.raises(RequestError, match="States can be moved from NVMe, but not to it") as met:
        can_load_as_it_stands(written, here)
    assert str(written) in str(met.value)
    assert str(here) in str(met.value)


def test_a_folder_of_weights_alone_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no optimizer states .* with --model_name_or_path"):
        sharding_of(tmp_path)


def asked(ranks: int, stages: int | None = None, *words: str) -> Run:
    flags = [*words, *(["--pipeline_parallel_size", str(stages)] if stages else [])]
    return run_of(*flags, launch=Launch(world_size=ranks), pipeline=stages is not None)


def saved(folder: Path, batch: int) -> str:
    write_own_manifest(folder / "checkpoint-7", batch, Layout("ddp", 2))
    return str(folder / "checkpoint-7")


@pytest.mark.parametrize(
    ("ranks", "stages", "micro", "batch", "accumulation"),
    [
        pytest.param(1, None, 16, 32, 2, id="2 ranks to 1"),
        pytest.param(4, None, 4, 32, 2, id="1 rank to 4"),
        pytest.param(2, None, 16, 32, 1, id="as before"),
        pytest.param(4, 2, 4, 32, 4, id="two stages x two pipelines"),
        pytest.param(2, 2, 4, 32, 8, id="stages share their samples"),
    ],
)
def test_the_accumulation_is_changed_so_that_a_step_takes_as_many_samples(
    ranks: int, stages: int | None, micro: int, batch: int, accumulation: int, tmp_path: Path
) -> None:
    request = asked(ranks, stages, "--per_device_train_batch_size", str(micro))
    settled, line = keep_global_batch(request, saved(tmp_path, batch))
    assert settled.value("gradient_accumulation_steps") == accumulation
    pipelines = ranks // (stages or 1)
    assert (line is None) is (accumulation == 1)
    if line:
        assert f"{accumulation} instead of 1" in line
        assert f"{micro} x {accumulation} x {pipelines} = {batch}" in line
    assert keep_global_batch(settled, saved(tmp_path, batch)) == (settled, None)


def test_a_batch_that_no_accumulation_keeps_is_refused_with_the_flag_that_mends_it(tmp_path: Path) -> None:
    request = asked(4, None, "--per_device_train_batch_size", "16")
    with pytest.raises(RequestError) as met:
        keep_global_batch(request, saved(tmp_path, 32))
    assert "global batch of 32, but this run has 16 x 1 x 4 = 64" in str(met.value)
    assert "32 / (16 x 4) is 0.5" in str(met.value)
    assert "Give --per_device_train_batch_size 8: 8 x 1 x 4 = 32." in str(met.value)
    mended = asked(4, None, "--per_device_train_batch_size", "8")
    assert keep_global_batch(mended, saved(tmp_path, 32))[1] is None


def test_ranks_that_cannot_share_the_batch_are_told_how_many_can(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Launch with a number of ranks that divides 32"):
        keep_global_batch(asked(3), saved(tmp_path, 32))


def test_an_accumulation_that_was_given_and_contradicts_is_refused(tmp_path: Path) -> None:
    words = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2")
    with pytest.raises(RequestError, match=r"8 x 2 x 1 = 16.*Drop --gradient_accumulation_steps 2.*8 x 4 x 1 = 32"):
        keep_global_batch(asked(1, None, *words), saved(tmp_path, 32))
    assert keep_global_batch(asked(2, None, *words), saved(tmp_path, 32))[1] is None


def test_an_older_checkpoint_of_another_batch_is_not_gone_on_from_unseen(tmp_path: Path) -> None:
    request = asked(1, None, "--per_device_train_batch_size", "8")
    request, note = keep_global_batch(request, saved(tmp_path, 32))
    assert note
    refuse_other_batch(request, saved(tmp_path, 32))
    with pytest.raises(RequestError, match="its global batch differs"):
        refuse_other_batch(request, saved(tmp_path, 64))


@pytest.mark.parametrize(
    ("ranks", "hosts", "micro", "batch", "most"),
    [
        pytest.param(3, 3, 1, 32, 2, id="two of three hosts"),
        pytest.param(12, 3, 2, 16, 2, id="of four ranks each"),
        pytest.param(19, 19, 1, 20, 10, id="ten of nineteen"),
        pytest.param(3, 3, 5, 32, 0, id="no number of hosts: the micro-batch is wrong"),
        pytest.param(3, 1, 1, 32, 0, id="there is only one host"),
    ],
)
def test_the_error_tells_among_how_many_hosts_the_batch_would_divide(
    ranks: int, hosts: int, micro: int, batch: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(hosts))
    with pytest.raises(UnevenBatchError) as met:
        keep_global_batch(asked(ranks, None, "--per_device_train_batch_size", str(micro)), saved(tmp_path, batch))
    assert met.value.most_hosts == most


def test_a_supervised_run_keeps_the_batch_of_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its first checkpoint, and although the flag says what held on all hosts."""
    attempt = tmp_path / "_supervise" / "attempt-2"
    attempt.mkdir(parents=True)
    monkeypatch.setenv("PYTHON_FINETUNE_SUPERVISED", str(attempt))
    words = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    request = asked(2, None, *words)
    assert keep_global_batch(request, None) == (request, None)
    tell(attempt.parent, "training", "it began", global_batch_size=32)
    settled, note = keep_global_batch(request, None)
    assert settled.value("gradient_accumulation_steps") == 4
    assert "4 instead of 2" in (note or "")
    assert "delete _supervise/ in the run folder" in (note or "")
    with pytest.raises(UnevenBatchError, match="delete _supervise/"):
        keep_global_batch(asked(3, None, *words), None)
    kept, note = keep_global_batch(request, saved(tmp_path, 32))
    assert kept == settled
    assert "_supervise" not in (note or "")
    with pytest.raises(RequestError, match="Drop --gradient_accumulation_steps 2"):
        keep_global_batch(request, saved(tmp_path, 64))  # of another run


def test_a_start_without_a_checkpoint_changes_nothing() -> None:
    request = asked(2)
    assert keep_global_batch(request, None) == (request, None)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_another_number_of_ranks_each_has_random_states_by_the_name_that_the_trainer_looks_for(
    ranks: int, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    for name in ("rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"):
        (checkpoint / name).write_text(name)
    links = Links(checkpoint, tmp_path, ranks)
    links.make(random_states=True)
    found = {path.name: path.read_text() for path in links.folder.iterdir()}
    names = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    written = {name: f"rng_state_{rank % 2}.pth" for rank, name in enumerate(names)}
    assert found == {"optimizer.pt": "optimizer.pt", **written}
    links.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_of_several_folders_of_deepspeed_the_newest_by_number_is_read(tmp_path: Path) -> None:
    for name in ("global_step9", "global_step10", "global_step11_universal"):
        (tmp_path / name).mkdir()
    found = newest_tag(tmp_path)
    assert found is not None
    assert found.name == "global_step10"
