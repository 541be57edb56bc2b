"""Writes DeepSpeed's universal checkpoint, which its engine loads at any ZeRO stage and on any number of ranks.

DeepSpeed's own converter (0.19.8, checkpoint/ds_to_universal.py) is not used: it opens shards as plain pickles, writes
everything twice, omits ZeRO-3's step, and converts only ZeRO checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.models.expert_layers import EXPERTS
from finetune.training.reshard.portable import COUNTERS, WEIGHT, Portable

LATEST = "latest_universal"  # the engine reads the folder's name from this file


def write_weight(folder: Path, portable: Portable, name: str) -> None:
    """Write a weight and its states. The loader reads every file in the weight's folder
    (checkpoint/universal_checkpoint.py, load_hp_checkpoint_state)."""
    place = folder / "zero" / name
    place.mkdir(parents=True, exist_ok=True)
    for key in (WEIGHT, *portable.keys):
        whole = portable.read(name, key)
        of_experts = {"is_expert_param": True, "ep_num_experts": len(whole)} if EXPERTS.search(name) else {}
        torch.save({"param": whole, "cat_dim": 0, **of_experts}, place / f"{key}.pt")
    if portable.steps is not None:
        torch.save(torch.tensor(portable.steps), place / "step.pt")


def write_record(folder: Path, portable: Portable, stage: int, world_size: int) -> None:
    """Write what does not belong to a single weight, and last the file that tells the engine the folder's name."""
    from deepspeed import __version__

    groups = [{**group.settings, "params": [index]} for index, group in enumerate(portable.groups)]
    state: dict[str, Any] = {} if portable.steps is None else {"step": torch.tensor(portable.steps)}
    inner = {"state": {0: state}, "param_groups": groups}
    # ZeRO-3's loader looks for the groups in the inner record, that of ZeRO-1 and 2 in the outer one (zero/stage3.py,
    # load_hp_checkpoint_state_from_checkpoint_dir_stage3; base_optimizer.py).
    record = {"optimizer_state_dict": inner, "param_groups": groups, "ds_version": __version__}
    torch.save(record, folder / "zero" / "optimizer_state.pt")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    torch.save(engine_record(portable, world_size), folder / name)
    (folder.parent / LATEST).write_text(folder.name, encoding="utf-8")


def engine_record(portable: Portable, world_size: int) -> dict[str, Any]:
    """What DeepSpeed's engine reads besides weights and optimizer (runtime/engine.py, _load_checkpoint)."""
    from deepspeed import __version__

    return {
        "module": {},
        "optimizer": None,
        "lr_scheduler": portable.schedule,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": __version__,
        **dict.fromkeys(COUNTERS, 0),
        **portable.counters,
    }
