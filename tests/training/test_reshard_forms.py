"""The forms that a checkpoint may have: what is written in one is read again, to the bit, and each is told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_reshard import DECAYS, KEYS, NAMES, SHAPES, STEPS, assert_whole, checkpoint, record, settings, whole_tensors

from finetune.errors import RequestError
from finetune.run.files import PIPELINE_RECORD
from finetune.training.reshard.batch import global_batch_of
from finetune.training.reshard.move import read_pipeline, write_pipeline_record, write_share
from finetune.training.reshard.one_file import Names, read_plain, read_zero0, write_plain, write_zero0
from finetune.training.reshard.portable import Group, Portable, joined, settings_of, state_keys, steps_of
from finetune.training.reshard.resuming import groups_of, mend_optimizer
from finetune.training.reshard.sharding import Sharding, of_config, sharding_of
from finetune.training.reshard.zero_shards import shard_files, write_record, write_weight

TENSORS = whole_tensors()
BUFFERS = {"seen": torch.arange(3.0)}
SCALE = {"cur_scale": 8.0, "cur_iter": 7, "scale_window": 100}
COUNTERS = {"global_steps": 7, "skipped_steps": 1, "global_samples": 112}


def portable(**changes: Any) -> Portable:
    groups = tuple(Group(tuple(shapes), settings_of(found)) for shapes, found in zip(SHAPES, settings(), strict=True))
    made = Portable(
        shapes={name: torch.Size(shape) for group in SHAPES for name, shape in group.items()},
        keys=KEYS,
        groups=groups,
        steps=STEPS,
        read=lambda name, key: TENSORS[key][name].clone(),
        buffers=BUFFERS,
        counters=COUNTERS,
    )
    return replace(made, **changes)


def test_the_bytes_are_of_all_weights_and_states() -> None:
    elements = 15 + 7 + 3 + 1
    assert portable().bytes == elements * 4 * 3
    assert portable(keys=()).bytes == elements * 4


def test_the_trainers_own_form(tmp_path: Path) -> None:
    write_plain(tmp_path, portable(), NAMES)
    found = read_plain(tmp_path, NAMES)
    assert_whole(found)
    assert torch.equal(found.buffers["seen"], BUFFERS["seen"])
    assert load_file(tmp_path / "model.safetensors").keys() == {*TENSORS["fp32"], "seen"}
    saved = torch.load(tmp_path / "optimizer.pt")
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3]]
    assert {float(state["step"]) for state in saved["state"].values()} == {STEPS}
    assert torch.equal(saved["state"][2]["exp_avg"], TENSORS["exp_avg"]["a.bias"])


def test_a_group_without_weights_keeps_its_place(tmp_path: Path) -> None:
    empty = Group((), {"weight_decay": 0.5})
    names = Names((NAMES.groups[0], empty, NAMES.groups[1]), {})
    assert names.filled == NAMES.groups
    write_plain(tmp_path, portable(), names)
    saved = torch.load(tmp_path / "optimizer.pt")["param_groups"]
    assert [group["params"] for group in saved] == [[0, 1], [], [2, 3]]
    assert saved[1]["weight_decay"] == 0.5
    assert_whole(read_plain(tmp_path, names))


def test_a_tied_weight_goes_by_the_name_that_the_file_has(tmp_path: Path) -> None:
    write_plain(tmp_path, portable(), NAMES)
    stored = load_file(tmp_path / "model.safetensors")
    stored["head.weight"] = stored.pop("a.weight")
    save_file(stored, tmp_path / "model.safetensors")
    assert_whole(read_plain(tmp_path, replace(NAMES, tied={"head.weight": "a.weight"})))
    with pytest.raises(RequestError, match=r"has no weight a\.weight\. Is it a checkpoint of this model"):
        read_plain(tmp_path, NAMES)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"has no model\.safetensors"):
        read_plain(tmp_path, NAMES)


def test_a_state_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    write_plain(tmp_path, portable(), NAMES)
    saved = torch.load(tmp_path / "optimizer.pt")
    saved["state"][1]["exp_avg"] = torch.zeros(8)
    torch.save(saved, tmp_path / "optimizer.pt")
    found = read_plain(tmp_path, NAMES)
    with pytest.raises(RequestError, match=r"exp_avg of b\.weight is \(8,\), not \(7,\)"):
        found.read("b.weight", "exp_avg")


@pytest.mark.parametrize("is_fp32", [True, False])
@pytest.mark.parametrize("scale", [{}, SCALE])
def test_deepspeeds_form_without_zero(is_fp32: bool, scale: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "global_step7"
    folder.mkdir()
    write_zero0(folder, portable(loss_scale=scale), 4, is_fp32)
    assert (tmp_path / "latest").read_text() == "global_step7"
    saved = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    assert (saved["dp_world_size"], saved["mp_world_size"], saved["global_samples"]) == (4, 1, 112)
    if not is_fp32:
        kept = saved["optimizer"]
        assert (kept["cur_scale"], kept["cur_iter"]) == ((8.0, 7) if scale else (1.0, 7))
        assert kept["dynamic_loss_scale"] is bool(scale)
        # What computes is rounded, and the optimizer's own are not.
        saved["module"] = {name: value.bfloat16() for name, value in saved["module"].items()}
    saved["buffer_names"] = ["seen"]
    torch.save(saved, folder / "mp_rank_00_model_states.pt")
    found = read_zero0(folder, NAMES)
    assert_whole(found)
    assert found.counters == COUNTERS
    assert found.buffers["seen"].tolist() == [0.0, 1.0, 2.0]
    if not is_fp32 and scale:
        assert found.loss_scale == SCALE


def test_the_form_of_a_pipeline_in_shares(tmp_path: Path) -> None:
    one = portable(loss_scale=SCALE)
    for rank, names in enumerate((["a.weight", "a.bias"], ["b.weight", "b.bias"])):
        write_share(tmp_path, one, names, rank, 2)
    write_pipeline_record(tmp_path, one, 32, "AdamW")
    torch.save({"_last_lr": [0.5, 0.25]}, tmp_path / "scheduler.pt")
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)
    ]
    assert "seen" in load_file(tmp_path / "model-00001-of-00002.safetensors")
    assert "seen" not in load_file(tmp_path / "model-00002-of-00002.safetensors")
    found = read_pipeline(tmp_path, NAMES.groups)
    for key, tensors in TENSORS.items():
        assert all(torch.equal(found.read(name, key), tensor) for name, tensor in tensors.items())
    assert (found.keys, found.steps, found.loss_scale) == (KEYS, STEPS, SCALE)
    assert [group.settings["lr"] for group in found.groups] == [0.5, 0.25]
    assert [group.settings["weight_decay"] for group in found.groups] == list(DECAYS)
    assert found.buffers.keys() == {"seen"}
    content = json.loads((tmp_path / "pipeline.json").read_text())
    assert (content["global_batch_size"], content["optimizer"], content["stages"]) == (32, "AdamW", None)
    more = (*NAMES.groups, Group(("c",), {}))
    with pytest.raises(RequestError, match="has no weight c"):
        read_pipeline(tmp_path, more)


@pytest.mark.parametrize(("stage", "prefix"), [(1, "mp_rank_00"), (2, "mp_rank_00"), (3, "zero_pp_rank_0_mp_rank_00")])
def test_deepspeeds_universal_form(stage: int, prefix: str, tmp_path: Path) -> None:
    folder = tmp_path / "global_step7_universal"
    for name in portable().shapes:
        write_weight(folder, portable(), name)
    write_record(folder, portable(), stage, 4)
    assert (tmp_path / "latest_universal").read_text() == "global_step7_universal"
    for key, tensors in TENSORS.items():
        for name, tensor in tensors.items():
            saved = torch.load(folder / "zero" / name / f"{key}.pt")
            assert torch.equal(saved["param"], tensor)
            assert saved["cat_dim"] == 0
    assert float(torch.load(folder / "zero/a.weight/step.pt")) == STEPS
    kept = torch.load(folder / "zero/optimizer_state.pt", weights_only=False)
    assert kept["param_groups"] == kept["optimizer_state_dict"]["param_groups"]
    assert [(g["weight_decay"], g["params"]) for g in kept["param_groups"]] == [(DECAYS[0], [0]), (DECAYS[1], [1])]
    assert float(kept["optimizer_state_dict"]["state"][0]["step"]) == STEPS
    engine = torch.load(folder / f"{prefix}_model_states.pt", weights_only=False)
    assert (engine["dp_world_size"], engine["global_steps"], engine["skipped_steps"]) == (4, 7, 1)


def test_an_optimizer_that_counts_no_steps_gets_none(tmp_path: Path) -> None:
    one = portable(steps=None)
    write_weight(tmp_path, one, "a.weight")
    assert not (tmp_path / "zero/a.weight/step.pt").exists()
    write_record(tmp_path, one, 2, 1)
    assert torch.load(tmp_path / "zero/optimizer_state.pt", weights_only=False)["optimizer_state_dict"]["state"] == {
        0: {}
    }
    write_plain(tmp_path, one, NAMES)
    assert read_plain(tmp_path, NAMES).steps is None
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([{"params": [weight]}, {"params": [torch.nn.Parameter(torch.ones(1))]}])
    adam.state[weight] = {"step": torch.tensor(3.0)}
    mend_optimizer(adam, one)
    assert float(adam.state[weight]["step"]) == 3.0


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
