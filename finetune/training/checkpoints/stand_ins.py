"""What stands for a class while a checkpoint's pickle is looked at: it takes what the true class takes from a
checkpoint, and nothing else. So neither DeepSpeed's nor numpy's code is given a stranger's arguments before they have
been looked at: numpy believes whatever a pickle says of an array's flags and fields.

Each is what a pickle calls, makes and fills (`__new__`, `__setstate__`), as torch/_weights_only_unpickler.py does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

LAST_ZERO_STAGE = 3
NUMBERS = {"u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"}  # numbers, as a random generator's state has


class RefusedError(Exception):
    """What is asked for is not what a checkpoint holds. The message says what it was."""


class _StandIn:
    """Made without arguments; filling it is refused until a class says what it takes."""

    def __new__(cls, *given: Any) -> Any:
        if given:
            raise RefusedError(f"{cls.__name__}, made with arguments")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        raise RefusedError(f"{type(self).__name__}, filled with {type(state).__name__}")


class Fragment(_StandIn):
    """deepspeed.utils.tensor_fragment.fragment_address: where a parameter lies in a flat buffer."""

    def __setstate__(self, state: Any) -> None:
        _check(self, state, {"numel", "start"}, (int,))


class LossScale(_StandIn):
    """deepspeed.runtime.fp16.loss_scaler.LossScaler and DynamicLossScaler: numbers, and a dtype."""

    def __setstate__(self, state: Any) -> None:
        _check(self, state, None, (bool, int, float, type(None), torch.dtype))


class ZeroStage(_StandIn):
    """deepspeed.runtime.zero.config.ZeroStageEnum: a stage by its number."""

    def __new__(cls, *given: Any) -> Any:
        if len(given) != 1 or type(given[0]) is not int or not 0 <= given[0] <= LAST_ZERO_STAGE:
            raise RefusedError("ZeroStageEnum of no ZeRO stage")
        return given[0]


class NumberKind(_StandIn):
    """numpy.dtype, of numbers and by name alone."""

    def __new__(cls, *given: Any) -> Any:
        if (
            not 1 <= len(given) <= 3
            or given[0] not in NUMBERS
            or not all(type(flag) in (bool, int) for flag in given[1:])
        ):
            raise RefusedError(f"numpy.dtype of {str(given)[:40]}")
        kind = object.__new__(cls)
        kind.item_bytes = int(given[0][1:])
        return kind

    item_bytes: int

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 8 or state[2:] != (None, None, None, -1, -1, 0):
            raise RefusedError("numpy.dtype with fields or flags")


class ArrayClass(_StandIn):
    """numpy.ndarray, which a pickle names and does not call."""

    def __new__(cls, *given: Any) -> Any:
        raise RefusedError("numpy.ndarray, called")


class Array(_StandIn):
    """numpy's `_reconstruct(ndarray, (0,), b"b")`, which makes an empty array; it is filled with as many bytes as its
    shape has."""

    def __new__(cls, *given: Any) -> Any:
        if len(given) != 3 or given[0] is not ArrayClass or given[1:] not in (((0,), b"b"), ((0,), "b")):
            raise RefusedError("numpy's _reconstruct of no empty array")
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise RefusedError("numpy.ndarray with another state")
        _, shape, kind, _, content = state
        sides = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if not sides or type(kind) is not NumberKind or not isinstance(content, bytes):
            raise RefusedError("numpy.ndarray of no numbers")
        if math.prod(shape) * kind.item_bytes != len(content):
            raise RefusedError("numpy.ndarray with more or fewer bytes than its shape")


# By the name that a pickle gives. Looked at one by one: none is a function that takes more than its stand-in.
STAND_INS: dict[str, Callable[..., Any]] = {
    "deepspeed.utils.tensor_fragment.fragment_address": Fragment,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScale,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": LossScale,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "numpy._core.multiarray._reconstruct": Array,
    "numpy.core.multiarray._reconstruct": Array,
    "numpy.ndarray": ArrayClass,
    "numpy.dtype": NumberKind,
}

# Of what torch takes by itself under weights_only, that which checkpoints hold. bytearray, for one, is not among them:
# torch would make one of any length.
TORCH_NAMES = {
    "collections.OrderedDict",
    "builtins.set",
    "_codecs.encode",
    "torch.Size",
    "torch.Tensor",  # ZeRO-3's flat buffers have attributes, which are kept by the next
    "torch._tensor._rebuild_from_type_v2",
    "torch.device",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.serialization._get_layout",
    "torch.storage.UntypedStorage",
    *(f"torch.{kind.__name__}" for kind in torch._storage_classes if kind.__module__ == "torch"),
    *(str(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype)),
}


def _check(made: Any, state: Any, names: set[str] | None, kinds: tuple[type, ...]) -> None:
    """Raises RefusedError unless `state` is a dict of `names` (any where None) to values of `kinds`."""
    if type(state) is not dict or (names is not None and set(state) != names):
        raise RefusedError(f"{type(made).__name__} with other attributes")
    for name, value in state.items():
        if type(name) is not str or name.startswith("__") or type(value) not in kinds:
            raise RefusedError(f"{type(made).__name__} with {str(name)[:40]} a {type(value).__name__}")
