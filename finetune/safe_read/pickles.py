"""The guard before pickles. Opening a pickle runs what it asks for, and DeepSpeed opens its shards as plain pickles
(deepspeed 0.19, runtime/checkpoint_engine/torch_checkpoint_engine.py: `weights_only=False`), as torch does with the
`.metadata` of FSDP's sharded checkpoints (torch/distributed/checkpoint/filesystem.py, read_metadata).

So each file is read here first, by an unpickler that calls nothing but what is on a short list (`stand_ins`). A file
that asks for more is refused before anybody else opens it. Two fences: a pickle's steps are looked at one by one,
without doing any; then torch files are read by torch with `weights_only=True`, and others by Python's own unpickler,
which both find stand-ins alone. Tensors are mapped, not read: the cost is that of the pickle alone.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from finetune.errors import RequestError, first_line
from finetune.safe_read.files import open_plain
from finetune.safe_read.stand_ins import STAND_INS, TORCH_NAMES, Names, RefusedError

OLDEST_FORM = ("pytorch_model", "adapter_model")  # weights of strangers may be in torch's form of before 2020
LARGEST_PICKLE_BYTES = 64 * 2**20  # of names and shapes; a model of a thousand tensors has 0.2 MiB
MOST_STEPS = 1_500_000  # a tensor takes 40 of them, and a million takes two seconds
DEEPEST_TUPLE = 50  # Python's hash of tuples in each other ends the process at some ten thousand
MAPPING = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # Python 2's names, as protocol 2 has them
# torch.save writes none of these: they ask for a name that is on the stack, as STACK_GLOBAL.
NAMING = {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"}
MEND = "Get it from its source, as safetensors if you can; or --resume another checkpoint."
# What a cut or random file makes of the pickle machine (Python's documentation of pickle.UnpicklingError).
BROKEN = (pickle.UnpicklingError, ValueError, TypeError, EOFError, LookupError, AttributeError, ImportError,
          MemoryError, OverflowError, RecursionError, AssertionError)  # fmt: skip


def load_checked(path: Path) -> Any:
    """What torch.save wrote, tensors mapped, DeepSpeed's objects as stand-ins. Raises RequestError."""
    with open_plain(path) as file:
        return guarded(path, lambda: read_torch(file, path, path.name.startswith(OLDEST_FORM)))


def guarded(path: Path, read: Callable[[], Any]) -> Any:
    """What `read` gives; what it refuses of the file at `path` as a RequestError."""
    try:
        return read()
    except RefusedError as error:
        raise RequestError(
            f"{path}: {first_line(error)}. A file that is opened as a pickle can run code, and none of this kind needs "
            f"that: it is not opened. {MEND}"
        ) from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or first_line(error)}).") from error


def load_plain(content: bytes, known: Names) -> Any:
    """A plain pickle that asks for nothing but `known`. Raises RefusedError."""
    try:
        _look_through(content, set(known), may_name=True)
        return _Plain(io.BytesIO(content), known).load()
    except BROKEN as error:
        raise RefusedError(f"cannot be read as a pickle ({type(error).__name__}: {first_line(error)})") from error


class _Plain(pickle._Unpickler):
    """Python's own unpickler, as its documentation restricts it. Not the one in C, which makes a memo as large as its
    largest index: five bytes are 64 GiB."""

    def __init__(self, file: IO[bytes], known: Names) -> None:
        super().__init__(file)
        self.known = known

    def find_class(self, module: str, name: str) -> Any:
        if (found := self.known.get(f"{MAPPING.get(module, module)}.{name}")) is not None:
            return found
        raise RefusedError(f"asks for {module}.{name}")


def read_torch(file: IO[bytes], path: Path | None, may_be_old: bool = False) -> Any:
    """What torch.save wrote. With `path` its tensors are mapped. Raises RefusedError."""
    start = file.read(4)
    file.seek(0)
    is_zip = start == b"PK\x03\x04"  # as torch decides (torch/serialization.py, _is_zipfile)
    if not is_zip and not may_be_old:
        raise RefusedError("is not in the form that torch.save writes (a zip of stored records)")
    if is_zip:
        _check_archive(file)
    else:
        _check_old(file)
    file.seek(0)
    source = str(path) if path is not None and is_zip else file
    stand_ins = [(made, name) for name, made in STAND_INS.items()]
    try:
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip and path is not None)
    except RefusedError as error:
        raise RefusedError(f"holds what no checkpoint does, {error}") from error
    except Exception as error:  # whatever a file made to break it can raise
        raise RefusedError(_reason(error)) from error


