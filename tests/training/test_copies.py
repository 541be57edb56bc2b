"""What is copied for another process comes out there as it was, and is written to the same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.training.checkpoints.beside import Writer
from finetune.training.checkpoints.copies import (
    SEGMENT_BYTES,
    Memory,
    Storages,
    copied,
    copied_weights,
    restored,
    restored_weights,
    shared_weights,
)
from finetune.training.checkpoints.learned import Learned
from finetune.training.checkpoints.manifest import record_of
from finetune.training.checkpoints.writer_process import Copy, Target


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(os.memfd_create("test"))
    yield made
    os.close(made.handle)


def other_side(memory: Memory) -> Memory:
    memory.wait()
    return Memory(memory.handle, memory.segments)


def states() -> dict[str, Any]:
    flat = torch.arange(1000.0)
    own = torch.ones(3)
    own.note = "kept by value"  # type: ignore[attr-defined]
    return {
        "views": [flat[:10], flat[20:40].view(4, 5).t()],
        "kinds": [torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16), torch.tensor(7)],
        "empty": torch.empty(0, 4),
        "trained": torch.nn.Parameter(torch.ones(2)),
        "large": torch.randn(SEGMENT_BYTES // 4 + 1),
        "own": own,
        "numbers": (1, 0.5, None, "text"),
    }


def test_the_file_is_the_one_that_torch_writes_though_all_has_changed_since(memory: Memory, tmp_path: Path) -> None:
    found = states()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    torch.save(found, tmp_path / "one" / "file.pt")
    for _ in range(2):  # the second time in the place of the first
        memory.clear()
        pickled = copied(found, Storages(memory))
    size = memory.bytes
    memory.wait()
    for tensor in [*found["views"], *found["kinds"], found["large"]]:
        tensor.zero_()
    torch.save(restored(pickled, other_side(memory)), tmp_path / "two" / "file.pt")
    assert (tmp_path / "one" / "file.pt").read_bytes() == (tmp_path / "two" / "file.pt").read_bytes()
    assert size <= 3 * SEGMENT_BYTES, "it is used again"


def test_what_its_caller_does_not_keep_is_held_until_it_is_copied(memory: Memory) -> None:
    pickled = copied([torch.full((SEGMENT_BYTES // 4,), float(number)) for number in range(4)], Storages(memory))
    others = [torch.zeros(SEGMENT_BYTES // 4) for _ in range(4)]  # in its place, if it is free
    found = restored(pickled, other_side(memory))
    assert [float(one.min()) for one in found] == [float(one.max()) for one in found] == [0.0, 1.0, 2.0, 3.0]
    assert len(others) == 4


def test_what_no_thread_has_begun_to_copy_is_held_and_copied_by_the_one_that_waits(memory: Memory) -> None:
    memory.pool.shutdown()
    memory.pool = SimpleNamespace(submit=lambda *_: Future())  # type: ignore[assignment]
    pickled = copied([torch.full((SEGMENT_BYTES // 4,), float(number)) for number in range(3)], Storages(memory))
    others = [torch.zeros(SEGMENT_BYTES // 4) for _ in range(3)]
    found = restored(pickled, other_side(memory))
    assert [float(one.min()) for one in found] == [float(one.max()) for one in found] == [0.0, 1.0, 2.0]
    assert len(others) == 3


def test_tensors_that_share_their_memory_still_do(memory: Memory) -> None:
    one, other = restored(copied(states(), Storages(memory)), other_side(memory))["views"]
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert other.stride() == (1, 5)


def test_weights_are_written_as_safetensors_writes_them(memory: Memory, tmp_path: Path) -> None:
    weights = {"b": torch.randn(3, 4).t(), "a": torch.ones(2, dtype=torch.bfloat16), "none": torch.empty(0, 3)}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, tmp_path / "one", {"format": "pt"})
    places = copied_weights(weights.items(), memory)
    save_file(restored_weights(places, other_side(memory)), tmp_path / "two", {"format": "pt"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_so_are_later_ones_of_their_form_by_the_header_of_the_first(memory: Memory, tmp_path: Path) -> None:
    target = Target()
    for turn, size in enumerate((4, 4, 5, 4)):  # another shape makes another form
        weights = {"b": torch.randn(3, size), "a": torch.ones(2, dtype=torch.bfloat16), "none": torch.empty(0, 3)}
        save_file(weights, tmp_path / f"{turn}", {"format": "pt"})
        memory.clear()
        copy = Copy("model.safetensors", copied_weights(weights.items(), memory), {"format": "pt"})
        (folder := tmp_path / f"checkpoint-{turn}").mkdir()
        record = copy.write(folder, other_side(memory), target).result()
        assert (folder / copy.name).read_bytes() == (tmp_path / f"{turn}").read_bytes()
        assert record == record_of(folder / copy.name)


def test_a_folder_that_somebody_has_deleted_is_not_made_again(memory: Memory, tmp_path: Path) -> None:
    """The next run may have: the folder is then its own."""
    gone = tmp_path / "unfinished-checkpoint-2" / "checkpoint-2"
    for copy in (
        Copy("model.safetensors", copied_weights({"a": torch.ones(2)}.items(), memory), {"format": "pt"}),
        Copy("optimizer.pt", copied({"a": torch.ones(2)}, Storages(memory))),
    ):
        with pytest.raises(Exception, match="No such file or directory"):
            copy.write(gone, other_side(memory), Target())
    assert list(tmp_path.iterdir()) == []


class Coded(torch.Tensor):
    """As optimizers with states in 8 bits keep them: a tensor around others, with a device of its own."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, device: str) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=device)

    def __init__(self, codes: torch.Tensor, device: str) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.parametrize(("device", "is_kept"), [("cpu", True), ("meta", False), ("cuda", False)])
