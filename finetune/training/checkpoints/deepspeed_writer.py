"""Intercepts the files that DeepSpeed saves, through its checkpoint engine interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

Keep = Callable[[str, Any, bool], bool]


class CopyingCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's default engine, except that the files that `keep` accepts are written later."""

    def __init__(self, before: Any, keep: Keep) -> None:
        self.name, self.zipfile_serialization, self.keep = before.name, before.zipfile_serialization, keep

    def save(self, state_dict: Any, path: str) -> None:
        if not self.keep(path, state_dict, self.zipfile_serialization):
            super().save(state_dict, path)


def copy_for(engine: Any, keep: Keep) -> None:
    """Replace DeepSpeed's default checkpoint engine; another one chosen by the config stays, and saves as usual."""
    before = engine.checkpoint_engine
    if type(before) in (TorchCheckpointEngine, CopyingCheckpointEngine):
        engine.checkpoint_engine = CopyingCheckpointEngine(before, keep)
