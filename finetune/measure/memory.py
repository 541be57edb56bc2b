"""Memory as the bytes of tensor storages: exact on any device, and repeatable; a process's RSS is neither.

    with Allocations() as memory:
        ...                      # whatever allocates
    memory.live, memory.peak     # bytes

It sees every operator that torch dispatches, including those of backward passes and of optimizers. It does not see
temporary memory inside a kernel, or an allocator's blocks and gaps: RSS and a GPU's `memory_reserved` are larger.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):  # type: ignore[misc]
    """Counts the storages created on `device` while it is active, each until it is freed, even if that is later. The
    caller sets `phase` to name what is running; `peaks` has the most bytes in each phase."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.live = 0
        self.phase = "start"
        self.peaks: dict[str, int] = {}
        self._known: dict[int, tuple[int, Any]] = {}  # bytes of each storage, and a reference to it
        self._empty: set[int] = set()  # those of them made by `torch.empty`

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    def forget_peaks(self) -> None:
        self.peaks = {self.phase: self.live}

    def count_existing(self) -> None:
        """Count tensors that were created before this mode became active."""
        for thing in gc.get_objects():
            # isinstance would trigger proxy objects, such as torch's deprecated names.
            if issubclass(type(thing), torch.Tensor) and thing.device.type == self.device:
                self._add(thing)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # FSDP's DTensor: its operators on the wrapped tensors arrive here one by one
        made = function(*args, **(kwargs or {}))
        self._resize()
        for value in tree_iter(made):
            if isinstance(value, torch.Tensor) and value.device.type == self.device:
                self._add(value, str(function))
        return made

    def _resize(self) -> None:
        """FSDP allocates and frees gathered weights by resizing their storage, which no operator shows (torch 2.13,
        distributed/fsdp/_fully_shard/_fsdp_param.py, alloc_storage and free_storage)."""
        for key, (before, storage) in [(key, self._known[key]) for key in self._empty]:
            size = storage().nbytes()
            self.live += size - before
            self._known[key] = size, storage

    def _add(self, tensor: torch.Tensor, made_by: str = "") -> None:
        if is_traceable_wrapper_subclass(tensor):  # its storage is only nominal
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # tensors without one, such as sparse ones
            return
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            before, reference = self._known[key]
            self.live += size - before  # it may have been resized
            self._known[key] = size, reference
        elif size:
            self._known[key] = size, weakref.ref(storage, partial(self._freed, key))
            self.live += size
            if made_by.startswith("aten.empty"):
                self._empty.add(key)
        if self.live > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self.live

    def _freed(self, key: int, _: Any) -> None:
        size, _ = self._known.pop(key)
        self._empty.discard(key)
        self.live -= size
