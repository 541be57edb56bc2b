"""Copy objects with tensors into memory that two processes share, and rebuild them on the other side.

The memory is a memfd: it has no name, so nothing is left behind however the processes end. It is kept between saves,
because allocating its pages costs more than filling them (828 MB: 0.8 s the first time, 0.05 s after that).
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from finetune.host.hardware import cores_here

SEGMENT_BYTES = 64 * 2**20
ALIGNMENT = 64
PIECE_BYTES = 4 * 2**20  # that a thread copies at a time
THREADS = 8  # more are not faster: memory is the limit
MOSTLY = 0.9  # of a flat storage of weights; the rest is padding

Segment = tuple[int, int]  # offset in the memory, size in bytes
Place = tuple[int, int]  # of a block of bytes: index of the segment, offset in it
Piece = tuple[int, int, int]  # addresses of target and source, and bytes


class Memory:
    """`handle` is the memfd; `segments` are mapped. One side writes with `put`, the other reads with `at`."""

    def __init__(self, handle: int, segments: Sequence[Segment] = ()) -> None:
        self.handle = handle
        self.segments: list[Segment] = []
        self.maps: list[torch.Tensor] = []
        # Kept between saves: on busy cores each start of a thread takes 4 ms.
        self.threads = min(cores_here(), THREADS)
        self.pool = ThreadPoolExecutor(self.threads, initializer=_yield_to_others)
        self.copying: list[tuple[Iterator[Piece], Any, list[Future[None]]]] = []
        self.used = [0] * len(segments)
        self.map(segments)

    def map(self, segments: Sequence[Segment]) -> None:
        """Map the segments that are not mapped yet."""
        for begin, size in segments[len(self.segments) :]:
            self.segments.append((begin, size))
            self.maps.append(torch.frombuffer(mmap.mmap(self.handle, size, offset=begin), dtype=torch.uint8))

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.segments)

    def begin(self, pieces: list[Piece], held: Any) -> None:
        """Begin to copy within this process's memory, and hold what it belongs to meanwhile. Not with torch's `copy_`,
        which takes 60 ms of processor time for 314 MiB in 300 tensors on one thread, where this takes 47 (torch 2.13),
        and has but one where a launcher sets OMP_NUM_THREADS to 1: ranks wait for one another, and leave cores free."""
        left = iter(pieces)
        if sum(size for _, _, size in pieces) <= PIECE_BYTES:
            _move(left)
            return
        self.copying.append((left, held, [self.pool.submit(_move, left) for _ in range(self.threads)]))

    def wait(self, but: int = 0) -> None:
        """Copy what no thread has begun to, `but` for so many that began first. Until then, nothing may change what a
        Storages has been given."""
        while len(self.copying) > but:
            left, _, threads = self.copying[-1]  # which holds what is copied
            _move(left)
            for thread in threads:
                if not thread.cancel():
                    thread.result()
            self.copying.pop()

    def clear(self) -> None:
        """Let the next `put` overwrite what is there."""
        self.wait()
        self.used = [0] * len(self.segments)

    def put(self, content: torch.Tensor) -> Place:
        """Copy a flat tensor of bytes from any device. Raises OSError when memory runs out."""
        number, begin = place = self.room(content.numel())
        if content.device.type == "cpu":
            others = len(self.copying)
            self.begin(_pieces(self.address(place), content.data_ptr(), content.numel()), content)
            self.wait(but=others)
        else:
            self.maps[number][begin : begin + content.numel()].copy_(content)
        return place

    def address(self, place: Place) -> int:
        number, begin = place
        return int(self.maps[number].data_ptr()) + begin

    def at(self, place: Place, size: int) -> torch.Tensor:
        number, begin = place
        return self.maps[number][begin : begin + size]

    def room(self, size: int) -> Place:
        """Reserve memory for so many bytes. Raises OSError."""
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


class Storages:
    """Copies each storage once. It keeps references, so that no address is reused meanwhile. Those on the CPU are
    copied from `begin` to the memory's `wait`: meanwhile the caller can exchange messages with other ranks."""

    def __init__(self, memory: Memory, before: Storages | None = None) -> None:
        self.memory = memory
        self.pieces: list[Piece] = []  # still to be copied
        self.stored: dict[int, tuple[torch.UntypedStorage, Place]] = {} if before is None else dict(before.stored)

    def put(self, storage: torch.UntypedStorage) -> Place:
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self.stored or self.stored[address][0].nbytes() != size:
            if storage.device.type == "cpu":
                place = self.memory.room(size)
                self.pieces += _pieces(self.memory.address(place), address, size)
            else:
                place = self.memory.put(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            self.stored[address] = (storage, place)
        return self.stored[address][1]

    def begin(self) -> None:
        self.memory.begin(self.pieces, (self.memory.maps, self.stored))
        self.pieces = []


def _pieces(target: int, source: int, size: int) -> list[Piece]:
    cuts = range(0, size, PIECE_BYTES)
    return [(target + cut, source + cut, min(PIECE_BYTES, size - cut)) for cut in cuts]


def _yield_to_others() -> None:
    """This thread alone: what exchanges messages meanwhile gets a core at once. At another niceness it would wait for
    the end of a time slice, at each message."""
    with suppress(OSError):  # a sandbox may not allow it
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _move(left: Iterator[Piece]) -> None:
    for piece in left:
        ctypes.memmove(*piece)  # without Python's lock


class OtherDeviceError(Exception):
    """A tensor pickled by value is on a device that the other process may not have."""


class _Copier(pickle.Pickler):
    """Puts each storage into the memory once, and everything else into the pickle. On the other side, torch.save makes
    the same file from the rebuilt object as from the original."""

    def __init__(self, file: io.BytesIO, storages: Storages) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages = storages

    def reducer_override(self, obj: Any) -> Any:
        # Unlike persistent_id, it is not called for numbers, words and containers.
        if isinstance(obj, torch.UntypedStorage):
            return _storage, (self.storages.put(obj) if obj.nbytes() else (0, 0), obj.nbytes())
        is_plain = type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized
        if not is_plain or vars(obj) or obj.is_conj() or obj.is_neg() or obj.device.type == "meta":
            # Pickle's default: by value, with its device. A Parameter's data tensor comes through here again.
            if isinstance(obj, torch.Tensor) and type(obj) is not torch.nn.Parameter and obj.device.type != "cpu":
                raise OtherDeviceError
            return NotImplemented
        shape = (tuple(obj.shape), obj.stride(), obj.storage_offset())
        return _tensor, (obj.untyped_storage(), obj.dtype, *shape, obj.requires_grad)


class _Maker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Memory) -> None:
        super().__init__(file)
        self.memory = memory
        self.made: dict[Place, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        return self.storage if (module, name) == (__name__, _storage.__name__) else super().find_class(module, name)

    def storage(self, place: Place, size: int) -> torch.UntypedStorage:
        if size == 0:
            return torch.UntypedStorage(0)
        if place not in self.made:  # a separate storage: torch.save writes whole storages, and would write all memory
            self.made[place] = _alone(self.memory.at(place, size)).untyped_storage()
        return self.made[place]


def _alone(content: torch.Tensor) -> torch.Tensor:
    """The same bytes, in a storage of exactly their size."""
    return torch.frombuffer(content.numpy(), dtype=torch.uint8)


def _storage(place: Place, size: int) -> torch.UntypedStorage:
    raise NotImplementedError("the pickle is for `restored`, which knows the memory")


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


def copied(content: Any, storages: Storages) -> bytes:
    """A pickle for `restored`; its tensors are in the memory after its `wait`. May raise OtherDeviceError."""
    file = io.BytesIO()
    _Copier(file, storages).dump(content)
    storages.begin()
    return file.getvalue()


def restored(pickled: bytes, memory: Memory) -> Any:
    """The object on the CPU, valid until the memory is written again. `pickled` must come from a process of ours."""
    return _Maker(io.BytesIO(pickled), memory).load()


def copied_weights(weights: Iterable[tuple[str, torch.Tensor]], memory: Memory) -> dict[str, Any]:
    """Copy each weight separately and contiguously, as safetensors requires; they need not exist at the same time."""
    found = {}
    for name, weight in weights:
        flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = (memory.put(flat), flat.numel(), weight.dtype, tuple(weight.shape))
    return found


def shared_weights(weights: dict[str, torch.Tensor], storages: Storages) -> dict[str, Any]:
    """Like `copied_weights`, but storages that consist of these weights are copied whole, for other files too. They
    are in the memory after its `wait`."""
    covered: Counter[int] = Counter()
    for weight in weights.values():
        covered[weight.untyped_storage().data_ptr()] += weight.numel() * weight.element_size()
    found = {}
    for name, weight in weights.items():
        storage, size = weight.untyped_storage(), weight.numel() * weight.element_size()
        if size and weight.is_contiguous() and covered[storage.data_ptr()] >= MOSTLY * storage.nbytes():
            number, begin = storages.put(storage)
            place = (number, begin + weight.storage_offset() * weight.element_size())
            found[name] = (place, size, weight.dtype, tuple(weight.shape))
        else:
            found |= copied_weights([(name, weight)], storages.memory)
    storages.begin()
    return found


def restored_weights(places: dict[str, Any], memory: Memory) -> dict[str, torch.Tensor]:
    found = {}
    for name, (place, size, dtype, shape) in places.items():
        flat = _alone(memory.at(place, size)).view(dtype) if size else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
    return found
