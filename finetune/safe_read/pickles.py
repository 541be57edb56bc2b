"""The guard against malicious pickles. Opening a pickle runs the code it names, and DeepSpeed opens its shards as plain
pickles (deepspeed 0.19, runtime/checkpoint_engine/torch_checkpoint_engine.py: `weights_only=False`), as torch does with
the `.metadata` of FSDP's sharded checkpoints (torch/distributed/checkpoint/filesystem.py, read_metadata).

So each file is first read here, by an unpickler that calls only what is on a short list (`stand_ins`). A file that asks
for more is refused before any library opens it. There are two barriers: first the pickle's opcodes are inspected one by
one without being executed; then torch files are read by torch with `weights_only=True`, and others by Python's
unpickler, and both resolve names only to stand-ins. Tensors are memory-mapped, so only the pickle itself is read.
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

OLDEST_FORM = ("pytorch_model", "adapter_model")  # third-party weights may be in torch's pre-2020 format
LARGEST_PICKLE_BYTES = 64 * 2**20  # names and shapes only; a model of a thousand tensors has 0.2 MiB
MOST_STEPS = 1_500_000  # opcodes: a tensor takes 40, and a million take two seconds
DEEPEST_TUPLE = 50  # hashing some ten thousand nested tuples crashes Python
MAPPING = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # Python 2's names, as in protocol 2
# torch.save writes none of these: they take the name to import from the stack, or make objects in other ways.
NAMING = {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"}
MEND = "Get it from its source, as safetensors if you can; or --resume another checkpoint."
# What unpickling a truncated or random file can raise (Python's documentation of pickle.UnpicklingError).
BROKEN = (pickle.UnpicklingError, ValueError, TypeError, EOFError, LookupError, AttributeError, ImportError,
          MemoryError, OverflowError, RecursionError, AssertionError)  # fmt: skip


def load_checked(path: Path) -> Any:
    """What torch.save wrote, with tensors memory-mapped and DeepSpeed's objects as stand-ins. Raises RequestError."""
    with open_plain(path) as file:
        return guarded(path, lambda: read_torch(file, path, path.name.startswith(OLDEST_FORM)))


def guarded(path: Path, read: Callable[[], Any]) -> Any:
    """What `read` returns; its RefusedError and OSError become a RequestError about the file at `path`."""
    try:
        return read()
    except RefusedError as error:
        raise RequestError(
            f"{path}: {first_line(error)}. Opening a pickle can run code, and no file of this kind needs to: it is not "
            f"opened. {MEND}"
        ) from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or first_line(error)}).") from error


def load_plain(content: bytes, known: Names) -> Any:
    """Load a plain pickle that may import only the names in `known`. Raises RefusedError."""
    try:
        _look_through(content, set(known), may_name=True)
        return _Plain(io.BytesIO(content), known).load()
    except BROKEN as error:
        raise RefusedError(f"cannot be read as a pickle ({type(error).__name__}: {first_line(error)})") from error


class _Plain(pickle._Unpickler):
    """Python's own unpickler, restricted as its documentation shows. Not the C one, which allocates a memo as large as
    the largest index: five bytes of input can make it allocate 64 GiB."""

    def __init__(self, file: IO[bytes], known: Names) -> None:
        super().__init__(file)
        self.known = known

    def find_class(self, module: str, name: str) -> Any:
        if (found := self.known.get(f"{MAPPING.get(module, module)}.{name}")) is not None:
            return found
        raise RefusedError(f"asks for {module}.{name}")


def read_torch(file: IO[bytes], path: Path | None, may_be_old: bool = False) -> Any:
    """What torch.save wrote. With `path`, its tensors are memory-mapped. Raises RefusedError."""
    start = file.read(4)
    file.seek(0)
    is_zip = start == b"PK\x03\x04"  # as torch decides (torch/serialization.py, _is_zipfile)
    if not is_zip and not may_be_old:
        raise RefusedError("is not in the format that torch.save writes (a zip of stored records)")
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
        raise RefusedError(f"holds what no checkpoint holds, {error}") from error
    except Exception as error:  # a malicious file can make torch raise anything
        raise RefusedError(_reason(error)) from error


