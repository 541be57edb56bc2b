"""One rank with tiny engines, for test_reshard_engines.py: `python live_engines.py FOLDER RANK RANKS`. Loads the same
states into an engine of each kind, and prints what it holds afterwards, as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from test_reshard import KEYS, SHAPES, portable, whole_tensors
from torch import distributed, nn

from finetune.errors import RequestError
from finetune.training.reshard.loading import load_everything
from finetune.training.reshard.portable import WEIGHT, Portable
from finetune.training.reshard.zero_shards import read_zero
from finetune.training.resuming import innermost

TENSORS = whole_tensors()
SCALE = {"cur_scale": 8.0, "cur_iter": 7, "last_overflow_iter": 5}
ENGINES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    **{f"zero{stage} bf16": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}} for stage in range(4)},
    **{
        f"zero{stage} offload": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
        for stage in (2, 3)
    },
    **{f"zero{stage} fp16": {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True}} for stage in range(4)},
}


class Part(nn.Module):
    """ZeRO-3 gathers weights when their module is called."""

    def forward(self, times: float) -> torch.Tensor:
        return sum((p.sum() * times for p in self.parameters()), start=torch.zeros(()))


class Model(nn.Module):
    """With the weights of SHAPES, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part(), Part()
        for name, shape in {name: shape for group in SHAPES for name, shape in group.items()}.items():
            part, _, last = name.partition(".")
            getattr(self, part).register_parameter(last, nn.Parameter(torch.ones(shape)))
        self.frozen = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, times: float = 1.0) -> torch.Tensor:
        return self.a(times) + self.b(times) + self.frozen.sum()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [{"params": [named[name] for name in group], "weight_decay": 0.5} for group in SHAPES]


def engine_of(config: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **config,
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    return model, deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def loaded(config: dict[str, Any], source: Portable) -> tuple[nn.Module, Any]:
    model, engine = engine_of(config)
    trainer = SimpleNamespace(is_deepspeed_enabled=True, model=model, model_wrapped=engine, optimizer=engine.optimizer)
    load_everything(trainer, source)
    return model, engine


def scale_of(engine: Any) -> list[float]:
    found: Any = getattr(engine.optimizer, "loss_scaler", None) or engine.optimizer.loss_scale_config
    return [found.cur_scale, found.cur_iter, found.last_overflow_iter]


def look(config: dict[str, Any]) -> dict[str, Any]:
    model, engine = loaded(config, portable(buffers={"seen": torch.arange(3.0)}, loss_scale=SCALE))
    inner = innermost(engine.optimizer)
    dtype = torch.bfloat16 if "bf16" in config else torch.float16 if "fp16" in config else torch.float32
    own = [p for group in inner.param_groups for p in group["params"]]  # of engines without ZeRO
    names = [name for group in SHAPES for name in group]
    other = []
    for at, name in enumerate(names):
        weight = dict(model.named_parameters())[name]
        with deepspeed.zero.GatheredParameters([weight] if hasattr(weight, "ds_id") else []):
            if not torch.equal(weight.data, TENSORS[WEIGHT][name].to(dtype)):
                other.append(f"{name} itself")
        for key in (WEIGHT, *KEYS):
            if not config["zero_optimization"]["stage"]:
                found = own[at].data if key == WEIGHT else inner.state[own[at]][key]
            elif key == WEIGHT:
                found = safe_get_full_fp32_param(weight)
            else:
                found = safe_get_full_optimizer_state(weight, key)
            if not torch.equal(found, TENSORS[key][name]):
                other.append(f"{key} of {name}")
    result = {
        "other": other,
        "steps": sorted({float(state["step"]) for state in inner.state.values()}),
        "decays": [group["weight_decay"] for group in inner.param_groups],
        "rates": [group["lr"] for group in inner.param_groups],
        "buffer": model.seen.tolist(),
        "frozen": float(model.frozen.sum()) if not hasattr(model.frozen, "ds_id") else 6.0,
        "counters": [engine.global_steps, engine.skipped_steps, engine.global_samples],
        "scale": scale_of(engine) if "fp16" in config else None,
    }
    engine.backward(engine())
    engine.step()
    result["steps after one more"] = sorted({float(state["step"]) for state in inner.state.values()})
    return result


def overflow(folder: Path) -> dict[str, Any]:
    """The scale of an engine whose gradients were infinite three times, and of those that go on from it."""
    _, engine = loaded(ENGINES["zero2 fp16"], portable(loss_scale=SCALE))
    for _ in range(3):
        engine.backward(engine(float("inf")))
        engine.step()
    engine.save_checkpoint(str(folder / "saved"), tag="global_step7")
    source = read_zero(folder / "saved" / "global_step7")
    others = {name: loaded(ENGINES[name], source)[1] for name in ENGINES if "fp16" in name}
    return {
        "steps": source.steps,
        "of": scale_of(engine),
        "others": {name: [*scale_of(one), one.skipped_steps] for name, one in others.items()},
    }


def cannot_read(is_last: bool) -> str:
    """What all ranks raise if the last one cannot read a state."""
    source = portable()

    def read(name: str, key: str) -> torch.Tensor:
        if is_last and (name, key) == ("b.bias", "exp_avg"):
            raise RequestError("b.bias is gone")
        return source.read(name, key)

    try:
        loaded(ENGINES["zero3"], replace(source, read=read))
    except RequestError as error:
        return str(error)
    return "nothing"


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.WARNING)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    # DeepSpeed refuses fp16 on CPUs without instructions for it, but torch emulates it.
    get_accelerator().is_fp16_supported = lambda: True
    found = {name: look(config) for name, config in ENGINES.items()} | {"overflow": overflow(folder)}
    found["cannot read"] = cannot_read(rank == ranks - 1)
    print("\n" + json.dumps(found), flush=True)
    distributed.barrier()
    os._exit(0)  # gloo's threads still run, and Python's normal exit may abort because of them (pytorch PR 179291)


if __name__ == "__main__":
    main()
