"""Pictures from folders, CIFAR-10's files and hub layouts: read, checked, split, and changed the same way anywhere."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from finetune.data.cifar import NAMES, read_cifar, read_pickle
from finetune.data.columns import Labels
from finetune.data.image_decoding import Resizer, moments
from finetune.data.image_samples import Augmentation, Pictures
from finetune.data.image_sources import BadImageError, RawSplit, load_images, open_picture
from finetune.data.images import ImageData, prepare_images
from finetune.errors import RequestError
from finetune.run.flags.images import AugmentationArguments, ImageArguments
from finetune.run.flags.text import PreparationArguments
from finetune.run.launch import Launch
from finetune.training.image_trainers import prefers_channels_last


def picture(path: Path, colour: tuple[int, ...] | int, size: tuple[int, int] = (20, 20), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten red pictures and twenty blue ones, of two sizes, and two grey ones among the blue."""
    for i in range(10):
        picture(tmp_path / "data" / "red" / f"{i}.png", (250, 5, 5))
    for i in range(18):
        picture(tmp_path / "data" / "blue" / "deeper" / f"{i}.jpg", (5, 5, 250), (40, 30))
    for i in range(2):
        picture(tmp_path / "data" / "blue" / f"grey{i}.png", 128, mode="L")
    return tmp_path / "data"


def prepare(
    cut: dict[str, Any] | None = None, trained: Labels | None = None, crop: int | None = None, **arguments: Any
) -> ImageData:
    return prepare_images(
        ImageArguments(**arguments),
        PreparationArguments(**(cut or {})),
        AugmentationArguments(crop_padding=crop),
        None,
        seed=7,
        launch=Launch(),
        trained=trained,
    )


def test_a_folder_is_split_by_class_resized_and_said_to_be(folder: Path) -> None:
    (folder / "blue" / "notes.txt").write_text("not a picture")
    data = prepare(train_dir=str(folder), image_size=24)
    assert data.labels.names == ("blue", "red")
    assert data.account.rows == {"train": 27, "validation": 3}
    held_out = data.splits["validation"].labels
    assert held_out is not None
    assert sorted(held_out.tolist()) == [0, 0, 1]
    assert data.splits["train"][0]["pixel_values"].shape == (3, 24, 24)
    assert "24 x 24 pixels from 40 x 30, 20 x 20" in data.describe()
    assert "1 other files not used" in data.describe()
    again = prepare(train_dir=str(folder), image_size=24)
    assert np.array_equal(again.splits["train"].pixels, data.splits["train"].pixels)


