"""What the Hugging Face Trainer saves, with and without DeepSpeed and FSDP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from finetune.training.checkpoints.manifest import Layout
from finetune.training.checkpoints.space import copied_bytes, trainer_bytes
from finetune.training.resuming import innermost


class TrainerSaved:
    """Implements saves.Saved."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def layout(self) -> Layout:
        ranks = self.trainer.args.world_size
        if self.trainer.is_deepspeed_enabled:
            return Layout("deepspeed", ranks, zero_stage=int(self._zero().get("stage", 0)))
        return Layout("fsdp" if self.trainer.is_fsdp_enabled else "ddp", ranks)

    def expected_bytes(self) -> int:
        return trainer_bytes(self.trainer, self.layout.zero_stage)

    def copied_bytes(self, size: int) -> int:
        return copied_bytes(self.trainer, size, self.layout.zero_stage)

    def obstacle(self) -> str | None:
        if self.trainer.is_deepspeed_enabled:
            places = [(self._zero().get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param")]
            if "nvme" in places:
                return "state offloaded to NVMe cannot be copied to memory"
        return None

    def ahead(self) -> Iterator[torch.Tensor]:
        """Under ZeRO-1 and 2 DeepSpeed asks for them only after several messages between ranks."""
        if self.layout.zero_stage not in (1, 2) or self.trainer.args.save_only_model:
            return
        if self.trainer.args.should_save:
            yield from on_cpu(p for p in self.trainer.model.parameters() if p.requires_grad)
        inner = innermost(self.trainer.optimizer)
        yield from on_cpu(tensor for group in inner.param_groups for tensor in group["params"])
        yield from on_cpu(tensor for state in inner.state.values() for tensor in state.values())

    def _zero(self) -> dict[str, Any]:
        config = self.trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        return dict(config.get("zero_optimization", {}))


def on_cpu(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The plain tensors with elements there."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return (one for one in values if type(one) in plain and one.device.type == "cpu" and one.numel())
