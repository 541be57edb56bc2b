"""The forms that a checkpoint may have: what is written in one is read again, to the bit, and each is told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_reshard import (
    DECAYS,
    KEYS,
    NAMES,
    SHAPES,
    STEPS,
    assert_whole,
    checkpoint,
    portable,
    record,
    settings,
    whole_tensors,
)
from torch.distributed import checkpoint as distributed_checkpoint

from finetune.errors import RequestError
from finetune.run.files import PIPELINE_RECORD
from finetune.training.reshard.batch import global_batch_of
from finetune.training.reshard.expert_shards import fit_schedule
from finetune.training.reshard.fsdp_shards import read_fsdp
from finetune.training.reshard.one_file import Names, read_plain, read_zero0
from finetune.training.reshard.portable import Group, joined, settings_of, state_keys, steps_of
from finetune.training.reshard.reading import read_pipeline
from finetune.training.reshard.resuming import groups_of
from finetune.training.reshard.sharding import Sharding, of_config, sharding_of
from finetune.training.reshard.zero_shards import shard_files

TENSORS = whole_tensors()
BUFFERS = {"seen": torch.arange(3.0)}
SIZES = {name: shape for group in SHAPES for name, shape in group.items()}
SCALE = {"cur_scale": 8.0, "cur_iter": 7, "scale_window": 100}
COUNTERS = {"global_steps": 7, "skipped_steps": 1, "global_samples": 112}


def test_the_bytes_are_of_all_weights_and_states() -> None:
    elements = 15 + 7 + 3 + 1
    assert portable().bytes == elements * 4 * 3
    assert portable(keys=()).bytes == elements * 4


def write_plain(folder: Path, decay_of_empty: float | None = None) -> None:
    """As the Trainer saves without DeepSpeed; with `decay_of_empty`, a group without weights comes between."""
    groups = [{**settings()[0], "params": [0, 1]}, {**settings()[1], "params": [2, 3]}]
    if decay_of_empty is not None:
        groups.insert(1, {"weight_decay": decay_of_empty, "params": []})
    names = [name for group in SHAPES for name in group]
    states = {
        at: {"step": torch.tensor(STEPS), **{key: TENSORS[key][name] for key in KEYS}} for at, name in enumerate(names)
    }
    torch.save({"state": states, "param_groups": groups}, folder / "optimizer.pt")
    save_file({**TENSORS["fp32"], **BUFFERS}, folder / "model.safetensors")


def test_the_trainers_own_form(tmp_path: Path) -> None:
    write_plain(tmp_path)
    found = read_plain(tmp_path, NAMES)
    assert_whole(found)
    assert torch.equal(found.buffers["seen"], BUFFERS["seen"])


def test_a_group_without_weights_is_left_out(tmp_path: Path) -> None:
    names = Names((NAMES.groups[0], Group((), {"weight_decay": 0.5}), NAMES.groups[1]), {})
    assert names.filled == NAMES.groups
    write_plain(tmp_path, decay_of_empty=0.5)
    assert_whole(read_plain(tmp_path, names))


def test_states_of_another_model_are_refused_with_the_sizes_of_both(tmp_path: Path) -> None:
    write_plain(tmp_path)
    smaller = Names((Group(("a.weight",), {}), Group(("a.bias",), {})), {})
    with pytest.raises(RequestError, match=r"\[2, 2\] weights .* this model has \[1, 1\]"):
        read_plain(tmp_path, smaller)


@pytest.mark.parametrize("stem", ["model", "adapter_model"])
def test_a_weight_goes_by_the_name_that_the_file_has(stem: str, tmp_path: Path) -> None:
    write_plain(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["head.weight"] = stored.pop("a.weight")
    (tmp_path / "model.safetensors").unlink()
    save_file(stored, tmp_path / f"{stem}.safetensors")
    assert_whole(read_plain(tmp_path, replace(NAMES, in_files={"head.weight": "a.weight"})))
    with pytest.raises(RequestError, match=r"has no weight a\.weight\. Is it a checkpoint of this model"):
        read_plain(tmp_path, NAMES)
    (tmp_path / f"{stem}.safetensors").unlink()
    with pytest.raises(RequestError, match=r"has no model\.safetensors"):
        read_plain(tmp_path, NAMES)


def test_a_state_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    write_plain(tmp_path)
    saved = torch.load(tmp_path / "optimizer.pt")
    saved["state"][1]["exp_avg"] = torch.zeros(8)
    torch.save(saved, tmp_path / "optimizer.pt")
    found = read_plain(tmp_path, NAMES)
    with pytest.raises(RequestError, match=r"exp_avg of b\.weight is \(8,\), not \(7,\)"):
        found.read("b.weight", "exp_avg")


@pytest.mark.parametrize("scale", [None, {}, SCALE], ids=["fp32", "bf16", "fp16"])
def test_deepspeeds_form_without_zero(scale: dict[str, Any] | None, tmp_path: Path) -> None:
    write_plain(tmp_path)
    optimizer, module = torch.load(tmp_path / "optimizer.pt"), TENSORS["fp32"]
    if scale is not None:  # what computes is rounded, and the optimizer's own are not
        masters = [[module[name] for name in group] for group in SHAPES]
        optimizer = {"optimizer_state_dict": optimizer, "fp32_groups": masters, "dynamic_loss_scale": True, **scale}
        module = {name: value.bfloat16() for name, value in module.items()}
    more = {"module": {**module, **BUFFERS}, "optimizer": optimizer, "buffer_names": ["seen"], **COUNTERS}
    torch.save(record(0) | more, tmp_path / "mp_rank_00_model_states.pt")
    found = read_zero0(tmp_path, NAMES)
    assert_whole(found)
    assert found.counters == COUNTERS
    assert found.buffers["seen"].tolist() == [0.0, 1.0, 2.0]
    assert found.loss_scale == (scale or {})


def test_the_form_of_a_pipeline_in_shares(tmp_path: Path) -> None:
    for part, names in enumerate((["a.weight", "a.bias"], ["b.weight", "b.bias"])):
        weights = {name: TENSORS["fp32"][name] for name in names} | (BUFFERS if part == 0 else {})
        save_file(weights, tmp_path / f"model-0000{part + 1}-of-00002.safetensors")
        states = {f"{key}:{name}": TENSORS[key][name] for key in KEYS for name in names}
        save_file(states, tmp_path / f"optimizer-0000{part + 1}-of-00002.safetensors")
    record = {"global_batch_size": 32, "optimizer": "AdamW", "optimizer_steps": STEPS, "loss_scale": SCALE}
    (tmp_path / PIPELINE_RECORD).write_text(json.dumps(record))
    torch.save({"_last_lr": [0.5, 0.25]}, tmp_path / "scheduler.pt")
    found = read_pipeline(tmp_path, NAMES.groups)
    for key, tensors in TENSORS.items():
        assert all(torch.equal(found.read(name, key), tensor) for name, tensor in tensors.items())
    assert (found.keys, found.steps, found.loss_scale) == (KEYS, STEPS, SCALE)
    assert [group.settings["lr"] for group in found.groups] == [0.5, 0.25]
    assert [group.settings["weight_decay"] for group in found.groups] == list(DECAYS)
    assert found.buffers.keys() == {"seen"}
    weight, state = found.weight("seen"), found.state("a.bias", "exp_avg")
    assert weight is not None
    assert weight.tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(state, TENSORS["exp_avg"]["a.bias"])
    assert found.weight("unused") is found.state("unused", "exp_avg") is None
    more = (*NAMES.groups, Group(("c",), {}))
    with pytest.raises(RequestError, match="has no weight c"):
        read_pipeline(tmp_path, more)


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "full"])
def test_fsdps_forms(is_sharded: bool, tmp_path: Path) -> None:
    states = {name: {key: TENSORS[key][name] for key in KEYS} | {"step": torch.tensor(STEPS)} for name in SIZES}
    optimizer = {"state": states, "param_groups": [{"lr": 0.01, "params": list(SIZES)}]}
    weights = {"in_file" if name == "a.bias" else name: value for name, value in TENSORS["fp32"].items()} | BUFFERS
    if is_sharded:
        for folder, content in ("optimizer_0", {"optimizer": optimizer}), ("pytorch_model_fsdp_0", {"model": weights}):
            distributed_checkpoint.save(content, checkpoint_id=tmp_path / folder, no_dist=True)
    else:
        torch.save(optimizer, tmp_path / "optimizer.bin")
        torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
    found = read_fsdp(tmp_path, replace(NAMES, in_files={"in_file": "a.bias"}))
    assert [group.settings["weight_decay"] for group in found.groups] == list(DECAYS)
    assert_whole(found)
    assert found.buffers.keys() == {"seen"}
    with pytest.raises(RequestError, match=r"has no weight a\.bias"):
        read_fsdp(tmp_path, NAMES)


def test_a_schedule_fits_an_optimizer_with_more_groups() -> None:
    given = {"_last_lr": [0.5], "base_lrs": [1.0], "last_epoch": 3, "lr_lambdas": []}
    assert fit_schedule(given, 2) == {"_last_lr": [0.5] * 2, "base_lrs": [1.0] * 2, "last_epoch": 3, "lr_lambdas": []}
    assert fit_schedule({"_last_lr": [0.5, 0.25]}, 2) == {"_last_lr": [0.5, 0.25]}


def test_steps_are_found_in_states_or_groups() -> None:
    assert steps_of({0: {"step": torch.tensor(3.0)}, 1: {"step": 5}}, []) == 5.0
    assert steps_of({}, [{"step": 4}, {}]) == 4.0
    assert steps_of({0: {}}, [{}]) is None
    assert state_keys({"b": torch.ones(2), "a": torch.ones(1), "step": torch.tensor(1.0), "n": 3}) == ("a", "b")
    assert settings_of({"lr": 1, "params": [0], "step": 3, "param_names": ["a"]}) == {"lr": 1}


def test_pieces_are_joined_to_a_tensor_of_its_own_in_fp32() -> None:
    source = torch.arange(10.0, dtype=torch.bfloat16)
    made = joined([source[:4], source[4:6]], torch.Size((2, 3)))
    assert made.dtype == torch.float32
    assert made.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert made.untyped_storage().nbytes() == 6 * 4


def test_each_layout_is_told_by_its_files(tmp_path: Path) -> None:
    for stage, ranks in ((1, 3), (2, 2), (3, 4)):
        place = checkpoint(tmp_path / str(stage), stage, ranks)
        assert sharding_of(place) == Sharding("deepspeed", ranks, stage)
    zero0 = tmp_path / "zero0"
    (zero0 / "global_step7").mkdir(parents=True)
    torch.save(record(0), zero0 / "global_step7" / "mp_rank_00_model_states.pt")
    (zero0 / "rng_state_0.pth").write_text("")
    (zero0 / "rng_state_1.pth").write_text("")
    assert sharding_of(zero0) == Sharding("deepspeed", 2, 0)
    ddp, fsdp, pipeline = (tmp_path / name for name in ("ddp", "fsdp", "pipeline"))
    for folder, name in ((ddp, "optimizer.pt"), (fsdp, "optimizer_0"), (pipeline, "pipeline.json")):
        folder.mkdir()
        (folder / name).write_text("")
        (folder / "rng_state.pth").write_text("")
        assert sharding_of(folder) == Sharding(folder.name, 1)
    (fsdp / "optimizer_0").unlink()
    (fsdp / "pytorch_model_fsdp_0").mkdir()
    assert sharding_of(fsdp) == Sharding("fsdp", 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Sharding("deepspeed", 2, 0)),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, Sharding("deepspeed", 2, 2, precision="bf16")),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "fp16": {"enabled": True}},
            Sharding("deepspeed", 2, 3, "cpu", "fp16"),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
                                   "offload_param": {"device": "nvme"}}},
            Sharding("deepspeed", 2, 3, "nvme"),
        ),
    ],
)  # fmt: skip
def test_a_config_says_stage_offload_and_precision(config: dict[str, Any], expected: Sharding) -> None:
    assert of_config(config, 2) == expected


def test_layouts_are_said_in_words() -> None:
    assert str(Sharding("deepspeed", 1, 3, "nvme")) == "1 rank with ZeRO-3, states on nvme"
    assert str(Sharding("deepspeed", 2, 0)) == "2 ranks with ZeRO-0"
    assert str(Sharding("ddp", 2)) == "2 ranks without DeepSpeed"
    assert str(Sharding("fsdp", 4)) == "4 ranks with FSDP"


def test_shards_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0, 1, *range(3, 10)):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_text("")
    assert [path.name.split("_")[4] for path in shard_files(tmp_path)] == [str(rank) for rank in range(11)]
    (tmp_path / "bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt").unlink()
    (tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(RequestError, match="has 9 shards, but none for rank 0"):
        shard_files(tmp_path)


def test_weights_are_grouped_by_whether_they_decay_with_all_settings_of_the_optimizer() -> None:
    decays = {"a": True, "b": False, "c": True}
    one, other = groups_of((torch.optim.AdamW, {"lr": 0.5, "betas": (0.8, 0.9)}), decays, 0.3)
    assert (one.names, other.names) == (("a", "c"), ("b",))
    assert (one.settings["weight_decay"], other.settings["weight_decay"]) == (0.3, 0.0)
    assert one.settings["lr"] == other.settings["lr"] == 0.5
    assert one.settings["betas"] == (0.8, 0.9)
    assert "eps" in one.settings
    assert "params" not in one.settings


def test_the_global_batch_of_a_pipeline_older_than_manifests_is_in_its_record(tmp_path: Path) -> None:
    assert global_batch_of(tmp_path) is None
    (tmp_path / PIPELINE_RECORD).write_text(json.dumps({"global_batch_size": 48}))
    assert global_batch_of(tmp_path) == 48
