"""The guard before pickles. Opening a pickle runs what it asks for, and DeepSpeed opens its shards as plain pickles
(deepspeed 0.19, runtime/checkpoint_engine/torch_checkpoint_engine.py: `weights_only=False`), as torch does with the
`.metadata` of FSDP's sharded checkpoints (torch/distributed/checkpoint/filesystem.py, read_metadata).

So each file is read here first, by an unpickler that calls nothing but what is on a short list. A file that asks for
more is refused before anybody else opens it. Two fences: the names in a torch file are looked at one by one, without
loading it; then torch reads it with `weights_only=True`, with stand-ins (`stand_ins`) for the classes of DeepSpeed and
numpy that real checkpoints hold. Tensors are mapped, not read: the cost is that of the pickle alone.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import stat
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from finetune.errors import RequestError, first_line
from finetune.training.checkpoints.metadata_pickle import read_metadata_pickle
from finetune.training.checkpoints.stand_ins import STAND_INS, TORCH_NAMES, RefusedError

WRITTEN_ONLY = ("training_args.bin", "adapter_args.bin")  # the Trainer writes it and nobody opens it
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
OLDEST_FORM = ("pytorch_model", "adapter_model")  # weights of strangers may be in torch's form of before 2020
LARGEST_PICKLE_BYTES = 64 * 2**20  # of names and shapes; a model of a thousand tensors has 0.2 MiB
MAPPING = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # Python 2's names, as protocol 2 has them
# The opcodes that torch.save writes. Those that ask for a name that is on the stack, as STACK_GLOBAL, are none of them.
NAMING = {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"}


def refuse_unsafe(path: Path) -> None:
    """Look at one file of a checkpoint or model folder before a library opens it. Raises RequestError where opening it
    could run code, or where it is none that can be opened. Nothing for a file that nobody opens as a pickle; `.distcp`
    files are looked at with their `.metadata`."""
    if not holds_pickle(path):
        return
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # after links: a device or a pipe never ends
            raise RefusedError("is no regular file")
        if path.name.endswith(".metadata"):
            _check_sharded(path)
        else:
            with path.open("rb") as file:
                _read(file, path, may_be_old=path.name.startswith(OLDEST_FORM))
    except RefusedError as error:
        raise RequestError(
            f"{path}: {first_line(error)}. A file that is opened as a pickle can run code, and no checkpoint of these "
            "recipes needs that: it is not opened. Get it from its source, as safetensors if you can; or --resume "
            "another checkpoint."
        ) from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or first_line(error)}).") from error


def refuse_unsafe_weights(folder: Path) -> None:
    """Of a model folder, the pickles that `from_pretrained` would open: none where there are safetensors."""
    for stem in ("model", "adapter_model"):
        if not list(folder.glob(f"{stem}*.safetensors")):
            for path in sorted(folder.glob(f"{'pytorch_' if stem == 'model' else ''}{stem}*.bin")):
                refuse_unsafe(path)


def load_checked(path: Path) -> Any:
    """What a file of torch.save holds, looked at as `refuse_unsafe` does, with its tensors mapped. DeepSpeed's objects
    are their stand-ins; a ZeRO stage is an integer. Raises RequestError."""
    refuse_unsafe(path)
    with path.open("rb") as file:
        return _read(file, path, may_be_old=path.name.startswith(OLDEST_FORM))


def holds_pickle(path: Path) -> bool:
    """By its name: whether a library that resumes, loads or exports would open it as a pickle."""
    return path.name not in WRITTEN_ONLY and (path.suffix in TORCH_SUFFIXES or path.name.endswith(".metadata"))


def refuse_unsafe_folder(folder: Path) -> None:
    """`refuse_unsafe` of all files below `folder`. Raises RequestError for the first that is not as it should be."""
    for path in sorted(folder.rglob("*")):
        if not path.is_dir():
            refuse_unsafe(path)


def _read(file: IO[bytes], path: Path | None, may_be_old: bool = False) -> Any:
    """What torch.save wrote. With `path` its tensors are mapped. Raises RefusedError."""
    start = file.read(4)
    file.seek(0)
    is_zip = start == b"PK\x03\x04"  # as torch decides (torch/serialization.py, _is_zipfile)
    if not is_zip and not may_be_old:
        raise RefusedError("is not in the form that torch.save writes (a zip of stored records)")
    if is_zip:
        _check_archive(file)
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
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise RefusedError(f"is no whole zip archive ({first_line(error)})") from error
    if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
        raise RefusedError("is a zip with packed or locked records, which torch.save does not write")
    if sum(record.file_size for record in records) > size:
        raise RefusedError(f"says that it holds more than its {size:,} bytes")
    pickles = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1 or pickles[0].filename.count("/") != 1:
        raise RefusedError(f"has {len(pickles)} records named data.pkl, where torch.save writes one")
    if pickles[0].file_size > LARGEST_PICKLE_BYTES:
        raise RefusedError(f"has a pickle of {pickles[0].file_size:,} bytes; at most {LARGEST_PICKLE_BYTES:,} are read")
    try:
        with archive.open(pickles[0]) as stream:
            unknown = _names(stream.read()) - TORCH_NAMES - set(STAND_INS)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise RefusedError(f"has a pickle that cannot be read ({first_line(error)})") from error
    if unknown:
        raise RefusedError(f"asks for {', '.join(sorted(unknown)[:3])}")


def _names(content: bytes) -> set[str]:
    """The names that a pickle asks for. Raises RefusedError for one that makes them up while it is loaded, and
    ValueError for what is no pickle."""
    found = set()
    before = ""
    for opcode, given, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL":
            module, _, name = str(given).partition(" ")
            found.add(f"{MAPPING.get(module, module)}.{name}")
        elif opcode.name in NAMING:
            raise RefusedError(f"asks for a name that it makes up while it is loaded ({opcode.name}{before})")
        if isinstance(given, str):
            before = f" after {given[:60]!r}"
    return found


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


def _check_sharded(path: Path) -> None:
    """The `.metadata` of a sharded checkpoint, and all values beside tensors in its `.distcp` files: torch opens those
    as plain pickles (torch/distributed/checkpoint/default_planner.py, load_bytes)."""
    if path.stat().st_size > LARGEST_PICKLE_BYTES:
        raise RefusedError(f"has {path.stat().st_size:,} bytes; at most {LARGEST_PICKLE_BYTES:,} are read")
    try:
        places = read_metadata_pickle(path.read_bytes())
    except pickle.UnpicklingError as error:
        raise RefusedError(first_line(error)) from error
    for place in places:
        file = path.with_name(place.file)
        if not file.is_file():
            raise RefusedError(f"names {place.file}, which is not beside it")
        if place.offset + place.length > file.stat().st_size:
            raise RefusedError(f"names {place.length:,} bytes at {place.offset:,} of {place.file}, which is shorter")
        if place.is_pickle:
            _check_slice(file, place.offset, place.length)


def _check_slice(path: Path, offset: int, length: int) -> None:
    """One value in a `.distcp` file. Raises RefusedError."""
    if length > LARGEST_PICKLE_BYTES:
        raise RefusedError(f"has a value of {length:,} bytes in {path.name}; at most {LARGEST_PICKLE_BYTES:,} are read")
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    try:
        _read(io.BytesIO(content), None)
    except RefusedError as error:
        raise RefusedError(f"leads to a value in {path.name} that {error}") from error
