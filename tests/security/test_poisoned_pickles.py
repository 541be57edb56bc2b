"""A pickle from a stranger is refused before anything opens it, wherever it lies and however it is made."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from poison import FORMS, HARMLESS_HERE, PAYLOADS, PROTOCOL_2, STOP, call, text, torch_zip, touching

from finetune.errors import RequestError
from finetune.safe_read.checkpoint_files import refuse_unsafe
from finetune.safe_read.pickles import load_checked

PLACES = (
    "global_step2/mp_rank_00_model_states.pt",
    "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "global_step2/layer_00-model_states.pt",
    "global_step2_universal/zero/model.embed.weight/fp32.pt",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state.pth",
    "rng_state_1.pth",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model_fsdp.bin",
    "adapter_model.bin",
    "pytorch_model_fsdp_0/.metadata",
    "comm_hook-rank-0.pt",
)


def assert_refused(path: Path, canary: Path) -> str:
    with pytest.raises(RequestError) as refused:
        refuse_unsafe(path)
    assert not canary.exists()
    message = str(refused.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", [name for name in PAYLOADS if name not in HARMLESS_HERE])
def test_the_payload_is_live(name: str, tmp_path: Path) -> None:
    """Or the other tests would show nothing: opened as DeepSpeed does, it runs."""
    canary = tmp_path / "canary"
    path = put(tmp_path / "x.pt", torch_zip(PAYLOADS[name](touching(canary))))
    with suppress(TypeError, AttributeError, RuntimeError, pickle.UnpicklingError):  # after it ran
        torch.load(path, weights_only=False)
    assert canary.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_shard_is_refused_with(payload: str, form: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = put(tmp_path / PLACES[1], FORMS[form](PAYLOADS[payload](touching(canary))))
    assert_refused(path, canary)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_weights_in_the_old_form_are_refused_with(payload: str, tmp_path: Path) -> None:
    """Old weights are let in by torch's own unpickler, which must refuse the same."""
    canary = tmp_path / "canary"
    path = put(
        tmp_path / "pytorch_model.bin", FORMS["in torch's form of before 2020"](PAYLOADS[payload](touching(canary)))
    )
    assert_refused(path, canary)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("payload", ["os.system by REDUCE", "a name pushed dynamically, by STACK_GLOBAL"])
def test_it_is_refused_at(place: str, payload: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    content = PAYLOADS[payload](touching(canary))
    path = put(tmp_path / place, content if place.endswith(".metadata") else torch_zip(content))
    message = assert_refused(path, canary)
    assert "system" in message  # the offender has its name


def test_what_nobody_opens_is_left_alone(tmp_path: Path) -> None:
    """The Trainer writes training_args.bin, and nothing reads it."""
    canary = tmp_path / "canary"
    refuse_unsafe(put(tmp_path / "training_args.bin", torch_zip(PAYLOADS["os.system by REDUCE"](touching(canary)))))
    assert not canary.exists()


def test_a_value_in_a_distcp_file_is_refused(tmp_path: Path) -> None:
    """Beside tensors a sharded checkpoint holds pickles, which torch opens without weights_only."""
    import torch.distributed.checkpoint as dcp

    canary, folder = tmp_path / "canary", tmp_path / "pytorch_model_fsdp_0"
    dcp.save({"weight": torch.ones(3), "step": 3}, checkpoint_id=folder, no_dist=True)
    refuse_unsafe(folder / ".metadata")
    poisoned = torch_zip(PAYLOADS["os.system by REDUCE"](touching(canary)))
    (data,) = folder.glob("*.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "step")
    place.offset, place.length = data.stat().st_size, len(poisoned)
    data.write_bytes(data.read_bytes() + poisoned)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "os.system" in assert_refused(folder / ".metadata", canary)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "..", "a\\b", ""])
def test_metadata_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    put(tmp_path / ".metadata", pickle.dumps(metadata))
    assert "outside its folder" in assert_refused(tmp_path / ".metadata", tmp_path / "canary")


def test_a_sharded_checkpoint_of_python_313_is_taken_there_alone(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    of_another = pickle.dumps(pickle.loads((tmp_path / ".metadata").read_bytes()), 2)
    of_another = of_another.replace(b"cpathlib._local\n", b"cpathlib\n")
    put(tmp_path / ".metadata", of_another)
    refuse_unsafe(tmp_path / ".metadata")
    put(tmp_path / ".metadata", of_another.replace(b"cpathlib\n", b"cpathlib._local\n"))
    refused = pytest.raises(RequestError, match="as only Python 3")
    with nullcontext() if sys.version_info >= (3, 13) else refused:
        refuse_unsafe(tmp_path / ".metadata")


def bytearray_bomb() -> bytes:
    return torch_zip(PROTOCOL_2 + b"c__builtin__\nbytearray\n" + b"\x8a\x06\x00\x00\x00\x00\x00\x10\x85R" + STOP)


def long_record() -> bytes:
    """A zip whose directory says that a record has 2**31 bytes."""
    whole = bytearray(torch_zip(pickle.dumps({}, 2)))
    at = whole.rindex(b"PK\x01\x02")
    whole[at + 20 : at + 28] = struct.pack("<II", 2**31, 2**31)
    return bytes(whole)


def packed_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 30_000_000)
    return out.getvalue()


