"""Strict JSON, with the place of every fault."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.dsconfig.read import read_config
from finetune.errors import RequestError

FAULTS = [
    pytest.param('{"a": 1,}', r":1:[89]: .*Delete the comma", id="trailing comma, which DeepSpeed alone would take"),
    pytest.param('{\n  "a": 1,\n}', r":(2:9|3:1): .*Delete the comma", id="trailing comma before a line's end"),
    pytest.param('{\n  # why\n  "a": 1}', r":2:3: .*no comments", id="hash comment"),
    pytest.param('{"a": 1 // why\n}', r":1:9: .*no comments", id="slash comment"),
    pytest.param("{'a': 1}", r":1:2: .*double quotes", id="single quotes"),
    pytest.param('{"a": {"b": 1}', r"closing bracket is missing", id="cut off"),
    pytest.param("", r":1:1: .*empty", id="empty file"),
    pytest.param('{"a": 1, "a": 2}', r'"a" is given twice', id="duplicate key"),
    pytest.param('{"a": NaN}', r"NaN is not a JSON number", id="NaN"),
    pytest.param("[1, 2]", r"holds a JSON list", id="not an object"),
    pytest.param("[" * 100_000, r"nested too deeply|Expecting", id="nested without end"),
]


@pytest.mark.parametrize(("text", "message"), FAULTS)
def test_a_fault_is_named_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.json: cannot be read"):
        read_config(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(RequestError, match="not UTF-8"):
        read_config(tmp_path / "latin.json")
    (tmp_path / "big.json").write_text(" " * 1_000_001)
    with pytest.raises(RequestError, match="no DeepSpeed config"):
        read_config(tmp_path / "big.json")


@given(st.binary(max_size=60))
def test_any_bytes_give_a_config_or_our_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "ds.json"
    path.write_bytes(content)
    with contextlib.suppress(RequestError):
        assert isinstance(read_config(path), dict)
