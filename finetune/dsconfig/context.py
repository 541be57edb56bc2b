"""What the rules need to know about the run that a config is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

NVME_FOLDER = "nvme_offload"  # in the run folder, unless --nvme_path gives another
ENGINES = ("recipe", "trainer", "accelerate", "deepspeed")
# Compute capability by GPU (developer.nvidia.com/cuda-gpus).
GPU_CAPABILITY = {
    "P100": (6, 0),
    "P4": (6, 1),
    "V100": (7, 0),
    "V100-PCIE": (7, 0),
    "QUADRO-RTX8000": (7, 5),
    "RTX2080TI": (7, 5),
    "T4": (7, 5),
    "A30": (8, 0),
    "A100": (8, 0),
    "A100-PCIE": (8, 0),
    "A800": (8, 0),
    "A2": (8, 6),
    "A10": (8, 6),
    "A10G": (8, 6),
    "A40": (8, 6),
    "A4000": (8, 6),
    "A5000": (8, 6),
    "A6000": (8, 6),
    "RTX3060": (8, 6),
    "RTX3080": (8, 6),
    "RTX3090": (8, 6),
    "RTX3090-TI": (8, 6),
    "L4": (8, 9),
    "L20": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "RTX4060-TI": (8, 9),
    "RTX4070-TI-SUPER": (8, 9),
    "RTX4080": (8, 9),
    "RTX4080-SUPER": (8, 9),
    "RTX4090": (8, 9),
    "RTX4090-D": (8, 9),
    "RTX6000-ADA": (8, 9),
    "H20": (9, 0),
    "H100": (9, 0),
    "H100-NVL": (9, 0),
    "H100-PCIE": (9, 0),
    "H800": (9, 0),
    "GH200": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
    "B300": (10, 3),
    "RTX-PRO-6000": (12, 0),
    "RTX5060-TI": (12, 0),
    "RTX5070-TI": (12, 0),
    "RTX5080": (12, 0),
    "RTX5090": (12, 0),
}


@dataclass(frozen=True)
class Weights:
    """The sizes of a model's weights, in elements."""

    total: int
    largest: int
    hidden_size: int | None


@dataclass(frozen=True)
class Context:
    """`arguments` holds the Trainer's values under the Trainer's names, as far as known. None means "not known".

    `engine` is who reads the config: one of our recipes, another script's Trainer, a script's own loop with accelerate,
    or only `deepspeed.initialize`.
    """

    world_size: int | None
    ranks_per_node: int | None
    has_cuda: bool | None
    output_dir: str
    arguments: dict[str, Any]
    nvme_path: str | None = None
    pipeline_parallel_size: int | None = None  # stages; None for a run without a pipeline
    sequence_parallel_size: int = 1  # ranks that share each sample
    expert_parallel_size: int = 1  # ranks that hold a mixture's experts together
    engine: str = "recipe"
    gpu_capability: tuple[int, int] | None = None
    weights: Weights | None = None
    is_here: bool = True  # runs on this machine, so its disks and compilers matter
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages; overrides the installed versions

    @property
    def data_parallel_size(self) -> int | None:
        """Number of ranks, or groups of ranks, that read different samples."""
        shared = (self.pipeline_parallel_size or 1) * self.sequence_parallel_size
        return None if self.world_size is None else self.world_size // shared

    @property
    def has_trainer(self) -> bool:
        """Whether the Trainer's arguments, or ours, fill the config and must agree with it."""
        return self.engine in ("recipe", "trainer")

    def version(self, package: str) -> tuple[int, ...] | None:
        """(0, 19, 8) for "0.19.8". None if the package is neither given nor installed."""
        text = self.versions.get(package)
        if text is None:
            try:
                text = metadata.version(package)
            except metadata.PackageNotFoundError:
                return None
        return release(text)


def release(text: str) -> tuple[int, ...]:
    """(0, 19, 8) for "0.19.8+cpu"; anything after the numbers is dropped."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