def array_with_flags() -> bytes:
    """An array of objects: numpy would take any bytes for their addresses."""
    return torch_zip(pickle.dumps({"numpy": np.array([{}, None], dtype=object)}, 2))


BROKEN = {
    "nothing": lambda: b"",
    "four bytes": lambda: b"PK\x03\x04",
    "a page of HTML": lambda: b"<html>Not found</html>",
    "half of a zip": lambda: torch_zip(pickle.dumps({}, 2))[:200],
    "an array of two thirds of the memory": bytearray_bomb,
    "a record that is longer than the file": long_record,
    "30 MB packed into 30 kB": packed_bomb,
    "numpy objects": array_with_flags,
    "an endless LONG": lambda: torch_zip(b"\x80\x02\x8b\xff\xff\xff\x7f."),
    "10,000 brackets without end": lambda: torch_zip(b"\x80\x02" + b"]" * 10_000),
    "a pickle that takes from an empty stack": lambda: torch_zip(b"\x80\x02R."),
    "a memo that is not there": lambda: torch_zip(b"\x80\x02h\x07."),
    "the class of DeepSpeed's with an attribute that it has not": lambda: torch_zip(
        b"\x80\x02cdeepspeed.utils.tensor_fragment\nfragment_address\n)\x81}" + text("__class__") + b"K\x01sb."
    ),
    "a ZeRO stage that is a text": lambda: torch_zip(
        PROTOCOL_2 + call("deepspeed.runtime.zero.config", "ZeroStageEnum", "3") + STOP
    ),
    "an attribute of a class, by getattr": lambda: torch_zip(
        PROTOCOL_2
        + b"cbuiltins\ngetattr\n(cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
        + text("__class__")
        + b"tR"
        + STOP
    ),
    "an attribute of another class, by getattr": lambda: torch_zip(
        PROTOCOL_2 + b"cbuiltins\ngetattr\n(ctorch.storage\nUntypedStorage\n" + text("from_file") + b"tR" + STOP
    ),
    "a codec that is none": lambda: torch_zip(PROTOCOL_2 + call("_codecs", "encode", "x", "no such codec") + STOP),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_is_refused_that_holds(name: str, tmp_path: Path) -> None:
    assert_refused(put(tmp_path / "optimizer.pt", BROKEN[name]()), tmp_path / "canary")


def test_a_pipe_and_a_dangling_link_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "zero.pt").symlink_to("/dev/zero")
    for name in ("pipe.pt", "link.pt", "zero.pt"):
        assert_refused(tmp_path / name, tmp_path / "canary")


def states(kind: str) -> Any:
    """What real checkpoints hold beside tensors, made by the classes that make it."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = LossScaler(scale=1.0)
    if kind == "fp16":
        scaler = DynamicLossScaler(
            2.0**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False,
            raise_error_at_min_scale=True, dtype=torch.half,
        )  # fmt: skip
    buffer = torch.arange(5, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    buffer.ds_id = 3  # ZeRO-3 marks its buffers, and torch then writes _rebuild_from_type_v2
    return {
        "loss_scaler": scaler,
        "zero_stage": ZeroStageEnum(3),
        "param_slice_mappings": [{"w": fragment_address(numel=5, start=0)}],
        "fp32_flat_groups": [buffer, torch.nn.Parameter(torch.ones(2))],
        "numpy": np.random.get_state(),
        "shapes": {"w": torch.Size([5])},
        "names": {"a", "b"},
        "dtype": torch.bfloat16,
    }


# Python 3.11.0 to 3.11.3 pickle a member of an enumeration by its name, all others by its value.
BY = {
    "name": lambda member, protocol: (getattr, (type(member), member.name)),
    "value": lambda member, protocol: (type(member), (member.value,)),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_the_states_of_real_checkpoints_are_taken(
    kind: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", BY[by])
    torch.save(states(kind), tmp_path / "x_optim_states.pt")
    assert load_checked(tmp_path / "x_optim_states.pt")["zero_stage"] == 3


@pytest.mark.parametrize("by", BY)
def test_a_sharded_checkpoint_is_taken(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", BY[by])
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert (b"getattr" in (tmp_path / ".metadata").read_bytes()) is (by == "name")
    refuse_unsafe(tmp_path / ".metadata")


def test_old_weights_without_code_are_taken(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    refuse_unsafe(tmp_path / "pytorch_model.bin")
