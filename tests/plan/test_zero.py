"""ZeRO's settings and partitions, against DeepSpeed's own."""

from __future__ import annotations

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from finetune.dsconfig.config import Config
from finetune.plan.model import Tensor
from finetune.plan.zero import Partition, read_zero, shard, sub_groups

NAMES = {  # ours: DeepSpeed's
    "contiguous_gradients": "contiguous_gradients",
    "reduce_scatter": "reduce_scatter",
    "reduce_bucket_size": "reduce_bucket_size",
    "prefetch_bucket_size": "prefetch_bucket_size",
    "persistence_threshold": "param_persistence_threshold",
    "max_live_parameters": "max_live_parameters",
    "max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group_size",
    "hpz_ranks": "zero_hpz_partition_size",
    "quantized_weights": "zero_quantized_weights",
    "quantized_gradients": "zero_quantized_gradients",
    "overlap_comm": "overlap_comm",
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_config_leaves_out_is_as_deepspeed_has_it(stage: int) -> None:
    ours = read_zero(Config({"zero_optimization": {"stage": stage}}), hidden_size=64)
    theirs = DeepSpeedZeroConfig(stage=stage)
    assert {name: getattr(ours, name) for name in NAMES} == {
        name: getattr(theirs, other) for name, other in NAMES.items()
    }
    assert ours.optimizer_buffers == DeepSpeedZeroOffloadOptimizerConfig().buffer_count
    assert ours.param_buffers == DeepSpeedZeroOffloadParamConfig().buffer_count
    assert ours.param_buffer_size == DeepSpeedZeroOffloadParamConfig().buffer_size


def test_auto_is_filled_by_the_hidden_size() -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    ours = read_zero(Config({"zero_optimization": {"stage": 3, **dict.fromkeys(names, "auto")}}), hidden_size=768)
    assert ours.reduce_bucket_size == 768 * 768
    assert ours.prefetch_bucket_size == int(0.9 * 768 * 768)
    assert ours.persistence_threshold == 7680


def test_offload_is_read_where_the_stage_takes_it() -> None:
    section = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "buffer_size": 5}}
    third = read_zero(Config({"zero_optimization": {"stage": 3, **section}}), 64)
    second = read_zero(Config({"zero_optimization": {"stage": 2, **section}}), 64)
    assert (third.offload_optimizer, third.offload_param, third.param_buffer_size) == ("cpu", "nvme", 5)
    assert (second.offload_optimizer, second.offload_param) == ("cpu", "none")


def test_a_group_is_padded_to_two_elements_a_rank_and_cut_evenly() -> None:
    part = Partition(
        (Tensor("a", (5,)), Tensor("b", (4,)), Tensor("c", (2,))), ranks=2
    )  # 11 elements, to a multiple of 4
    assert (part.padded, part.part) == (12, 6)
    assert part.owned(0) == {"a", "b"}  # elements 0 to 5: a, and the first of b
    assert part.owned(1) == {"b", "c"}


def test_a_rank_behind_all_parameters_owns_none() -> None:
    part = Partition((Tensor("a", (1,)),), ranks=4)
    assert part.part == 2
    assert [sorted(part.owned(rank)) for rank in range(4)] == [["a"], [], [], []]


def test_a_shard_is_rounded_up() -> None:
    assert [shard(size, 4) for size in (1, 4, 5, 8)] == [1, 1, 2, 2]


def test_sub_groups_end_with_the_parameter_that_passes_the_limit() -> None:
    assert sub_groups([3, 3, 3, 1], limit=5) == [[3, 3], [3, 1]]
    assert sub_groups([3, 3], limit=100) == [[3, 3]]
    assert sub_groups([7], limit=5) == [[7]]
