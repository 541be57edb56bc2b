"""How a model can be spread over ranks: names, launchers and flags. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.measure.processes import DEEPSPEED, PYTHON, TORCHRUN


@dataclass(frozen=True)
class Layout:
    """`ds_config` is the shipped one, None without DeepSpeed and where there is none but the grid's; `flags` are those
    of the recipe."""

    launcher: str
    ds_config: str | None = None
    flags: dict[str, object] = field(default_factory=dict)
    has_stages: bool = False


LAYOUTS: dict[str, Layout] = {
    "none": Layout(PYTHON),  # one process, whatever the world
    "ddp": Layout(TORCHRUN),
    "checkpointing": Layout(TORCHRUN),  # ddp that computes activations again
    "fsdp": Layout(TORCHRUN, flags={"fsdp": True}),
    **{
        name: Layout(DEEPSPEED, name)
        for name in (
            *("zero0", "zero1", "zero2", "zero3"),
            *("zero2_offload", "zero3_offload", "zero3_nvme", "zeropp"),
        )
    },
    "deepspeed": Layout(DEEPSPEED),  # whatever the grid's ds_configs say
    "pipeline": Layout(DEEPSPEED, "pipeline", has_stages=True),
}
