"""Loads a checkpoint of any layout into the Trainer's live engine, weight by weight, by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed

from finetune.errors import RequestError
from finetune.training.checkpoints.writing import leads, together
from finetune.training.fsdp import clean, named_weights
from finetune.training.reshard.portable import COUNTERS, WEIGHT, Portable
from finetune.training.resuming import innermost

TELL_SECONDS = 10.0  # between two progress lines
Put = Callable[[str, Any, str, torch.Tensor], None]  # a weight's name, the weight, the key of a state, and the state


def load_weights(model: Any, portable: Portable) -> None:
    """Load the model's weights and buffers, and nothing of the optimizer."""
    _put_all(model, portable, (), lambda name, weight, key, whole: None)


def load_everything(trainer: Any, portable: Portable) -> None:
    """Load weights, buffers and optimizer states. All ranks must call it. Raises RequestError, the same on all, if the
    optimizer is grouped otherwise than the checkpoint's.

    Every rank reads each weight, and takes its part; what one cannot read ends all. DeepSpeed's `safe_set_*` functions
    put it in place; they do not cover the step counts, the groups' settings, the loss scale, and states that do not
    exist yet.
    """
    engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
    outer = engine.optimizer if engine else trainer.optimizer
    inner = innermost(outer)
    refuse_other_groups(inner, portable)
    if engine is not None and engine.zero_optimization():
        _make_zero_states(outer, inner, portable.keys)
        put: Put = _put_in_zero
    else:
        put = _put_in_optimizer(outer, inner, trainer.model)
    _put_all(trainer.model, portable, (WEIGHT, *portable.keys), put)
    settle_optimizer(inner, portable)
    if engine is not None:
        for counter in COUNTERS:
            setattr(engine, counter, portable.counters.get(counter, 0))
        scaler = getattr(outer, "loss_scaler", None) or getattr(outer, "loss_scale_config", None)
        known = vars(scaler) if scaler is not None else {}
        known.update({name: value for name, value in portable.loss_scale.items() if name in known})


def _put_all(model: Any, portable: Portable, keys: tuple[str, ...], put: Put) -> None:
    def read(name: str, key: str) -> torch.Tensor:
        return together(lambda: portable.read(name, key))

    named = named_weights(model)
    if missing := sorted(set(portable.shapes) - set(named)):
        raise RequestError(f"--resume: this run's model has no weight {missing[0]}, which the checkpoint has.")
    for name, weight in _told([(name, named[name]) for name in portable.shapes]):
        whole = read(name, WEIGHT)
        if whole.shape != (own := tuple(getattr(weight, "ds_shape", weight.shape))):
            raise RequestError(f"--resume: {name} is {tuple(whole.shape)} in the checkpoint, but {own} in this model.")
        with gathered(weight), torch.no_grad():
            weight.copy_(like(weight, whole))
        for key in keys:
            put(name, weight, key, whole if key == WEIGHT else read(name, key))
    put_buffers(model, portable.buffers)