def _check_archive(file: IO[bytes]) -> None:
    """Check the zip before torch opens it: nothing compressed, nothing larger than the file, and only known names."""
    size = file.seek(0, 2)
    try:
        archive = zipfile.ZipFile(file)
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
            raise RefusedError("is a zip with compressed or encrypted records, which torch.save does not write")
        if sum(record.file_size for record in records) > size:
            raise RefusedError(f"claims to hold more than its {size:,} bytes")
        pickles = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or pickles[0].filename.count("/") != 1:
            raise RefusedError(f"has {len(pickles)} records named data.pkl, where torch.save writes one")
        if (length := pickles[0].file_size) > LARGEST_PICKLE_BYTES:
            raise RefusedError(f"has a pickle of {length:,} bytes; at most {LARGEST_PICKLE_BYTES:,} are read")
        with archive.open(pickles[0]) as stream:
            _look_through(stream.read(), TORCH_NAMES | set(STAND_INS))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise RefusedError(f"is not a complete zip archive with a pickle ({first_line(error)})") from error


def _check_old(file: IO[bytes]) -> None:
    """torch's pre-2020 format: magic number, protocol, system info, the object and the storages' keys, each a pickle,
    followed by the storages' bytes. The still older tar format is refused."""
    start = io.BytesIO(file.read(LARGEST_PICKLE_BYTES))  # so that a huge length in the pickle cannot exhaust memory
    try:
        for _ in range(5):
            _look_through(start, TORCH_NAMES | set(STAND_INS))
    except ValueError as error:
        raise RefusedError(f"is not in a format that torch.save writes ({first_line(error)})") from error


def _look_through(content: bytes | IO[bytes], known: set[str], may_name: bool = False) -> None:
    """Inspect a pickle's opcodes without executing them. Raises RefusedError for too many opcodes, tuples nested too
    deep, a memo with gaps, names that are not in `known` and, unless `may_name`, names computed while loading;
    ValueError for what is not a pickle."""
    before, depths, memo = "", list[int | None](), dict[int, int]()  # None is a mark; anything but a tuple has depth 0
    for step, (opcode, given, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if step > MOST_STEPS:
            raise RefusedError(f"has more than {MOST_STEPS:,} opcodes")
        if name == "GLOBAL":
            module, _, named = str(given).partition(" ")
            if (asked := f"{MAPPING.get(module, module)}.{named}") not in known:
                raise RefusedError(f"asks for {asked}")
        elif name in NAMING and not may_name:
            raise RefusedError(f"asks for a name that it computes while loading ({name}{before})")
        if isinstance(given, str):
            before = f" after {given[:60]!r}"
        if name.endswith("PUT") or name == "MEMOIZE":
            place = len(memo) if name == "MEMOIZE" else int(given or 0)
            if place > step:
                raise RefusedError(f"stores memo entry {place:,} at opcode {step:,}")
            memo[place] = (depths[-1] or 0) if depths else 0
            continue
        taken = _take(opcode, depths)
        depth = 1 + max(taken, default=0) if name.startswith("TUPLE") else 0
        if name.endswith("GET"):
            depth = memo.get(int(given or 0), 0)
        elif name == "DUP":
            depth = max(taken, default=0)
        if depth > DEEPEST_TUPLE:
            raise RefusedError(f"has more than {DEEPEST_TUPLE} nested tuples")
        depths += [None] if name == "MARK" else [depth] * len(opcode.stack_after)


def _take(opcode: Any, depths: list[int | None]) -> list[int]:
    """Pop what an opcode takes off the stack; return the depths of these values."""
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
    """The line of torch's long message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines()]
    for line in lines:
        if "GLOBAL" in line:
            named = line.partition("GLOBAL ")[2].split(" ")[0]
            return f"asks for {named}"
        if "reduce for unrecognized function" in line or "Can only" in line or "Unsupported operand" in line:
            return f"does what no checkpoint needs ({line[:160]})"
    return f"cannot be read as what torch.save writes ({type(error).__name__}: {first_line(error, 120)})"