def test_a_batch_is_what_the_saved_processor_makes_of_the_files(folder: Path, tmp_path: Path) -> None:
    """Training, evaluation and `pipeline("image-classification")` must see the same numbers."""
    from transformers import AutoImageProcessor

    data = prepare(train_dir=str(folder), validation_dir=str(folder))
    data.processor.save_pretrained(tmp_path / "saved")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "saved")
    files = sorted((folder / "blue").rglob("*.*")) + sorted((folder / "red").rglob("*.png"))
    ours = data.collator([data.splits["validation"][i] for i in range(len(files))])
    by_name = {str(path.relative_to(folder)): path for path in files}
    for row, name in enumerate(sorted(by_name)):
        theirs = processor(Image.open(by_name[name]).convert("RGB"), return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(ours["pixel_values"][row], theirs, atol=1e-5), name
    pixels = np.asarray(data.splits["train"].pixels) / 255
    assert data.account.mean == pytest.approx(pixels.mean(axis=(0, 2, 3)).tolist(), abs=1e-5)
    assert data.account.std == pytest.approx(pixels.std(axis=(0, 2, 3)).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("device", "precision", "side", "is_last"),
    [("cpu", "bf16", 127, False), ("cpu", "fp32", 128, True), ("cuda", "bf16", 32, True), ("cuda", "fp16", 32, True),
     ("cuda", "fp32", 224, False)],
)  # fmt: skip
def test_pictures_lie_channels_last_where_convolutions_are_faster(
    device: str, precision: str, side: int, is_last: bool
) -> None:
    training = SimpleNamespace(device=torch.device(device), bf16=precision == "bf16", fp16=precision == "fp16")
    assert prefers_channels_last(training, side) == is_last


def test_a_batch_is_the_same_in_either_layout() -> None:
    data = prepare()
    rows = [data.splits["validation"][i] for i in range(4)]
    first, last = (replace(data, channels_last=last).collator(rows) for last in (False, True))
    assert torch.equal(first["pixel_values"], last["pixel_values"])
    assert torch.equal(first["labels"], last["labels"])
    assert first["pixel_values"].is_contiguous()
    assert last["pixel_values"].is_contiguous(memory_format=torch.channels_last)


def test_the_digits_are_there_offline_and_left_as_they_are() -> None:
    data = prepare()
    assert data.account.rows == {"train": 1617, "validation": 180}
    assert data.labels.names == tuple("0123456789")
    assert data.splits["train"].augmentation is None
    assert data.splits["train"][0]["pixel_values"].shape == (3, 32, 32)


def test_a_trained_model_keeps_its_order_of_classes(folder: Path) -> None:
    assert prepare(train_dir=str(folder), trained=Labels("classification", ("red", "blue"))).labels.names[0] == "red"
    bare = folder.parent / "bare"
    picture(bare / "one.png", (250, 5, 5))
    data = prepare(test_dir=str(bare), trained=Labels("classification", ("red", "blue")))
    assert data.labels.names == ("red", "blue")
    assert data.names["test"] == ["one.png"]
    assert "labels" not in data.splits["test"][0]


def _cut_off(folder: Path) -> None:
    whole = (folder / "red" / "0.png").read_bytes()
    (folder / "red" / "0.png").write_bytes(whole[: len(whole) // 2])


def _text(folder: Path) -> None:
    (folder / "red" / "0.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n")


def _deep(folder: Path) -> None:
    Image.fromarray(np.full((20, 20), 40_000, dtype=np.uint16)).save(folder / "red" / "0.png")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(_cut_off, "0.png .*", id="cut off"),
        pytest.param(_text, "0.png is not a picture", id="PostScript by the name of a picture"),
        pytest.param(_deep, "0.png has pixels of more than 8 bits", id="16 bits"),
    ],
)
def test_a_bad_picture_is_named_before_training_and_left_out_where_asked(spoil: Any, reason: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(RequestError, match=f"1 of .* pictures that cannot be read: red/{reason}"):
        prepare({"validation_fraction": 0.2}, train_dir=str(folder), validation_dir=str(folder))
    data = prepare({"skip_bad_rows": True}, train_dir=str(folder), validation_dir=str(folder))
    assert data.account.rows == {"train": 29, "validation": 29}
    assert "2 bad pictures left out" in data.describe()


def test_pictures_that_are_all_bad_are_not_to_be_left_out(folder: Path) -> None:
    bad = folder.parent / "bad" / "red"
    bad.mkdir(parents=True)
    (bad / "0.png").write_text("no picture")
    with pytest.raises(RequestError, match=r"0.png is not a picture\. Fix them\.$"):
        prepare({}, train_dir=str(folder), validation_dir=str(bad.parent))


@pytest.mark.parametrize("both", [True, False], ids=["a split of its own", "held out"])
def test_bad_pictures_of_all_splits_are_named_at_once(both: bool, folder: Path) -> None:
    names = [f"red/{i}.png" for i in range(4)]  # with a half held out, by this seed some lie on either side
    for name in names:
        (folder / name).write_text("no picture")
    arguments = {"validation_dir": str(folder)} if both else {}
    with pytest.raises(RequestError) as caught:
        prepare({"validation_fraction": 0.5}, train_dir=str(folder), **arguments)
    said = str(caught.value)
    assert all(said.count(f"{name} is not a picture") == (2 if both else 1) for name in names)
    assert "the train data has 4 of 30 pictures" in said
    assert ("the validation data has 4 of 30 pictures" in said) == both


def test_a_folder_that_a_dot_hides_and_a_class_of_one_picture_are_said(folder: Path) -> None:
    picture(folder / ".green" / "0.png", (5, 250, 5))
    picture(folder / "white" / "0.png", (250, 250, 250))
    (folder / ".cache").mkdir()
    data = prepare(train_dir=str(folder))
    assert data.labels.names == ("blue", "red", "white")
    said = data.describe()
    assert "hidden folders left out: .green; classes with a single picture, for training only: white" in said
    assert "trained on" not in prepare(train_dir=str(folder), validation_dir=str(folder)).describe()


@pytest.mark.parametrize("turn", [None, 1, 3, 6, 8])
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif", "gif", "bmp", "ppm"])
def test_a_picture_of_any_format_is_as_its_camera_held_it(suffix: str, turn: int | None, tmp_path: Path) -> None:
    shown = np.zeros((20, 30, 3), dtype=np.uint8)
    shown[:10, :15] = (250, 10, 10)  # a red corner
    whole, exif = Image.fromarray(shown), Image.Exif()
    if turn:
        exif[274] = turn
    keeps = suffix in ("jpg", "png", "webp", "tif")
    whole.save(tmp_path / f"one.{suffix}", **({"exif": exif} if turn and keeps else {}))
    read = open_picture(tmp_path / f"one.{suffix}")
    assert read.mode == "RGB"
    quarters = {3: 2, 6: 3, 8: 1}.get(turn or 1, 0) if keeps else 0  # counter-clockwise, as numpy turns
    assert np.abs(np.asarray(read).astype(int) - np.rot90(shown, quarters)).mean() < 20


def test_a_pipe_in_the_place_of_a_picture_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "one.png")
    with pytest.raises(BadImageError, match="not a regular file"):
        open_picture(str(tmp_path / "one.png"))


def test_a_picture_larger_than_meant_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path / "large.png", 0, (300, 300), "L")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300 * 200)
    with pytest.raises(BadImageError, match="300 x 300 pixels"):
        open_picture(tmp_path / "large.png")


