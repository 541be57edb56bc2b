"""Copies of objects with tensors, in memory that two processes share, and the objects again on the other side.

The memory is a memfd: it has no name, so that nothing of it is left however the processes end. It is kept between
saves, for its pages cost more to get than to fill (828 MB: 0.8 s the first time, 0.05 s after that).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch

SEGMENT_BYTES = 64 * 2**20
ALIGNMENT = 64

Segment = tuple[int, int]  # where it begins in the memory, and its bytes
Place = tuple[int, int]  # of some bytes: the number of the segment, and where they begin in it


class Memory:
    """`handle` is the memfd's; `segments` are mapped. One side fills it by `put`, the other reads it by `at`."""

    def __init__(self, handle: int, segments: Sequence[Segment] = ()) -> None:
        self.handle = handle
        self.segments: list[Segment] = []
        self.maps: list[torch.Tensor] = []
        self.used = [0] * len(segments)
        self.map(segments)

    def map(self, segments: Sequence[Segment]) -> None:
        """Those that are not mapped yet."""
        for begin, size in segments[len(self.segments) :]:
            self.segments.append((begin, size))
            self.maps.append(torch.frombuffer(mmap.mmap(self.handle, size, offset=begin), dtype=torch.uint8))

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.segments)

    def clear(self) -> None:
        """What is put comes in place of what is there."""
        self.used = [0] * len(self.segments)

    def put(self, content: torch.Tensor) -> Place:
        """Copy a flat tensor of bytes, of any device. Raises OSError where there is no memory."""
        number, begin = self._room(content.numel())
        self.maps[number][begin : begin + content.numel()].copy_(content)
        return number, begin

    def at(self, place: Place, size: int) -> torch.Tensor:
        number, begin = place
        return self.maps[number][begin : begin + size]

    def _room(self, size: int) -> Place:
        for number, (_, whole) in enumerate(self.segments):
            begin = -(-self.used[number] // ALIGNMENT) * ALIGNMENT
            if begin + size <= whole:
                self.used[number] = begin + size
                return number, begin
        begin, whole = self.bytes, -(-max(size, 1) // SEGMENT_BYTES) * SEGMENT_BYTES
        os.ftruncate(self.handle, begin + whole)
        self.map([*self.segments, (begin, whole)])
        self.used.append(size)
        return len(self.segments) - 1, 0


class OtherDeviceError(Exception):
    """A tensor that is pickled by value is on a device that the process on the other side may not have."""


class _Copier(pickle.Pickler):
    """Storages go into the memory, each once, all else into the pickle: the file that torch.save makes of what comes
    out on the other side is that of the object."""

    def __init__(self, file: io.BytesIO, memory: Memory) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.memory = memory
        self.stored: dict[int, tuple[torch.UntypedStorage, Place]] = {}  # held, so that no address comes twice

    def reducer_override(self, obj: Any) -> Any:
        is_plain = type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized
        if not is_plain or vars(obj) or obj.is_conj() or obj.is_neg() or obj.device.type == "meta":
            # As pickle has it, by value, and with its device; of a parameter what it holds comes here again.
            if isinstance(obj, torch.Tensor) and type(obj) is not torch.nn.Parameter and obj.device.type != "cpu":
                raise OtherDeviceError
            return NotImplemented
        shape = (tuple(obj.shape), obj.stride(), obj.storage_offset())
        return _tensor, (obj.untyped_storage(), obj.dtype, *shape, obj.requires_grad)

    def persistent_id(self, obj: Any) -> tuple[Place, int] | None:
        if not isinstance(obj, torch.UntypedStorage):
            return None
        address, size = obj.data_ptr(), obj.nbytes()
        if size == 0:
            return (0, 0), 0
        if address not in self.stored or self.stored[address][0].nbytes() != size:
            flat = torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj)
            self.stored[address] = (obj, self.memory.put(flat))
        return self.stored[address][1], size


class _Maker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Memory) -> None:
        super().__init__(file)
        self.memory = memory
        self.made: dict[Place, torch.UntypedStorage] = {}

    def persistent_load(self, found: tuple[Place, int]) -> torch.UntypedStorage:
        place, size = found
        if size == 0:
            return torch.UntypedStorage(0)
        if place not in self.made:  # a storage of its own, which torch.save writes whole, and not all of the memory
            self.made[place] = _alone(self.memory.at(place, size)).untyped_storage()
        return self.made[place]


def _alone(content: torch.Tensor) -> torch.Tensor:
    """The same bytes, of a storage that ends where they end."""
    return torch.frombuffer(content.numpy(), dtype=torch.uint8)


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    trains: bool,
) -> torch.Tensor:
    made = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return made.requires_grad_() if trains else made


def copied(content: Any, memory: Memory) -> bytes:
    """A pickle of it, for `restored`, whose tensors are in the memory. May raise OtherDeviceError."""
    file = io.BytesIO()
    _Copier(file, memory).dump(content)
    return file.getvalue()


def restored(pickled: bytes, memory: Memory) -> Any:
    """On the CPU, and only for as long as nothing else is put into the memory. `pickled` is of a process of ours."""
    return _Maker(io.BytesIO(pickled), memory).load()


def copied_weights(weights: dict[str, torch.Tensor], memory: Memory) -> dict[str, Any]:
    """Each contiguous and by itself, as safetensors takes them."""
    found = {}
    for name, weight in weights.items():
        flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = (memory.put(flat), flat.numel(), weight.dtype, tuple(weight.shape))
    return found


def restored_weights(places: dict[str, Any], memory: Memory) -> dict[str, torch.Tensor]:
    found = {}
    for name, (place, size, dtype, shape) in places.items():
        flat = _alone(memory.at(place, size)).view(dtype) if size else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
    return found
