"""The ZeRO section of a DeepSpeed config, with DeepSpeed's defaults, and how ZeRO divides parameters among ranks.

Defaults: deepspeed 0.19.8, runtime/zero/config.py and offload_config.py; a test compares each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from finetune.dsconfig.config import Config
from finetune.plan.model import Tensor

ALIGNMENT = 2  # elements per rank to which ZeRO-1 and -2 pad a group (stage_1_and_2.py, nccl_start_alignment_factor)


def _key(name: str, default: Any) -> Any:
    """A field with its key in `zero_optimization`, and DeepSpeed's default."""
    return field(default=default, metadata={"key": name})


@dataclass(frozen=True)
class Zero:
    """Sizes in elements. Without a config: stage 0, no engine."""

    stage: int = 0
    overlap_comm: bool = _key("overlap_comm", False)  # True under ZeRO-3
    contiguous_gradients: bool = _key("contiguous_gradients", True)
    reduce_scatter: bool = _key("reduce_scatter", True)
    reduce_bucket_size: int = _key("reduce_bucket_size", 500_000_000)
    prefetch_bucket_size: int = _key("stage3_prefetch_bucket_size", 50_000_000)
    persistence_threshold: int = _key("stage3_param_persistence_threshold", 100_000)
    max_live_parameters: int = _key("stage3_max_live_parameters", 1_000_000_000)
    max_reuse_distance: int = _key("stage3_max_reuse_distance", 1_000_000_000)
    sub_group_size: int = _key("sub_group_size", 1_000_000_000)
    offload_optimizer: str = "none"
    offload_param: str = "none"
    optimizer_buffers: int = _key("offload_optimizer.buffer_count", 4)
    param_buffers: int = _key("offload_param.buffer_count", 5)
    param_buffer_size: int = _key("offload_param.buffer_size", 100_000_000)
    hpz_ranks: int = _key("zero_hpz_partition_size", 1)
    quantized_weights: bool = _key("zero_quantized_weights", False)
    quantized_gradients: bool = _key("zero_quantized_gradients", False)
    gradient_clipping: float = 0.0
    accumulates_in_fp32: bool = False  # gradients of micro-batches, if weights are in half precision


def read_zero(config: Config, hidden_size: int, clip: float = 0.0, precision: str = "fp32") -> Zero:
    """From a checked config, for a run in `precision` that clips by `clip` unless the config says otherwise. "auto" is
    filled as transformers 5.23 does (integrations/deepspeed.py, trainer_config_finalize): buckets by the square of the
    hidden size, the threshold by ten times that."""
    stage = config.stage
    auto = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    found: dict[str, Any] = {"overlap_comm": stage == 3}
    said: Any
    for one in (one for one in fields(Zero) if one.metadata):
        place = f"zero_optimization.{one.metadata['key']}"
        if isinstance(one.default, bool):
            said = config.is_on(place) if isinstance(config.get(place), bool) else None
        else:
            said = auto.get(one.metadata["key"]) if config.is_auto(place) else config.count(place)
        if said is not None:
            found[one.name] = said
    own_clip, accumulated = config.number("gradient_clipping"), config.get("data_types.grad_accum_dtype")
    if accumulated == "auto":  # as finetune.dsconfig.load fills it, for pipelines
        accumulated = "fp16" if precision == "fp16" else "fp32"
    return Zero(**{
        **found,
        "stage": stage,
        "offload_optimizer": config.offload("offload_optimizer") if stage else "none",
        "offload_param": config.offload("offload_param") if stage == 3 else "none",
        "hpz_ranks": max(found.get("hpz_ranks", 1), 1),
        "gradient_clipping": clip if own_clip is None else own_clip,
        "accumulates_in_fp32": accumulated in ("fp32", "float32") and precision != "fp32",
    })  # fmt: skip


@dataclass(frozen=True)
class Partition:
    """A group of parameters that ZeRO-1 and -2 flatten into one tensor and split into equal parts
    (stage_1_and_2.py, flatten_dense_tensors_aligned, get_partition_info). Sizes in elements."""

    group: tuple[Tensor, ...]
    ranks: int

    @property
    def padded(self) -> int:
        unit = ALIGNMENT * self.ranks
        return math.ceil(sum(p.elements for p in self.group) / unit) * unit

    @property
    def part(self) -> int:
        """What one rank owns."""
        return self.padded // self.ranks

    def owned(self, rank: int) -> frozenset[str]:
        """Parameters of which `rank` owns at least a part."""
        first, last = rank * self.part, (rank + 1) * self.part
        ends = accumulate(tensor.elements for tensor in self.group)
        both = zip(self.group, ends, strict=True)
        return frozenset(tensor.name for tensor, end in both if end > first and end - tensor.elements < last)


def shard(elements: int, ranks: int) -> int:
    """A rank's shard of one parameter under ZeRO-3, padding included (partition_parameters.py, _partition_param)."""
    return math.ceil(elements / ranks)


def sub_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """ZeRO-3's sub-groups, which its optimizer steps one by one: whole parameters until they reach `limit` elements
    (stage3.py, _create_fp16_sub_groups)."""
    groups: list[list[int]] = [[]]
    for size in sizes:
        groups[-1].append(size)
        if sum(groups[-1]) >= limit:
            groups.append([])
    return [group for group in groups if group]