def test_a_tensor_that_goes_with_its_device_is_left_to_who_has_that(
    device: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "start", lambda writer: setattr(writer, "process", SimpleNamespace(poll=lambda: None)))
    writer = Writer()
    writer.begin(tmp_path / "checkpoint-1")
    assert writer.folder is not None
    states = {"step": torch.ones(3), "mean": Coded(torch.ones(8, dtype=torch.uint8), device)}
    assert writer.keep(writer.folder / "optimizer.pt", states) is is_kept
    assert writer.names == ["optimizer.pt"] * is_kept
    assert (writer.early is None) is is_kept, "why it is not kept"
    os.close(writer.memory.handle)


def test_a_parameter_is_copied_wherever_it_is(memory: Memory) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.note = "an attribute"  # type: ignore[attr-defined]
    found = restored(copied({"weight": weight}, Storages(memory)), other_side(memory))["weight"]
    assert (found.tolist(), found.note) == ([1.0, 1.0], "an attribute")
    assert type(found) is torch.nn.Parameter


def test_a_form_is_learnt_of_what_is_written_as_it_is(tmp_path: Path) -> None:
    weights, learned = {"a": torch.ones(2), "tied": torch.ones(2)}, Learned()
    save_file({"a": weights["a"]}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    assert learned.look(tmp_path, weights, b"settings") is None
    form = learned.of(weights, b"settings")
    assert form is not None
    assert (form.file, form.names, form.metadata) == ("model.safetensors", ("a",), {"format": "pt"})
    assert form.others == {"config.json": b"{}"}
    assert learned.of({**weights, "a": torch.ones(3)}, b"settings") is None, "another model"
    assert learned.of(weights, b"other settings") is None


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"model.safetensors": {"renamed": torch.ones(2)}}, "other names or values"),
        ({"model.safetensors": {"a": torch.zeros(2)}}, "other names or values"),
        ({"model-1.safetensors": {"a": torch.ones(2)}, "model-2.safetensors": {}}, "in 2 weights files"),
        ({"model.safetensors": {"a": torch.ones(2)}, "other/model.safetensors": {}}, "with other models"),
    ],
    ids=["other names", "other numbers", "several files", "several models"],
)
def test_no_form_is_learnt_of_what_was_changed_on_its_way(written: dict[str, Any], why: str, tmp_path: Path) -> None:
    learned, weights = Learned(), {"a": torch.ones(2)}
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file(content, tmp_path / name)
        assert load_file(tmp_path / name).keys() == content.keys()
    said = learned.look(tmp_path, weights, b"")
    assert said is not None
    assert why in said
    assert learned.of(weights, b"") is None


def test_no_form_is_learnt_of_a_model_without_weights(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert Learned().look(tmp_path, {}, b"") == "its state dict is empty"


def test_weights_in_a_storage_that_they_fill_are_copied_once_for_all_files(memory: Memory) -> None:
    flat, large = torch.arange(2000.0), torch.arange(2000.0)
    weights = {"a": flat[:990].view(99, 10), "b": flat[990:1990], "part": large[:10], "turned": torch.ones(3, 4).t()}
    storages = Storages(memory)
    places = shared_weights(weights, storages)
    used = sum(memory.used)
    assert flat.nbytes <= used < flat.nbytes + 1000, "not the storage of `part`, of which it is little"
    pickled = copied({"module": {"a": weights["a"]}}, Storages(memory, storages))
    assert sum(memory.used) == used
    memory.wait()
    for tensor in (flat, large):
        tensor.zero_()
    found = restored_weights(places, other_side(memory))
    assert [found[name].flatten()[-1].item() for name in weights] == [989.0, 1989.0, 9.0, 1.0]
    assert [found[name].shape for name in weights] == [weight.shape for weight in weights.values()]
    assert restored(pickled, other_side(memory))["module"]["a"].tolist() == found["a"].tolist()
