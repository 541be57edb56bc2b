"""What the wrappers of FSDP and torch.compile would change in the names of weights, and in what is saved."""

from __future__ import annotations

from typing import TypeVar

from accelerate.utils import fsdp2_canonicalize_names
from torch import nn

T = TypeVar("T")


def named_weights(model: nn.Module, every: bool = False) -> dict[str, nn.Parameter]:
    """The model's weights by their names in files. With `every`, a tied weight has all of its names."""
    return clean(dict(model.named_parameters(remove_duplicate=not every)))


def clean(named: dict[str, T]) -> dict[str, T]:
    """Without the parts of names that come from torch.compile, and from FSDP's activation checkpointing. No file has
    them, because torch leaves them out (2.13, distributed/checkpoint/state_dict.py, _get_fqns)."""
    found: dict[str, T] = fsdp2_canonicalize_names(named)
    return found


def keep_class(model: nn.Module) -> None:
    """Let a sharded model say of its class what it was before. FSDP makes a class in a module of its own (torch 2.13,
    fsdp/_fully_shard/_fully_shard.py), and transformers saves the code of that module and its name in the config, if
    the model's class is not one of its own (5.23, dynamic_module_utils.py, custom_object_save)."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(model)
    if issubclass(kind, FSDPModule):
        own = next(one for one in kind.__mro__ if not issubclass(one, FSDPModule))
        kind.__module__, kind.__name__, kind.__qualname__ = own.__module__, own.__name__, own.__qualname__
