"""Stand-ins for the classes in a pickle while it is checked: each accepts what the real class gets from a checkpoint,
and nothing else. So neither DeepSpeed's nor numpy's code sees untrusted arguments before they have been checked: numpy
trusts whatever a pickle says about an array's flags and fields.

A pickle creates them with `__new__` and fills them with `__setstate__`, as in torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from finetune.errors import RequestError

ZERO_STAGES = ("disabled", "optimizer_states", "gradients", "weights")  # index = stage number
NUMBERS = {"u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"}  # the dtypes in a random generator's state
METADATA = "torch.distributed.checkpoint.metadata"


class RefusedError(Exception):
    """The file asks for something that such a file never holds. The message says what."""


class _StandIn:
    """Takes no arguments, and refuses to be filled unless a subclass says what it accepts."""

    def __new__(cls, *given: Any) -> Any:
        if given:
            raise RefusedError(f"{cls.__name__}, made with arguments")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        raise RefusedError(f"{type(self).__name__}, filled with {type(state).__name__}")

    def fill(self, state: Any, names: set[str] | None, kinds: tuple[type, ...]) -> None:
        """Take a dict with exactly the keys `names` (None: any), whose values have types in `kinds` (empty: any)."""
        if type(state) is not dict or (names is not None and set(state) != names):
            raise RefusedError(f"{type(self).__name__} with other attributes")
        for name, value in state.items():
            if type(name) is not str or name.startswith("__") or (kinds and type(value) not in kinds):
                raise RefusedError(f"{type(self).__name__} with {str(name)[:40]} a {type(value).__name__}")
        self.__dict__ |= state


class Fragment(_StandIn):
    """deepspeed.utils.tensor_fragment.fragment_address: where a parameter lies in a flat buffer."""

    def __setstate__(self, state: Any) -> None:
        self.fill(state, {"numel", "start"}, (int,))


class LossScale(_StandIn):
    """deepspeed.runtime.fp16.loss_scaler.LossScaler and DynamicLossScaler: numbers, and a dtype."""

    def __setstate__(self, state: Any) -> None:
        self.fill(state, None, (bool, int, float, type(None), torch.dtype))


class ZeroStage(_StandIn):
    """deepspeed.runtime.zero.config.ZeroStageEnum: a stage, given by its number."""

    def __new__(cls, *given: Any) -> Any:
        if len(given) != 1 or type(given[0]) is not int or not 0 <= given[0] < len(ZERO_STAGES):
            raise RefusedError("ZeroStageEnum that is not a ZeRO stage")
        return given[0]


class NumberKind(_StandIn):
    """numpy.dtype, only of numbers and by name. Python 2 wrote strings as bytes."""

    dtype: np.dtype[Any]

    def __new__(cls, *given: Any) -> Any:
        name = _text(given[0]) if given else ""
        if not 1 <= len(given) <= 3 or name not in NUMBERS or any(type(flag) not in (bool, int) for flag in given[1:]):
            raise RefusedError(f"numpy.dtype of {str(given)[:40]}")
        kind = object.__new__(cls)
        kind.dtype = np.dtype(name)
        return kind

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 8 or state[2:] != (None, None, None, -1, -1, 0):
            raise RefusedError("numpy.dtype with fields or flags")


class ArrayClass(_StandIn):
    """numpy.ndarray, which a pickle names and does not call."""

    def __new__(cls, *given: Any) -> Any:
        raise RefusedError("numpy.ndarray, called")


class Array(_StandIn):
    """numpy's `_reconstruct(ndarray, (0,), b"b")`: an empty array, filled with as many bytes as its shape has."""

    def __new__(cls, *given: Any) -> Any:
        if len(given) != 3 or given[0] is not ArrayClass or given[1] != (0,) or _text(given[2]) != "b":
            raise RefusedError("numpy's _reconstruct of an array that is not empty")
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise RefusedError("numpy.ndarray with another state")
        _, shape, kind, _, content = state
        sides = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if not sides or type(kind) is not NumberKind or not isinstance(content, bytes):
            raise RefusedError("numpy.ndarray of something other than numbers")
        if math.prod(shape) * kind.dtype.itemsize != len(content):
            raise RefusedError("numpy.ndarray with more or fewer bytes than its shape")


