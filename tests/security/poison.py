"""Files that run a command when they are opened as plain pickles. The command makes a file, the canary."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

PROTOCOL_2, STOP = b"\x80\x02", b"."


def text(value: str) -> bytes:
    """BINUNICODE."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module: str, name: str, *arguments: str) -> bytes:
    """GLOBAL module name, a tuple of texts, REDUCE."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(map(text, arguments)) + b"tR"


def in_a_dict(value: bytes) -> bytes:
    """{"optimizer_state_dict": {"a": [value]}, "ds_version": "0.19.8"}"""
    inner = b"}" + text("a") + b"]" + value + b"as"
    return b"}(" + text("optimizer_state_dict") + inner + text("ds_version") + text("0.19.8") + b"u"


def touching(canary: Path) -> str:
    return f"touch {canary}"


class Systems:
    """As anybody would write it: __reduce__ to os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (self.command,)


# What is in the pickle, from the command that it is to run.
PAYLOADS: dict[str, Callable[[str], bytes]] = {
    "os.system by REDUCE": lambda run: PROTOCOL_2 + call("os", "system", run) + STOP,
    "posix.system by its true module": lambda run: PROTOCOL_2 + call("posix", "system", run) + STOP,
    "nested in a dict of lists that is right otherwise": lambda run: (
        PROTOCOL_2 + in_a_dict(call("os", "system", run)) + STOP
    ),
    "a name pushed dynamically, by STACK_GLOBAL": lambda run: pickle.dumps({"state": [Systems(run)]}, 4),
    "STACK_GLOBAL from pieces in the memo": lambda run: (
        b"\x80\x04"
        + text("os")
        + b"\x94"
        + b"0"
        + text("system")
        + b"\x94"
        + b"0h\x00h\x01\x93"
        + text(run)
        + b"\x85R."
    ),
    "INST, of protocol 0": lambda run: b"(S" + repr(run).encode() + b"\nios\nsystem\n.",
    "OBJ": lambda run: b"(cos\nsystem\n" + text(run) + b"o.",
    "builtins.eval of code": lambda run: (
        PROTOCOL_2 + call("__builtin__", "eval", f"__import__('os').system({run!r})") + STOP
    ),
    "builtins.exec under Python 3's name": lambda run: (
        PROTOCOL_2 + call("builtins", "exec", f"import os; os.system({run!r})") + STOP
    ),
    "subprocess.getoutput": lambda run: PROTOCOL_2 + call("subprocess", "getoutput", run) + STOP,
    "a function of torch's own that runs commands": lambda run: (
        PROTOCOL_2 + call("torch.utils.collect_env", "run", run) + STOP
    ),
    "_rebuild_from_type_v2, which calls what it is given": lambda run: (
        PROTOCOL_2 + b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n" + text(run) + b"\x85}tR."
    ),
    "a class of DeepSpeed's filled with a __setstate__ and filled again, by BUILD": lambda run: (
        PROTOCOL_2
        + b"cdeepspeed.utils.tensor_fragment\nfragment_address\n)\x81}"
        + text("__setstate__")
        + b"cos\nsystem\nsb"
        + text(run)
        + b"b."
    ),
    "a dotted name below an allowed class": lambda run: (
        PROTOCOL_2 + call("deepspeed.runtime.zero.config", "ZeroStageEnum.__init__.__globals__", run) + STOP
    ),
    "an argument of __reduce_ex__ of numpy, which imports": lambda run: (
        PROTOCOL_2 + call("numpy.testing._private.utils", "runstring", f"import os; os.system({run!r})", "") + STOP
    ),
}

# Whose names are found nowhere or that fail before they call: refused all the same.
HARMLESS_HERE = ("a dotted name below an allowed class", "a function of torch's own that runs commands",
                 "an argument of __reduce_ex__ of numpy, which imports")  # fmt: skip


def torch_zip(content: bytes, **changes: bytes) -> bytes:
    """What torch.save writes, with another data.pkl and, by their names, other records."""
    whole = io.BytesIO()
    torch.save({"weight": torch.zeros(4)}, whole)
    out = io.BytesIO()
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(out, "w") as new:
        for record in old.namelist():
            new.writestr(record, content if record.endswith("/data.pkl") else old.read(record))
        for name, value in changes.items():
            new.writestr(name, value)
    return out.getvalue()


def old_torch(content: bytes) -> bytes:
    """torch's form of before 2020: magic number, protocol, system, object, storages, each a pickle."""
    magic = (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}})
    return b"".join(pickle.dumps(one, 2) for one in magic) + content + pickle.dumps([], 2)


def torch_tar(content: bytes) -> bytes:
    """torch's oldest form, in whose reading CVE-2025-32434 was."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, value in (
            ("sys_info", pickle.dumps({})),
            ("pickle", content),
            ("tensors", content),
            ("storages", content),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(value)
            archive.addfile(entry, io.BytesIO(value))
    return out.getvalue()


def packed_zip(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


def script_zip(content: bytes) -> bytes:
    """A TorchScript archive, which torch.load gives to torch.jit.load."""
    return torch_zip(content, **{"archive/constants.pkl": content, "archive/code/x.py": b"print(1)"})


def two_formats(content: bytes) -> bytes:
    """A pickle from its start, a whole zip from its end."""
    return content + torch_zip(pickle.dumps({}, 2))


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "in torch's zip": torch_zip,
    "as a plain pickle": bytes,
    "in torch's form of before 2020": old_torch,
    "in torch's oldest form, a tar": torch_tar,
    "in a zip that is packed": packed_zip,
    "in a TorchScript archive": script_zip,
    "in a file of two formats": two_formats,
    "in torch's zip with a second data.pkl": lambda content: torch_zip(
        pickle.dumps({}, 2), **{"archive/deeper/data.pkl": content}
    ),
}