def _lone_class(folder: Path) -> dict[str, str]:
    return {"train_dir": str(folder / "blue")}


def _empty(folder: Path) -> dict[str, str]:
    (folder.parent / "empty").mkdir()
    return {"train_dir": str(folder.parent / "empty")}


def _empty_class(folder: Path) -> dict[str, str]:
    (folder / "green").mkdir()
    return {"train_dir": str(folder)}


def _splits(folder: Path) -> dict[str, str]:
    picture(folder.parent / "both" / "train" / "red" / "0.png", 0)
    picture(folder.parent / "both" / "val" / "red" / "0.png", 0)
    return {"train_dir": str(folder.parent / "both")}


def _unknown_class(folder: Path) -> dict[str, str]:
    picture(folder.parent / "val" / "green" / "0.png", 0)
    return {"train_dir": str(folder), "validation_dir": str(folder.parent / "val")}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        pytest.param(_lone_class, r"has 1 class\(es\): deeper. Classification needs two", id="one class"),
        pytest.param(_empty, "no subfolder with pictures .* it holds nothing", id="empty folder"),
        pytest.param(_empty_class, "has no picture in green", id="empty class"),
        pytest.param(_splits, "holds train, val, which are splits, not classes", id="splits"),
        pytest.param(_unknown_class, "validation data has classes .* 'green'", id="unknown class"),
        pytest.param(lambda _: {"train_dir": "nowhere"}, "there is no such folder", id="no folder"),
        pytest.param(lambda _: {"cifar_dir": "nowhere"}, "there is no such folder", id="no CIFAR"),
        pytest.param(lambda _: {"image_size": 8, "crop": 8}, "--crop_padding is 8, .* 8 x 8 .* less than 8", id="crop"),
        pytest.param(lambda _: {"dataset_name": "nobody/nothing"}, "Offline. Give a folder with --train_dir", id="hub"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_with_its_mend(
    made: Any, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.files.hub_is_reachable", lambda: False)
    with pytest.raises(RequestError, match=message):
        prepare(**made(folder))


def test_a_hub_data_set_in_a_local_folder_is_read(folder: Path, tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    paths = [str(path) for path in sorted(folder.rglob("*.*")) if path.is_file()]
    ids = [int("red" in path) for path in paths]
    features = Features({"picture": ImageFeature(), "colour": ClassLabel(names=["blue", "red"])})
    table = Dataset.from_dict({"picture": paths, "colour": ids}, features=features)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    table.to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    data = prepare(dataset_name=str(tmp_path / "hub"))
    assert "; reads picture as picture, colour as label)" in data.describe()
    assert data.account.label_counts == {"blue": 18, "red": 9}
    with pytest.raises(RequestError, match=r"no column kind.*picture \(Image\), colour \(ClassLabel\)"):
        prepare(dataset_name=str(tmp_path / "hub"), label_column_name="kind")


def test_a_folder_by_dataset_name_is_read_as_the_imagefolder_of_datasets_reads_it(folder: Path) -> None:
    assert prepare(train_dir=str(folder)).labels.names == ("blue", "red")
    for grey in folder.glob("blue/grey*"):
        grey.unlink()  # with them the depths differ, and it gives no classes
    for file in (folder / "red").iterdir():
        picture(folder / "red" / "bright" / file.name, (250, 5, 5))
        file.unlink()
    assert prepare(dataset_name=str(folder)).labels.names == ("bright", "deeper")
    assert prepare(train_dir=str(folder)).labels.names == ("blue", "red")


# CIFAR-10


def cifar_rows(count: int, seed: int) -> tuple[np.ndarray, list[int]]:
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % 10)
    return random.integers(0, 256, (count, 3072), dtype=np.uint8), labels.tolist()


def write_cifar(folder: Path, kind: str, count: int = 40) -> None:
    """As its authors' files are: bytes as keys, planes of red, green and blue."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")):
        rows, labels = cifar_rows(count, number)
        if kind == "python":
            (folder / name).write_bytes(as_python_2_pickles(rows, labels))
        else:
            records = np.concatenate([np.asarray(labels, dtype=np.uint8)[:, None], rows], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())


def as_python_2_pickles(rows: np.ndarray, labels: list[int]) -> bytes:
    """{"data": rows, "labels": labels} with the opcodes that Python 2 wrote: text as bytes, numpy's names of then."""
    shape = b"".join(b"M" + struct.pack("<H", side) for side in rows.shape)
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    content = b"T" + struct.pack("<i", rows.nbytes) + rows.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(" + shape + b"t" + kind
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}U\x04data" + array + b"I00\n" + content + b"tbsU\x06labels" + listed + b"s."


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_both_versions_of_cifar_give_the_same_pictures(kind: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar", kind)
    found = read_cifar(tmp_path / "cifar")
    pixels, labels = found["train"]
    rows, expected = cifar_rows(40, 1)  # the second batch
    assert pixels.shape == (200, 32, 32, 3)
    assert labels[40:80].tolist() == expected
    assert np.array_equal(pixels[40][5, 9], rows[0].reshape(3, 32, 32)[:, 5, 9])
    raw = load_images(ImageArguments(cifar_dir=str(tmp_path / "cifar")))
    assert raw.names == NAMES
    assert np.array_equal(np.asarray(raw.splits["test"].read(3)), found["test"][0][3])
    data = prepare(cifar_dir=str(tmp_path / "cifar"))
    assert data.account.rows == {"train": 180, "validation": 20, "test": 40}
    assert np.array_equal(data.splits["test"].pixels[3].transpose(1, 2, 0), found["test"][0][3])
    assert data.splits["train"].augmentation == Augmentation(crop_padding=4, horizontal_flip=True, seed=7)


class _RunsCode:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def _calls_touch(marker: Path) -> bytes:
    return pickle.dumps({b"data": _RunsCode(marker)}, protocol=2)


def _calls_system(marker: Path) -> bytes:
    return b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."


def _calls_eval_in_numpy(marker: Path) -> bytes:
    """numpy itself has functions that run code."""
    return b"cnumpy.testing._private.utils\nrunstring\n(S'open(%r, \"w\")'\n}tR." % str(marker)


def _dotted(marker: Path) -> bytes:
    """Protocol 4 looks up attributes of attributes."""
    return b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."


def _object_array(marker: Path) -> bytes:
    return pickle.dumps({b"data": np.array([_RunsCode(marker)], dtype=object)}, protocol=2)


def _fills_a_class(marker: Path) -> bytes:
    """BUILD on a name that was only looked up."""
    return b"cnumpy\nndarray\n}S'x'\nI1\nsb."


def _cut_short(marker: Path) -> bytes:
    return pickle.dumps({b"data": np.zeros((4, 3072), dtype=np.uint8), b"labels": [0] * 4}, protocol=2)[:-200]


def _huge_label(_: Path) -> bytes:
    return pickle.dumps({b"data": np.zeros((4, 3072), dtype=np.uint8), b"labels": [0, 0, 0, 2**70]}, protocol=2)


def _and_touches(marker: Path) -> bytes:
    pixels = np.zeros((4, 3072), dtype=np.uint8)
    return pickle.dumps({b"data": pixels, b"more": _RunsCode(marker), b"labels": [0] * 3}, protocol=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(_calls_touch, "is not a CIFAR-10 batch", id="__reduce__"),
        pytest.param(_calls_system, "is not a CIFAR-10 batch", id="os.system"),
        pytest.param(_calls_eval_in_numpy, "is not a CIFAR-10 batch", id="code by numpy"),
        pytest.param(_dotted, "is not a CIFAR-10 batch", id="dotted name"),
        pytest.param(_object_array, "is not a CIFAR-10 batch", id="array of objects"),
        pytest.param(_fills_a_class, "is not a CIFAR-10 batch", id="fills a class"),
        pytest.param(_and_touches, "4 pictures, but 3 labels", id="a batch that runs code as well"),
        pytest.param(_huge_label, "cannot be read as a pickle", id="a label beyond 64 bits"),
        pytest.param(_cut_short, "cannot be read as a pickle|truncated", id="cut short"),
        pytest.param(
            lambda _: b"<html>Not found</html>", "cannot be read as a pickle .* Unpack", id="a page in its place"
        ),
        pytest.param(lambda _: b"hello, no pickle", "cannot be read as a pickle .* Unpack", id="any text"),
    ],
)
def test_a_pickle_that_asks_for_more_than_numbers_runs_nothing(content: Any, message: str, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    write_cifar(tmp_path / "cifar", "python", count=10)
    (tmp_path / "cifar" / "data_batch_3").write_bytes(content(marker))
    with pytest.raises(RequestError, match=message) as caught:
        read_cifar(tmp_path / "cifar")
    assert "data_batch_3" in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_batch_that_python_3_wrote_again_is_read(protocol: int, tmp_path: Path) -> None:
    rows, labels = cifar_rows(1200, 0)  # more than the thousand that a pickle lists at once
    content = {b"batch_label": b"one of five", b"labels": labels, b"data": rows, b"filenames": [b"a.png"] * 1200}
    (tmp_path / "one").write_bytes(pickle.dumps(content, protocol=protocol))
    pixels, found = read_pickle(tmp_path / "one")
    assert found.tolist() == labels
    assert np.array_equal(pixels[7].transpose(2, 0, 1).reshape(-1), rows[7])


def test_an_array_that_lies_column_by_column_is_refused(tmp_path: Path) -> None:
    rows, labels = cifar_rows(10, 0)
    (tmp_path / "one").write_bytes(pickle.dumps({b"data": np.asfortranarray(rows), b"labels": labels}, protocol=2))
    with pytest.raises(RequestError, match="row by row"):
        read_pickle(tmp_path / "one")


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        pytest.param(
            "binary", lambda path: path.write_bytes(path.read_bytes()[:-7]), "no multiple|records of 3,073", id="cut"
        ),
        pytest.param(
            "binary", lambda path: path.write_bytes(b"\x0b" + path.read_bytes()[1:]), "has the labels .11.", id="label"
        ),
        pytest.param(
            "python", lambda path: path.write_bytes(pickle.dumps([1, 2])), "is not a CIFAR-10 batch", id="a list"
        ),
        pytest.param("python", lambda path: path.unlink(), "there is no such file", id="a batch is missing"),
    ],
)
def test_a_broken_batch_is_named(kind: str, spoil: Any, message: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar", kind, count=10)
    spoil(tmp_path / "cifar" / f"data_batch_2{'.bin' if kind == 'binary' else ''}")
    with pytest.raises(RequestError, match=message):
        read_cifar(tmp_path / "cifar")


# Augmentation


def striped() -> np.ndarray:
    return np.arange(3 * 16 * 16, dtype=np.int64).reshape(3, 16, 16).astype(np.uint8)


def test_a_picture_is_changed_by_its_own_seed_whoever_asks_and_when() -> None:
    change = Augmentation(crop_padding=2, horizontal_flip=True, seed=3)
    pixels = np.stack([striped()] * 40)
    one, other = Pictures(pixels, None, change), Pictures(pixels, None, change)
    for epoch in (0, 1):
        one.begin_epoch(epoch)
        other.begin_epoch(epoch)
        forward = [one[i]["pixel_values"] for i in range(40)]
        backward = [other[i]["pixel_values"] for i in reversed(range(40))]
        assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    one.begin_epoch(0)
    first = [one[i]["pixel_values"] for i in range(40)]
    assert sum(not torch.equal(a, b) for a, b in zip(first, forward, strict=True)) > 30
    assert len({tuple(picture.flatten().tolist()) for picture in first}) > 20


def test_workers_of_a_loader_learn_of_the_epoch() -> None:
    from torch.utils.data import DataLoader

    change = Augmentation(crop_padding=2, horizontal_flip=True, seed=3)
    pictures = Pictures(np.stack([striped()] * 8), None, change)
    loader = DataLoader(pictures, batch_size=4, num_workers=1)
    epochs = []
    for epoch in (0, 1):
        pictures.begin_epoch(epoch)
        epochs.append(torch.cat([batch["pixel_values"] for batch in loader]))
    expected = torch.stack([pictures[i]["pixel_values"] for i in range(8)])
    assert torch.equal(epochs[1], expected)
    assert not torch.equal(epochs[0], epochs[1])


def test_a_crop_moves_over_black_and_a_flip_mirrors() -> None:
    picture = striped() | 1  # nowhere black
    seen_flip = seen_black = False
    for index in range(60):
        changed = Augmentation(crop_padding=3, horizontal_flip=False, seed=0)(picture, 0, index)
        inside = changed[:, 3:-3, 3:-3]
        places = [
            (down, right)
            for down in range(-3, 4)
            for right in range(-3, 4)
            if np.array_equal(inside, picture[:, 3 - down : 13 - down, 3 - right : 13 - right])
        ]
        assert len(places) == 1, "what is left is a part of the picture, moved"
        (down, right), black = places[0], (changed == 0).all(axis=0)
        assert black.sum() == 16 * 16 - (16 - abs(down)) * (16 - abs(right))
        seen_black = seen_black or bool(black.any())
        flipped = Augmentation(crop_padding=0, horizontal_flip=True, seed=0)(picture, 0, index)
        assert np.array_equal(flipped, picture) or np.array_equal(flipped, picture[:, :, ::-1])
        seen_flip = seen_flip or np.array_equal(flipped, picture[:, :, ::-1])
    assert seen_flip
    assert seen_black


def test_pictures_keep_their_labels_where_some_are_held_out_and_of_the_rest_a_sample_is_taken(folder: Path) -> None:
    data = prepare({"max_train_samples": 15, "max_eval_samples": 4, "validation_fraction": 0.3}, train_dir=str(folder))
    for split, rows in (("train", 15), ("validation", 4)):
        pixels, labels = data.splits[split].pixels, data.splits[split].labels
        assert labels is not None
        red, _, blue = pixels.reshape(rows, 3, -1).mean(axis=2).T
        assert np.array_equal(red > blue + 50, labels == data.labels.names.index("red"))
        assert len(set(labels.tolist())) == 2


def test_a_processor_that_fails_is_named_with_the_picture(tmp_path: Path) -> None:
    """A ConvNeXt's wants a shortest edge, and says so by an AttributeError (transformers 5.23)."""
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

    Image.new("RGB", (9, 9)).save(tmp_path / "one.png")
    source = RawSplit([str(tmp_path / "one.png")], ["one.png"], None)
    resizer = Resizer(ConvNextImageProcessorPil(size={"height": 8, "width": 8}), 1)
    with pytest.raises(RequestError, match=r"one\.png: the model's image processor fails .*preprocessor_config\.json"):
        resizer.write(source, tmp_path / "pixels")


def test_means_and_deviations_are_exact_and_take_no_copy_of_the_pictures() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (100, 3, 60, 60), dtype=np.uint8) // np.array(
        [1, 2, 255], dtype=np.uint8
    ).reshape(3, 1, 1)
    tracemalloc.start()
    found = moments(pixels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shares = pixels / 255
    assert found[0] == pytest.approx(shares.mean(axis=(0, 2, 3)), abs=1e-6)
    assert found[1] == pytest.approx(shares.std(axis=(0, 2, 3)), abs=1e-6)
    assert peak < 3 * pixels.nbytes  # floats of all of them take eight times as much, and their squares as much again