def _told(weights: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    told = time.monotonic()
    for done, one in enumerate(weights):
        yield one
        if leads() and time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            print(f"resume: {done + 1} of {len(weights)} weights moved", flush=True)


def put_buffers(model: Any, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in clean(dict(model.named_buffers())).items():
        if name in buffers:
            buffer.copy_(buffers[name])


def gathered(weight: Any) -> Any:
    """Inside this context, a weight that ZeRO-3 shards is present in full, and changes to it persist."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if hasattr(weight, "ds_id") else nullcontext()


def like(weight: Any, whole: torch.Tensor) -> torch.Tensor:
    """`whole` with the device, dtype and sharding (FSDP's) of `weight`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = whole.to(weight.device, weight.dtype)
    return distribute_tensor(whole, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else whole


def _put_in_optimizer(outer: Any, optimizer: Any, model: Any) -> Put:
    """For an optimizer whose every weight has states of its own; in bf16 and fp16 `outer` has fp32 copies of the
    weights, which own them (deepspeed/runtime/fp16/unfused_optimizer.py)."""
    name_of = {id(weight): name for name, weight in named_weights(model).items()}
    own = [group["params"] for group in optimizer.param_groups]
    halves = getattr(outer, "fp16_groups", own)
    pairs = (pair for weights, owners in zip(halves, own, strict=True) for pair in zip(weights, owners, strict=True))
    owner_of = {name_of[id(weight)]: owner for weight, owner in pairs}

    def put(name: str, weight: Any, key: str, whole: torch.Tensor) -> None:
        owner = owner_of[name]
        if key != WEIGHT:
            optimizer.state[owner][key] = like(owner, whole)
        elif owner is not weight:
            owner.data.copy_(whole)

    return put


def _make_zero_states(outer: Any, inner: Any, keys: tuple[str, ...]) -> None:
    """ZeRO 1 to 3 keep flat tensors, which have no states before the first step, and link states to weights only after
    it (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, _optimizer_step)."""
    flats = getattr(outer, "fp32_partitioned_groups_flat", None)  # ZeRO-3's groups are empty between steps
    for flat in flats or [flat for group in inner.param_groups for flat in group["params"]]:
        inner.state[flat] = {key: torch.zeros_like(flat) for key in keys}
    if flats is None:
        outer._lazy_init_hp_params_optimizer_state()


def _put_in_zero(name: str, weight: Any, key: str, whole: torch.Tensor) -> None:
    from deepspeed import utils

    state = () if key == WEIGHT else (key,)
    if hasattr(weight, "ds_id"):
        # `safe_set_full_*` fails for a size that the number of ranks does not divide (runtime/zero/stage3.py,
        # set_full_hp_param: narrows without the padding).
        size, ranks, rank = weight.ds_tensor.numel(), distributed.get_world_size(), distributed.get_rank()
        padded = torch.nn.functional.pad(whole.flatten(), (0, size * ranks - whole.numel()))
        put = utils.safe_set_local_optimizer_state if state else utils.safe_set_local_fp32_param
        put(weight, padded[rank * size :][:size], *state)
    else:
        put = utils.safe_set_full_optimizer_state if state else utils.safe_set_full_fp32_param
        put(weight, whole, *state)


def filled_groups(optimizer: Any) -> list[Any]:
    """The Trainer without DeepSpeed keeps groups that have no weights."""
    return [group for group in optimizer.param_groups if group["params"]] or optimizer.param_groups


def refuse_other_groups(optimizer: Any, portable: Portable) -> None:
    """Raises RequestError if one optimizer is the Trainer's, with weights that decay and others, and the other one is
    of a DeepSpeed config, with all in one group."""
    here, written = len(filled_groups(optimizer)), len(portable.groups)
    if here != written:
        raise RequestError(
            f"--resume: the checkpoint's optimizer has {written} group(s) of weights, and this run's {here}: one is of "
            "a DeepSpeed config (`optimizer`), the other one of flags. Take both from the same."
        )


def settle_optimizer(optimizer: Any, portable: Portable) -> None:
    """Set the step counts and the groups' settings.

    A step must have the type and device that the optimizer expects, as with torch's `load_state_dict`: for torch a
    tensor, on the weights' device if fused; for DeepSpeed a number, which is passed to its kernel.
    """
    is_torch = type(optimizer).__module__.startswith("torch.")
    for weight, state in optimizer.state.items():
        if portable.steps is None or not state:
            continue
        if is_torch:
            on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            device = weight.device if on_device else torch.device("cpu")
            state["step"] = torch.tensor(portable.steps, dtype=torch.float32, device=device)
        else:
            state["step"] = int(portable.steps)
    for own, written in zip(filled_groups(optimizer), portable.groups, strict=True):
        own.update({key: value for key, value in written.settings.items() if key in own})
