"""Digests name content: not the files that it lies in, and never other content of the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, load_from_disk

from finetune.data import digests
from finetune.data.packing import Blocks, PackedDataset, Tokens


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def test_other_rows_of_one_file_have_another_digest_and_the_same_rows_of_two_files_the_same(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": [f"row {i}" for i in range(20)], "label": list(range(20))})
    for name in ("one", "two"):
        rows.save_to_disk(tmp_path / name)
    one, two = (load_from_disk(tmp_path / name) for name in ("one", "two"))
    parts = [one, one.select(range(10)), one.select(range(10, 20)), one.select([3, 1])]
    found = [digests.of_rows(part) for part in parts]
    assert len(set(found)) == 4
    assert [digests.of_rows(part) for part in parts] == found  # this time from the cache
    assert digests.of_rows(two) == found[0]


def test_packed_tokens_that_were_written_anew_have_another_digest(tmp_path: Path) -> None:
    blocks = Blocks(np.zeros(1, np.int64), np.full(1, 4), np.ones(1, bool), np.array([0, 1]))

    def packed(ids: list[int]) -> PackedDataset:
        np.array(ids, np.uint16).tofile(tmp_path / "tokens.bin")
        np.save(tmp_path / "documents.npy", np.array([0, len(ids)]))
        (tmp_path / "dtype").write_text("uint16")
        return PackedDataset(Tokens.open(tmp_path), blocks, False)

    first = digests.of_rows(packed([1, 2, 3, 4, 5]))
    assert digests.of_rows(packed([1, 2, 3, 4, 6])) != first
    assert digests.of_rows(packed([1, 2, 3, 4, 5])) == first


def test_a_streamed_file_is_told_by_its_size_and_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCK_BYTES", 4)
    path = tmp_path / "rows.jsonl"

    def digest(content: bytes, whole: bool = False) -> str | None:
        path.write_bytes(content)
        return digests.of_files(path, whole=whole)

    first = digest(b"abcd....wxyz")
    assert digest(b"Abcd....wxyz") != first
    assert digest(b"abcd....wxyZ") != first
    assert digest(b"abcd.....wxyz") != first
    assert digest(b"abcd.-..wxyz") == first  # its middle is not read
    assert digest(b"abcd.-..wxyz", whole=True) != digest(b"abcd....wxyz", whole=True)
    assert digests.of_files(tmp_path / "nowhere") is None