class Record(_StandIn):
    """One of torch's records of a sharded checkpoint; keeps its state if that is a dict."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is dict:
            self.fill(state, None, ())


class Whole(Record): ...


class Index(Record): ...


class Info(Record): ...


class Tensor(Record): ...


class Word(_StandIn):
    """A value that only holds words or numbers: a layout, a path."""

    def __new__(cls, *given: Any) -> Any:
        if not all(type(one) in (str, int) for one in given):
            raise RefusedError(f"{cls.__name__} with other arguments")
        return object.__new__(cls)


class LocalPath(Word):
    """A path as Python 3.13 pickles it. Older ones cannot import its module, which torch would find out."""

    def __new__(cls, *given: Any) -> Any:
        if sys.version_info < (3, 13):
            raise RequestError(
                "the .metadata of a sharded checkpoint holds a path as only Python 3.13 writes it, and this is Python "
                f"{platform.python_version()}. Resume it with Python 3.13."
            )
        return super().__new__(cls, *given)


class MemoryFormat(Word):
    """torch's _MEM_FORMAT_ENCODING."""


class Member(_StandIn):
    """`getattr(class, name)`, as Python 3.11.0 to 3.11.3 pickle an enum member (python/cpython#26658); other versions
    call the class with its value. Only for the two classes that occur in such files."""

    def __new__(cls, *given: Any) -> Any:
        if len(given) == 2 and type(given[1]) is str:
            if given[0] is ZeroStage and given[1] in ZERO_STAGES:
                return ZERO_STAGES.index(given[1])
            if given[0] is MemoryFormat and given[1].startswith("TORCH_"):
                return MemoryFormat(given[1])
        raise RefusedError("getattr of something other than an enumeration")


class Size(_StandIn):
    """torch.Size: a tuple of integers."""

    def __new__(cls, *given: Any) -> Any:
        sides = given[0] if len(given) == 1 else None
        if not isinstance(sides, tuple | list) or not all(type(side) is int for side in sides):
            raise RefusedError("torch.Size that is not a tuple of integers")
        return tuple(sides)


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value if isinstance(value, str) else ""


Names = dict[str, Callable[..., Any]]  # keyed by the name in the pickle

NUMPY: Names = {
    "numpy._core.multiarray._reconstruct": Array,
    "numpy.core.multiarray._reconstruct": Array,
    "numpy.ndarray": ArrayClass,
    "numpy.dtype": NumberKind,
}
# Reviewed one by one: no real function accepts more than its stand-in.
STAND_INS: Names = NUMPY | {
    "deepspeed.utils.tensor_fragment.fragment_address": Fragment,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScale,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": LossScale,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "builtins.getattr": Member,
}
DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
SHARDED: Names = DTYPES | {  # for a `.metadata`
    f"{METADATA}.Metadata": Whole,
    f"{METADATA}.BytesStorageMetadata": Record,
    f"{METADATA}.MetadataIndex": Index,
    f"{METADATA}.TensorStorageMetadata": Tensor,
    f"{METADATA}.TensorProperties": Record,
    f"{METADATA}.ChunkStorageMetadata": Record,
    f"{METADATA}.StorageMeta": Record,
    f"{METADATA}._MEM_FORMAT_ENCODING": MemoryFormat,
    "builtins.getattr": Member,
    "torch.distributed.checkpoint.filesystem._StorageInfo": Info,
    "torch.serialization._get_layout": Word,
    "torch.Size": Size,
    "pathlib.PosixPath": Word,
    "pathlib._local.PosixPath": LocalPath,
}

# The subset of what torch allows under weights_only that checkpoints hold. bytearray, for one, is left out: torch would
# allocate one of any length.
TORCH_NAMES = {
    "collections.OrderedDict",
    "builtins.set",
    "_codecs.encode",
    "torch.Size",
    "torch.Tensor",  # ZeRO-3's flat buffers have attributes, which the next entry restores
    "torch._tensor._rebuild_from_type_v2",
    "torch.device",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.serialization._get_layout",
    "torch.storage.UntypedStorage",
    *(f"torch.{kind.__name__}" for kind in torch._storage_classes if kind.__module__ == "torch"),
    *DTYPES,
}