def _check_archive(file: IO[bytes]) -> None:
    """The zip before torch opens it: nothing packed, nothing larger than the file, and no name that is not known."""
    size = file.seek(0, 2)
    try:
        archive = zipfile.ZipFile(file)
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
            raise RefusedError("is a zip with packed or locked records, which torch.save does not write")
        if sum(record.file_size for record in records) > size:
            raise RefusedError(f"says that it holds more than its {size:,} bytes")
        pickles = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or pickles[0].filename.count("/") != 1:
            raise RefusedError(f"has {len(pickles)} records named data.pkl, where torch.save writes one")
        if (length := pickles[0].file_size) > LARGEST_PICKLE_BYTES:
            raise RefusedError(f"has a pickle of {length:,} bytes; at most {LARGEST_PICKLE_BYTES:,} are read")
        with archive.open(pickles[0]) as stream:
            _look_through(stream.read(), TORCH_NAMES | set(STAND_INS))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise RefusedError(f"is no whole zip archive with a pickle ({first_line(error)})") from error


def _check_old(file: IO[bytes]) -> None:
    """torch's form of before 2020: magic number, protocol, system, the object and its storages' names, each a pickle,
    before the bytes of the storages. Its older form, a tar, is none."""
    start = io.BytesIO(file.read(LARGEST_PICKLE_BYTES))  # which gives no more than it has, whatever length is asked for
    try:
        for _ in range(5):
            _look_through(start, TORCH_NAMES | set(STAND_INS))
    except ValueError as error:
        raise RefusedError(f"is not in a form that torch.save writes ({first_line(error)})") from error


def _look_through(content: bytes | IO[bytes], known: set[str], may_name: bool = False) -> None:
    """A pickle's steps, none of which is done. Raises RefusedError for too many, for tuples too deep in each other, for
    a memo with holes, for names that are not `known` and, unless `may_name`, for those that it makes up while it is
    loaded; ValueError for what is no pickle."""
    before, depths, memo = "", list[int | None](), dict[int, int]()  # None is a mark; what is no tuple has depth 0
    for step, (opcode, given, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if step > MOST_STEPS:
            raise RefusedError(f"has more than {MOST_STEPS:,} steps")
        if name == "GLOBAL":
            module, _, named = str(given).partition(" ")
            if (asked := f"{MAPPING.get(module, module)}.{named}") not in known:
                raise RefusedError(f"asks for {asked}")
        elif name in NAMING and not may_name:
            raise RefusedError(f"asks for a name that it makes up while it is loaded ({name}{before})")
        if isinstance(given, str):
            before = f" after {given[:60]!r}"
        if name.endswith("PUT") or name == "MEMOIZE":
            place = len(memo) if name == "MEMOIZE" else int(given or 0)
            if place > step:
                raise RefusedError(f"remembers a {place:,}th value at its {step:,}th step")
            memo[place] = (depths[-1] or 0) if depths else 0
            continue
        taken = _take(opcode, depths)
        depth = 1 + max(taken, default=0) if name.startswith("TUPLE") else 0
        if name.endswith("GET"):
            depth = memo.get(int(given or 0), 0)
        elif name == "DUP":
            depth = max(taken, default=0)
        if depth > DEEPEST_TUPLE:
            raise RefusedError(f"has more than {DEEPEST_TUPLE} tuples in each other")
        depths += [None] if name == "MARK" else [depth] * len(opcode.stack_after)


def _take(opcode: Any, depths: list[int | None]) -> list[int]:
    """Off the stack what a step takes from it, and how deep it is."""
    taken: list[int] = []
    for kind in reversed(opcode.stack_before):
        if not depths:
            return taken
        if kind is pickletools.stackslice:
            while depths and depths[-1] is not None:
                taken.append(depths.pop() or 0)
        else:
            taken.append(depths.pop() or 0)
    return taken


def _reason(error: BaseException) -> str:
    """Of torch's many lines the one that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line in lines:
        if "GLOBAL" in line:
            named = line.partition("GLOBAL ")[2].split(" ")[0]
            return f"asks for {named}"
        if "reduce for unrecognized function" in line or "Can only" in line or "Unsupported operand" in line:
            return f"does what no checkpoint does ({line[:160]})"
    return f"cannot be read as what torch.save writes ({type(error).__name__}: {first_line(error, 120)})"
